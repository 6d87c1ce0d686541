"""An item is a graph of steps: what one reads another writes, what is done is skipped, what cannot
run says why.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bild_lab.engine.models import device
from bild_lab.errors import UserError
from bild_lab.lab.config.entrypoint import Stopped
from bild_lab.papers.published import SCALES, published_names
from bild_lab.papers.runs import step_processes, step_runs, steps
from bild_lab.papers.runs.machine import (
    Machine,
    Placement,
    blocked_by,
    describe_placement,
    machine_of,
    needs_of,
    placement_of,
)
from bild_lab.papers.runs.needs import describe_needs
from bild_lab.papers.runs.paper_runs import configurations
from bild_lab.papers.runs.step_processes import is_done
from bild_lab.papers.runs.step_runs import plan, run_steps, submit_steps
from bild_lab.papers.runs.steps import Step, output_folders, steps_of
from scripts import paper_run
from tests.papers.test_paper_runs import setting

ITEMS = [(item, scale) for item in published_names() for scale in SCALES]
UNMADE = {"bita_falcon_40b"}  # no adapter can be trained for Falcon
HERE = Machine("a100", 80, gated=False)


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder: what is in the project's outputs would count as written."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.fast("bild_fig10-paper", "spec_tab5-small")
@pytest.mark.parametrize(("item", "scale"), ITEMS)
def test_what_a_step_reads_another_one_before_it_writes(item: str, scale: str) -> None:
    found = steps_of(item, scale)
    for place, step in enumerate(found):
        assert set(step.missing) <= UNMADE, step
        before = found[:place]
        assert set(step.reads) - UNMADE <= {one.writes for one in before}, step.command
        assert set(step.after) <= {one.command for one in before}, step.command
    assert [step.figure for step in found].count(item) == 1 and found[-1].figure == item


def test_a_step_whose_recipe_is_gone_says_what_nothing_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    all_recipes = steps.recipes_of
    monkeypatch.setattr(
        steps,
        "recipes_of",
        lambda cfg, left_out: [
            recipe for recipe in all_recipes(cfg, left_out) if recipe.folder != "toy_answers"
        ],
    )
    (trained,) = [step for step in steps_of("bild_fig8", "small") if step.missing]
    assert trained.command.startswith("python scripts/align.py") and trained.missing == (
        "toy_answers",
    )
    assert blocked_by(trained, HERE).startswith("nothing writes outputs/toy_answers: put it there")
    states = [
        (step.writes, state[:14]) for step, state in plan(steps_of("bild_fig8", "small"), HERE)
    ]
    assert states == [
        ("bild_generate_small", "to do"),
        ("toy_aligned", "nothing writes"),
        ("quality_bild_fig4_small_bild_toy_aligned_toy", "it waits for p"),
        ("bild_fig4_small", "it waits for p"),
        ("figures/bild_fig8", "no step of it "),
    ]


def test_a_folder_is_read_where_a_value_is_a_path_in_it() -> None:
    values = {
        "pair": {"draft": "outputs/aligned/checkpoint", "target": "toy:large"},
        "policy": {"adapter": "outputs/one/adapter,outputs/two/adapter", "layers": [1, 2]},
        "calibration": ["outputs/answers", "outputs/answers"],
        "template": "translate outputs/text to French", "path": "elsewhere/outputs/other", "seed": 1,
    }  # fmt: skip
    assert output_folders(values) == ["aligned", "one", "two", "answers"]


@pytest.mark.slow
def test_falcon_is_refused_before_it_answers_any_question_for_an_adapter() -> None:
    _, measured, drawn = plan(
        steps_of("bita_tab7", "paper", ["pair=falcon_40b"]), replace(HERE, tries=True)
    )
    assert measured[1].startswith("nothing writes outputs/bita_falcon_40b: put it there")
    assert drawn[1] == "no step of it can run"


@pytest.mark.slow
def test_a_pair_waits_for_its_own_training_alone() -> None:
    by_folder = {step.writes: step for step in steps_of("bita_tab1")}
    assert set(by_folder["bita_llama2_70b_chat"].reads) == {
        f"calibration_llama2_70b_chat_{name}"
        for name in ("lima", "alpaca_gpt4", "code_alpaca", "open_platypus", "cip")
    }
    assert "bita.mask_tokens=4" in by_folder["bita_llama2_70b_chat"].command
    sweeps = [step for step in steps_of("bita_tab1") if "experiment=bita/tab1" in step.command]
    read = {re.search(r"pair=(\w+)", step.command)[1]: step.reads for step in sweeps}
    assert len(sweeps) == 5 and all(folders == (f"bita_{pair}",) for pair, folders in read.items())
    # data sets, which need nothing of their own
    assert all(len(step.settings) == 4 for step in sweeps)


@pytest.mark.slow
def test_overrides_go_to_the_steps_that_have_the_key() -> None:
    found = [
        shlex.split(step.command)
        for step in steps_of("spec_tab3", "small", ["measure.warmup=1", "dataset.limit=6"])
    ]
    assert [("dataset.limit=6" in words, "measure.warmup=1" in words) for words in found] == [
        (True, False), (True, True), (True, True), (False, False),
    ]  # fmt: skip


def test_what_is_learned_is_the_papers_whatever_is_measured() -> None:
    """Answers to the questions of MT-Bench would be learned before it is measured."""
    overrides = ["pair=llama2_7b_chat", "dataset=mt_bench", "dataset.limit=80", "train.seed=1"]
    answers, learned = {}, []
    for step in steps_of("bita_tab1", overrides=overrides):
        words = shlex.split(step.command)
        if words[1] == "scripts/generate_calibration.py":
            answers[step.writes.removeprefix("calibration_llama2_7b_chat_")] = words
        elif words[1] == "scripts/train_bita.py":
            learned = words
        elif words[1] == "run.py":
            assert {"dataset=mt_bench", "dataset.limit=80"} <= set(words)
    limits = {"cip": "dataset.limit=50000"}
    assert list(answers) == ["lima", "alpaca_gpt4", "code_alpaca", "open_platypus", "cip"]
    for name, words in answers.items():
        chosen = [word for word in words if word.startswith("dataset")]
        assert chosen == [f"dataset={name}", *filter(None, [limits.get(name)])]
    assert "train.seed=1" in learned and not any(word.startswith("dataset") for word in learned)


@pytest.mark.slow
def test_ngrams_of_the_paper_are_counted_in_all_texts() -> None:
    found = steps_of("spec_tab3", overrides=["dataset.limit=100", "pair=t5_11b_small"])
    counted = [words for step in found if "module=ngram" in (words := shlex.split(step.command))]
    assert len(counted) == 2 and not any("dataset.limit=100" in words for words in counted)


@pytest.mark.fast("dataset")
@pytest.mark.parametrize(
    ("override", "measured"),
    [
        ("pair=mt5_iwslt2017_aligned", {("mt5_iwslt2017_aligned", "iwslt2017")}),
        ("dataset=wmt14", {("mt5_wmt14", "wmt14"), ("mt5_wmt14_aligned", "wmt14")}),
        ("dataset=multi30k", {("mt5_iwslt2017", "multi30k"), ("t5_xsum", "multi30k")}),
    ],
    ids=["pair", "dataset", "own data"],
)
def test_a_pair_is_measured_on_its_own_data(override: str, measured: set) -> None:
    """The fault: Figure 4 with the pair of IWSLT measured it on WMT and on summaries, too. Data that
    no command names take the place of all.
    """
    found = set()
    for step in steps_of("bild_fig4", overrides=[override]):
        if step.command.startswith("python run.py experiment=bild/fig4"):
            (cfg,) = configurations(tuple(shlex.split(step.command)))
            found.add((cfg.pair.name, cfg.dataset.name))
    assert found >= measured and (override == "dataset=multi30k" or found == measured)


@pytest.mark.slow
def test_what_only_another_pairs_commands_read_is_not_trained() -> None:
    found = [step.writes for step in steps_of("spec_tab3", overrides=["pair=t5_11b_small"])]
    assert {"ngrams_wmt14", "ngrams_cnn_dailymail", "spec_tab3_paper"} < set(found)
    assert not any("lm1b" in folder for folder in found)


@pytest.mark.fast("data")
@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("dataset.path=mine", "each of iwslt2017, wmt14, .* with dataset=NAME"),
        ("dataset.hub_id=me/mine", "each of iwslt2017, wmt14, .* with dataset=NAME"),
        ("pair.target=mine", "each of .*, .* in bild_fig4; choose one with pair=NAME"),
    ],
    ids=["data", "hub", "pair"],
)
def test_data_or_a_model_in_the_place_of_several_is_refused(override: str, told: str) -> None:
    """Fault: each pair was measured on one file, under the names of the paper's data sets."""
    with pytest.raises(
        UserError, match=f"{override.partition('=')[0]} would take the place of {told}"
    ):
        steps_of("bild_fig4", overrides=[override])


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [["dataset=wmt14", "dataset.path=mine"], ["dataset=multi30k", "dataset.path=mine"]],
    ids=["chosen", "own"],
)
def test_data_of_ones_own_may_take_the_place_of_one(overrides: list[str]) -> None:
    commands = [step.command for step in steps_of("bild_fig4", overrides=overrides)]
    assert any("dataset.path=mine" in command for command in commands)


def test_only_models_that_steps_decode_with_are_replaced() -> None:
    """Fault: the drafter of `generate`, which has none, and the pair that trainings have by default
    counted as others that one's own model would take the place of.
    """
    commands = [step.command for step in steps_of("bild/fig8", overrides=["pair.draft=mine"])]
    assert any("pair.draft=mine" in command for command in commands)
    with pytest.raises(UserError, match=r"of each of \S+vicuna-7b\S+, \S+13b\S+, \S+33b\S+ in"):
        steps_of("bita_fig7", overrides=["pair.target=mine"])


def test_a_model_that_no_choice_makes_the_only_one_is_left_out() -> None:
    """Fault: the message said to choose a pair where one was chosen."""
    told = (
        r"each of .*mT5-large.*, .*mT5-small.* in bild/fig10; leave it out, and run it with python"
    )
    with pytest.raises(UserError, match=told):
        steps_of("bild/fig10", overrides=["pair=mt5_iwslt2017", "pair.target=mine"])


def test_an_override_that_no_step_has_and_an_unknown_scale_are_refused() -> None:
    with pytest.raises(UserError, match="no step of spec_tab4 has the key dataset.limits"):
        steps_of("spec_tab4", "small", ["dataset.limits=6"])
    with pytest.raises(UserError, match="scale must be one of paper, small, got 'tiny'"):
        steps_of("spec_tab4", "tiny")
    # all steps would write one folder, and the figure would read its own
    with pytest.raises(UserError, match="got name=mine; leave it out"):
        steps_of("spec_tab4", "small", ["name=mine"])


@pytest.mark.parametrize(
    ("machine", "changes", "told"),
    [
        (HERE, {}, None),
        (replace(HERE, room_gb=None), {}, "no GPU here"),
        (replace(HERE, room_gb=None, tries=True), {}, None),
        (replace(HERE, room_gb=2), {}, "memory: 4 GB, here are 1 × 2 GB; runtime.device_map=auto"),
        (
            replace(HERE, gated=True),
            {"target": "meta-llama/Llama-2-70b-chat-hf"},
            "memory: 278 GB, here are 1 × 80 GB",
        ),
        (replace(HERE, room_gb=2, gpus=4), {}, "memory: 4 GB, here are 4 × 2 GB"),
        (
            replace(HERE, room_gb=2, gpus=4),
            {"spread": True},
            "memory: 4 GB, here are 4 × 2 GB; 5 such GPUs hold it",
        ),
        (replace(HERE, room_gb=2, gpus=5), {"spread": True}, None),
        (HERE, {"target": None}, "it takes models of your own"),
        (replace(HERE, room_gb=None), {"target": "toy:large", "drafts": ("toy:small",)}, None),
    ],
)
def test_a_step_that_cannot_run_here_says_why(
    machine: Machine, changes: dict, told: str | None
) -> None:
    found = blocked_by(Step("python run.py", "x", (), (), settings=(setting(**changes),)), machine)
    assert found is None if told is None else found.startswith(told)


class Runs:
    """In place of processes: each writes a file into its folder, and those named in `failing`
    fail.
    """

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.failing: set[str] = set()

    def __call__(self, command: list[str], **options: object) -> SimpleNamespace:
        words = " ".join(command[4:])
        self.ran.append(words)
        failed = any(one in words for one in self.failing)
        if not failed:
            (name,) = [one.partition("=")[2] for one in command if one.startswith("name=")]
            folder = (
                Path("outputs")
                / name
                / ("points/" + words.replace("/", "_") if command[3] == "run" else "")
            )
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / "result.json").exists():  # a finished point is never changed
                (folder / "result.json").write_text(words)
        status = int(failed)
        return SimpleNamespace(poll=lambda: status, wait=lambda: status, returncode=status)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    several = Runs()
    monkeypatch.setattr(step_processes, "subprocess", SimpleNamespace(Popen=several))
    return several


A = Step("python scripts/a.py name=a", "a", (), ())
B = Step("python run.py name=b x=1", "b", ("a",), (A.command,))
C = Step("python run.py name=b x=2", "b", (), ())


def run(several: list[Step], machine: Machine = HERE) -> tuple[bool, str]:
    said: list[str] = []
    return run_steps(several, machine, said.append), "\n".join(said)


def test_what_is_done_is_skipped_until_what_it_read_or_wrote_changes(runs: Runs) -> None:
    assert run([A, B, C])[0] and runs.ran == ["name=a", "name=b x=1", "name=b x=2"]
    runs.ran.clear()
    assert run([A, B, C])[0] and runs.ran == []
    # a point is gone, which the other step of the folder has noted too
    shutil.rmtree("outputs/b/points/name=b x=1")
    assert run([A, B, C])[0] and runs.ran == ["name=b x=1", "name=b x=2"]
    runs.ran.clear()
    Path("outputs/a/result.json").write_text("another model")
    assert run([A, B, C])[0] and runs.ran == ["name=a", "name=b x=1"]
    runs.ran.clear()
    assert not is_done(replace(A, configuration="another limit"))
    (Path("outputs/.steps")).rename("elsewhere")
    assert not any(map(is_done, (A, B, C)))


def test_a_plan_says_what_runs_again_and_what_cannot(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def statuses(several: list[Step]) -> list[str]:
        return [status for _, status in plan(several, HERE)]

    assert run([A, B])[0] and statuses([A, B]) == ["done", "done"]
    # what reads the results of a step that runs again does so, too
    assert statuses([replace(A, configuration="another"), B]) == ["to do", "to do"]
    timed = Step("python run.py experiment=bita/generate name=g", "g", (), ())
    drawn = Step("python scripts/figures.py x", "figures/x", ("g",), (timed.command,), figure="x")
    assert statuses([timed, drawn]) == ["to do", "no step of it can run"]
    monkeypatch.setattr(step_runs, "blocked_by", lambda step, _: "no room" if step is C else None)
    waiting = replace(B, after=(C.command,))
    assert statuses([C, waiting]) == ["no room", f"it waits for {C.command}"]


def test_a_new_file_changes_what_a_step_read_and_not_what_it_wrote(runs: Runs) -> None:
    Path("outputs/a/inner").mkdir(parents=True)
    assert run([A, B, C])[0]
    runs.ran.clear()
    os.utime("outputs/a/inner", (0, 0))  # of a folder nothing is read
    assert run([A, B, C])[0] and runs.ran == []
    Path("outputs/a/more.json").write_text("{}")
    assert run([A, B, C])[0] and runs.ran == ["name=b x=1"]


def test_a_figure_is_drawn_again_where_one_of_its_files_is_gone_or_another() -> None:
    drawn = Step("python scripts/figures.py x", "figures/x", ("b",), (), figure="x")
    files = [Path(f"outputs/figures/x.{kind}") for kind in ("md", "csv")]
    for change in (Path.unlink, lambda file: file.write_text("another")):
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("drawn")
        step_processes.finish(drawn, 0)
        assert is_done(drawn)
        change(files[1])
        assert not is_done(drawn)


def test_a_step_that_a_signal_ended_has_failed_with_the_end_of_its_log() -> None:
    log = Path("log")
    log.write_bytes(b"".join(b"line %d \xff\n" % number for number in range(100)))
    Path("outputs/a").mkdir(parents=True)
    Path("outputs/a/result.json").write_text("half")
    with pytest.raises(UserError, match="failed with status -9: python scripts/a.py") as failed:
        step_processes.finish(A, -9, log)
    assert "| line 99 " in str(failed.value) and "line 0 " not in str(failed.value)
    assert not is_done(A)


def test_another_version_of_the_code_looks_again(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run([A])[0] and is_done(A)
    monkeypatch.setattr(step_processes, "_code_digest", lambda: "another")
    assert not is_done(A)


def test_after_a_failure_what_does_not_depend_on_it_runs(runs: Runs) -> None:
    runs.failing = {"name=a"}
    good, said = run([A, B, C])
    assert not good and runs.ran == ["name=a", "name=b x=2"]
    assert "step 1 of 3 was not done: python scripts/a.py name=a\n  failed with status 1" in said
    assert (
        "step 2 of 3 was not done: python run.py name=b x=1\n  it waits for python scripts/a.py"
        " name=a" in said
    )
    runs.failing = set()
    assert run([A, B, C])[0] and runs.ran == ["name=a", "name=b x=2", "name=a", "name=b x=1"]


def test_a_command_that_writes_nothing_is_not_done(runs: Runs) -> None:
    good, said = run([replace(A, writes="c")])
    assert not good and "wrote nothing to outputs/c" in said


class Processes:
    """In place of processes that run for some looks: what each was given, and which ran together.

    looks: at a process before it has ended, by a word of its command; others end at once.
    """

    def __init__(self, looks: Mapping[str, int]) -> None:
        self.looks, self.running, self.beside = looks, {}, {}
        self.environments: dict[str, Mapping[str, str]] = {}
        self.options: dict[str, Any] = {}  # of the last one
        self.failing: set[str] = set()

    def __call__(self, command: list[str], env: Mapping[str, str], **options: Any) -> Any:
        (name,) = [word.partition("=")[2] for word in command if word.startswith("name=")]
        left = next((count for word, count in self.looks.items() if word in command), 0)
        status = int(name in self.failing)
        self.environments[name], self.options = env, options
        options["stdout"].write(b"begun\nno such file\n")
        self.beside[name] = set(self.running)
        for other in self.running:
            self.beside[other].add(name)
        process = SimpleNamespace(left=left, returncode=None)

        def poll() -> int | None:
            process.left -= 1
            if process.left < 0 and process.returncode is None:
                Path(f"outputs/{name}").mkdir(parents=True, exist_ok=True)
                Path(f"outputs/{name}/made").write_text(name)
                process.returncode = status
                del self.running[name]
            return process.returncode

        process.poll = poll
        self.running[name] = process
        return process


def made(name: str, after: Sequence[Step] = (), script: str = "match_rates", **facts: Any) -> Step:
    command = f"python scripts/{script}.py name={name}"
    return Step(command, name, (), tuple(step.command for step in after), **facts)


NODE = Machine("a100", 80, gated=True, gpus=4, devices=("0", "3", "5", "6"))


def test_steps_side_by_side_have_gpus_of_their_own_and_a_log_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processes = Processes({f"name={name}": 3 for name in "abcde"})
    monkeypatch.setattr(
        step_processes, "subprocess", SimpleNamespace(Popen=processes, DEVNULL=None)
    )
    monkeypatch.setattr(step_runs, "POLL_S", 0.0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(device, "usable_cores", lambda: 16)
    processes.failing = {"b"}
    first = [made(name) for name in "abcde"]
    good, said = run([*first, made("after", first[:1]), made("never", first[1:2])], NODE)
    assert not good and set(processes.environments) == {*"abcde", "after"}
    shown = {
        name: variables["CUDA_VISIBLE_DEVICES"]
        for name, variables in processes.environments.items()
    }
    assert {shown[name] for name in "abcd"} == {"0", "3", "5", "6"}
    assert not any(
        shown[name] == shown[other] for name, others in processes.beside.items() for other in others
    )
    assert processes.beside["a"] >= set("bcd") and "e" not in processes.beside["a"]
    assert {variables["OMP_NUM_THREADS"] for variables in processes.environments.values()} == {"4"}
    assert "step 2 of 7 was not done" in said and "\n  | begun\n  | no such file" in said
    assert re.search(r"step 1 of 7: .*name=a\n  on GPU 0, log in outputs/.steps/a-\w+\.log", said)
    assert "step 1 of 7 is done after 0 s" in said and "step 7 of 7 was not done" in said
    assert "step 2 of 7 is done" not in said


def test_two_gpus_are_side_by_side_too_and_without_any_none_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processes = Processes({})
    monkeypatch.setattr(
        step_processes, "subprocess", SimpleNamespace(Popen=processes, DEVNULL=None)
    )
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device, "usable_cores", lambda: 16)
    assert run([made("a")], replace(NODE, gpus=2))[0]
    assert processes.environments["a"]["OMP_NUM_THREADS"] == "8"
    # Ctrl+C reaches the command alone, and errors are in the log, too
    assert processes.options["process_group"] == 0
    assert processes.options["stderr"] is processes.options["stdout"] is not None
    assert run([made("b")], replace(NODE, gpus=2, devices=()))[0]
    assert "CUDA_VISIBLE_DEVICES" not in processes.environments["b"]


def test_a_process_that_does_not_end_by_itself_is_killed() -> None:
    told: list[object] = []

    def wait(seconds: float | None = None) -> None:
        told.append(seconds)
        if seconds is not None:
            raise subprocess.TimeoutExpired("step", seconds)

    step_runs._end(SimpleNamespace(wait=wait, kill=lambda: told.append("killed")))
    assert told == [step_runs.GRACE_S, "killed", None]


def test_a_process_that_runs_is_ended_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal comes while a step runs; its own process gets one too."""
    sent: list[str] = []
    process = SimpleNamespace(
        poll=lambda: os.kill(os.getpid(), signal.SIGTERM),
        terminate=lambda: sent.append("SIGTERM"),
        wait=lambda seconds: sent.append("waited"),
    )
    monkeypatch.setattr(
        step_processes, "subprocess", SimpleNamespace(Popen=lambda *_, **options: process)
    )
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped) as stopped:
        run([A])
    assert stopped.value.code == 143 and sent == ["SIGTERM", "waited"]
    assert signal.getsignal(signal.SIGTERM) is before


LLAMA = "meta-llama/Llama-2-{}b-chat-hf"
EIGHT = replace(NODE, gpus=8)


# one GPU holds one row of it, two hold 22 (listed by bita/tab1)
ROWS_OF_33B = {
    "target": "lmsys/vicuna-33b-v1.3", "spread": True, "points": 0, "at_once": 32, "max_new_tokens": 1600,
}  # fmt: skip
WHOLE, SHARDED = "runtime.device_map=null", "model.sharded=true"


def step_of(script: str, changes: dict) -> Step:
    """A step with 16 rows. changes: of its setting; size: of its Llama, in 10⁹ parameters."""
    changes = dict(changes)
    if "size" in changes:
        changes["target"] = LLAMA.format(changes.pop("size"))
    half = setting(**{"dtype": "float16", "drafts": (), **changes})
    step = made("x", script=script, settings=(half,), rows=16)
    return replace(step, command="python run.py name=x") if script == "run" else step


@pytest.mark.parametrize(
    ("script", "changes", "machine", "taken", "processes", "overrides"),
    [
        ("match_rates", {}, EIGHT, "1 GPU", 1, ()),
        ("finetune", {}, EIGHT, "8 GPUs, data parallel", 8, ()),
        ("finetune", {}, HERE, "1 GPU", 1, ()),
        ("finetune", {}, replace(EIGHT, gpus=6), "4 GPUs, data parallel", 4, ()),
        ("finetune", {"target": "toy:large"}, EIGHT, "1 GPU", 1, ()),
        ("finetune", {"target": LLAMA.format(70)}, EIGHT, None, 0, ()),
        ("train_bita", {"size": 70, "spread": True}, EIGHT, "8 GPUs, sharded", 8, (WHOLE, SHARDED)),
        ("train_bita", {"size": 70}, EIGHT, "8 GPUs, sharded", 8, (SHARDED,)),
        ("train_bita", {"size": 70}, replace(EIGHT, gpus=2), "2 GPUs, sharded", 2, (SHARDED,)),
        # three would hold it, and 16 rows are divided among two
        ("train_bita", {"size": 70, "drafts": (LLAMA.format(7),)}, replace(EIGHT, gpus=3), None, 0, ()),
        ("train_bita", {"size": 70, "spread": True}, HERE, None, 0, ()),
        ("train_bita", {"size": 13, "spread": True}, EIGHT, "8 GPUs, data parallel", 8, (WHOLE,)),
        ("generate_calibration", {"size": 7}, EIGHT, "8 GPUs, questions divided", 8, ()),
        ("generate_calibration", {"size": 70, "spread": True}, EIGHT, "2 GPUs, spread", 1, ()),
        ("generate_calibration", {"size": 70}, EIGHT, "2 GPUs, spread", 1, ("runtime.device_map=auto",)),
        ("generate_calibration", ROWS_OF_33B, EIGHT, "2 GPUs, spread", 1, ()),
        ("generate_calibration", ROWS_OF_33B, HERE, "1 GPU", 1, ()),
        ("run", {"size": 70, "spread": True}, EIGHT, "2 GPUs, spread", 1, ()),
        ("run", {"size": 70, "drafts": (LLAMA.format(7),), "spread": True}, EIGHT, "3 GPUs, spread", 1, ()),
        ("run", {"size": 70}, EIGHT, None, 0, ()),
        ("figures", {}, EIGHT, "no GPU", 1, ()),
    ],
)  # fmt: skip
def test_a_step_takes_what_its_work_and_its_models_need(
    script: str,
    changes: dict,
    machine: Machine,
    taken: str | None,
    processes: int,
    overrides: tuple[str, ...],
) -> None:
    step = step_of(script, changes)
    placement = placement_of(step, machine)
    assert (blocked_by(step, replace(machine, gated=True)) is None) == (placement is not None)
    if taken is None:
        assert placement is None
        return
    assert (str(placement), placement.processes, placement.overrides) == (
        taken,
        processes,
        overrides,
    )


def test_as_many_rows_are_counted_as_the_gpu_that_is_here_holds() -> None:
    """The fault: 32 rows of answers, as an A100 of 80 GB holds them, were refused on one of 40."""
    changes = {"size": 7, "points": 0, "at_once": 32, "max_new_tokens": 1600}
    step = step_of("generate_calibration", changes)
    for room_gb in (24, 40, 80):
        machine = replace(HERE, room_gb=room_gb, gated=True)
        (needed,) = needs_of(step, machine)
        assert blocked_by(step, machine) is None and str(placement_of(step, machine)) == "1 GPU"
        fits = f"(fits in {room_gb} GB, {needed.rows_on(1)} of 32 rows at once)"
        assert fits in describe_needs([needed])


def test_a_training_on_several_gpus_is_started_by_accelerate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[list[str]] = []
    processes = SimpleNamespace(Popen=lambda command, **_: started.append(command))
    monkeypatch.setattr(step_processes, "subprocess", processes)
    step = replace(made("x"), command="python scripts/train_bita.py name=x runtime.device_map=auto")
    placement = Placement(8, 8, (WHOLE, SHARDED), "sharded")
    words = ["name=x", WHOLE, SHARDED]
    step_processes.start(step, placement, {})
    assert started[0][1:] == [
        *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=8"),
        *("--main_process_port=0", "-m", "bild_lab", "train_bita", *words),
    ]
    assert step_processes.command_line(step, placement) == " ".join(
        ["accelerate launch --multi_gpu --num_processes=8 scripts/train_bita.py", *words]
    )
    step_processes.start(step, Placement(), {})
    assert started[1][1:] == ["-m", "bild_lab", "train_bita", "name=x", "runtime.device_map=auto"]


@pytest.mark.slow
def test_rows_of_a_pass_are_those_that_processes_divide() -> None:
    (trained,) = [step for step in steps_of("ppd_tab1") if "train_lm_heads" in step.command]
    assert trained.rows == 4  # 128 in 32 passes
    assert placement_of(trained, EIGHT).processes == 4


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["gpus=8"], "gpu=NAME names them"),
        (["gpu=a100", "gpus=2", "processes=4"], "got processes=4 with gpus=2"),
        (["gpu=a100", "processes=2"], "got processes=2 with gpus=1"),
        (["processes=0"], "processes must be a whole number >= 1, got 0"),
        (["gpu=a100", "gpus=many"], "gpus must be a whole number, at least 1, got many"),
    ],
)
def test_gpus_that_are_nowhere_are_refused(words: list[str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        options = paper_run.parse(["bild/fig4", *words])
        machine_of(options.gpu, options.force, options.gpus, options.processes)


@pytest.mark.parametrize(
    ("script", "changes", "machine", "taken"),
    [
        ("run", {"target": "toy:large"}, replace(HERE, room_gb=None), "CPU"),
        ("run", {"target": "toy:large"}, HERE, "1 GPU"),
        ("run", {"size": 7}, replace(HERE, room_gb=None), "1 GPU"),
        ("finetune", {"target": "toy:large"}, replace(EIGHT, room_gb=None), "CPU"),
        ("figures", {}, replace(HERE, room_gb=None), "no GPU"),
        ("run", {"size": 70}, EIGHT, ""),
    ],
)
def test_toys_take_the_cpu_of_a_machine_without_a_gpu(
    script: str, changes: dict, machine: Machine, taken: str
) -> None:
    assert describe_placement(step_of(script, changes), machine) == taken


def test_the_memory_of_a_step_is_told_by_how_many_gpus_hold_its_target_together() -> None:
    taken = [Placement(8, 1, (), "spread"), Placement(8, 8, (), "sharded")]
    taken += [Placement(8, 8, (), "data parallel"), Placement()]
    assert [placement.spread_over for placement in taken] == [8, 8, 1, 1]


def test_hours_are_added_where_some_are_known() -> None:
    assert paper_run.total({}, [], [1, 2], "a100") == "nothing to download"
    assert paper_run.total({}, [0.2, 0.3], [], "a100") == (
        "nothing to download, about 0.5 GPU-hours on a100"
    )
    assert paper_run.total({"a/b": 2.0}, [0.5], [3], "t4") == (
        "together 2 GB to download (a/b 2.0), at least 0.5 GPU-hours on t4; unknown: step 3"
    )


def test_a_job_that_asks_for_gpus_uses_them() -> None:
    words = ["bild/fig4", "launcher=slurm", "slurm.gpus_per_node=4", "gpu=a100"]
    assert paper_run.parse(words).gpus == 4
    assert paper_run.parse([*words, "gpus=2"]).gpus == 2
    assert paper_run.parse(words[:3]).gpus is None


def test_processes_are_gpus_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80e9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(device, "usable_cores", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,1,4,2")
    machine = machine_of(None, tries=False)
    assert (machine.gpus, machine.devices, machine.warning) == (4, ("7", "1", "4", "2"), "")
    machine = machine_of(None, tries=False, processes=2)
    assert (machine.gpus, machine.devices) == (2, ("7", "1"))
    with pytest.raises(UserError, match="got processes=5 with 4 visible"):
        machine_of(None, tries=False, processes=5)
    monkeypatch.setattr(device, "usable_cores", lambda: 7)
    assert "7 CPU cores for 4 processes" in machine_of(None, tries=False).warning
    there = machine_of("a100", tries=False, gpus=8)
    with pytest.raises(UserError, match="8 GPUs were named, but 4 are visible here"):
        run([A], there)
    assert machine_of("a100", tries=False, gpus=8, processes=2).gpus == 2


SBATCH = """#!/bin/sh
count=$(ls jobs | wc -l)
cp "$1" jobs/$((100 + count))
echo "Submitted batch job $((100 + count))"
"""


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's commands, which note what is submitted and run nothing; the folder of the jobs'
    scripts.
    """
    for name, content in (("sbatch", SBATCH), ("srun", "#!/bin/sh\n")):
        Path("bin").mkdir(exist_ok=True)
        (Path("bin") / name).write_text(content)
        (Path("bin") / name).chmod(0o755)
    Path("jobs").mkdir()
    monkeypatch.setenv("PATH", str(Path("bin").resolve()), prepend=os.pathsep)
    return Path("jobs")


def test_steps_are_jobs_that_wait_for_what_they_read(slurm: Path, runs: Runs) -> None:
    DelayedSubmission = pytest.importorskip("submitit.core.utils").DelayedSubmission
    drawn = Step(
        "python scripts/figures.py x name=b", "b", ("b",), (B.command, C.command), figure="x"
    )
    said: list[str] = []
    assert submit_steps([A, B, C, drawn], HERE, {"partition": "gpu"}, said.append)
    assert runs.ran == [] and "step 2 of 4 is job 101 after 100: python run.py name=b x=1" in said
    scripts = {file.name: file.read_text() for file in sorted(slurm.iterdir())}
    waits = [re.findall("--dependency=(.*)", text) for text in scripts.values()]
    assert waits == [[], ["afterok:100"], [], ["afterany:101:102"]]
    assert all("#SBATCH --partition=gpu" in text for text in scripts.values())
    asked = [re.findall("--gpus-per-node=(.*)", text) for text in scripts.values()]
    assert asked == [[], ["1"], ["1"], []]
    assert "#SBATCH --kill-on-invalid-dep=yes" in scripts["101"]
    for place in (100, 101):  # what the jobs run, in their order
        assert DelayedSubmission.load(f"outputs/.steps/{place}_submitted.pkl").result() is None
    assert runs.ran == ["name=a", "name=b x=1"] and is_done(A) and is_done(B) and not is_done(C)
    said.clear()
    blocked = replace(C, missing=("model",))
    assert not submit_steps([A, B, blocked], HERE, {}, said.append)
    assert "was not submitted" in said[0] and len(list(slurm.iterdir())) == 4
    trained = made("x", script="finetune", rows=16, settings=(setting(drafts=()),))
    assert submit_steps([trained], EIGHT, {"partition": "gpu"}, said.append)
    assert "--gpus-per-node=8" in (slurm / "104").read_text()
    assert submit_steps([trained], EIGHT, {"gres": "gpu:2"}, said.append)
    assert "--gpus-per-node" not in (slurm / "105").read_text()


def test_without_slurm_its_launcher_is_refused(
    command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "nowhere")
    code, told = command(
        paper_run,
        "spec/tab4",
        "scale=small",
        "run=true",
        "launcher=slurm",
        "slurm.partition=gpu",
        config=None,
    )
    assert code == 2 and "launcher=slurm needs submitit and Slurm's commands" in " ".join(
        told.split()
    )
    assert command(paper_run, "spec/tab4", "slurm.partition=gpu", config=None)[0] == 2


@pytest.mark.slow
def test_an_item_runs_whole_on_the_toy_pair_and_its_second_run_has_nothing_to_do(
    command: Callable[..., tuple[int, str]],
) -> None:
    words = ["spec/tab3", "scale=small", "run=true", "dataset.limit=6"]
    code, told = command(paper_run, *words, config=None)
    assert code == 0 and "step 4 of 4" in told, told
    assert Path("outputs/figures/spec_tab3_small.md").read_text().startswith("# Table 3")
    assert len(list(Path("outputs/spec_tab3_small/points").iterdir())) == 6
    code, told = command(paper_run, *words, config=None)
    assert code == 0 and "step" not in told
    _, told = command(paper_run, *words[:2], words[3], config=None)
    assert [line.split(":")[0] for line in told.splitlines()[:5]] == [
        "0 pins",
        "1 done",
        "2 done",
        "3 done",
        "4 done",
    ]


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_estimates_are_of_the_gpu_that_is_here_or_say_that_they_are_not(
    name: str, gpu: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(name=name, total_memory=24e9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(device, "usable_cores", lambda: 4)
    machine = machine_of(None, tries=False)
    assert (machine.gpu, machine.room_gb, machine.gpus) == (gpu or "a100", 24, 2)
    told = (
        f"the GPU here, {name}, is not in the list, so times are estimated for an a100; gpu=NAME"
        " takes another of t4,"
    )
    assert machine.warning.startswith("" if gpu else told) and bool(machine.warning) == (
        gpu is None
    )
    assert machine_of("l4", tries=True).warning == ""


def test_without_a_gpu_estimates_say_which_they_assume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    machine = machine_of(None, tries=False)
    assert machine.room_gb is None and machine.warning.startswith(
        "there is no GPU here, so times are estimated for an"
    )
