"""`python scripts/finetune.py` as a user runs it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import bild_lab
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.errors import UserError
from bild_lab.lab.config.compose import compose_config, config_dir
from bild_lab.lab.config.schemas import typed
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.training.reports import print_decoding
from bild_lab.training.start import FromCheckpoint
from bild_lab.training.train_spec import TrainSpec
from scripts import finetune
from scripts.finetune import ValidationSpec
from tests.training.jobs import losses, write_dataset
from tests.training.printed import printed_point
from tests.training.processes import TWO, finished, killed_when, started

TINY = [
    "model=t5_tiny",
    "model.vocabulary=90",
    "model.config.d_model=16",
    "model.config.d_ff=32",
    "model.config.d_kv=8",
]
QUICK = [
    "train.max_steps=4",
    "train.batch_size=4",
    "train.evaluate_every=2",
    "train.log_every=1",
    "train.device=cpu",
]
QUICK += ["train.max_target_tokens=12", "train.precision=float32"]

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(command: Command) -> Command:
    """Runs scripts/finetune.py in an empty folder; returns its exit code and everything it
    printed.
    """
    return partial(command, finetune, config="finetune")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return ["dataset=multi30k", f"dataset.path={write_dataset(tmp_path_factory.mktemp('data'))}"]


def test_a_fresh_model_is_trained_decoded_and_trained_on(
    command: Command, dataset: list[str]
) -> None:
    code, printed = command("name=small", *TINY, *dataset, *QUICK)
    assert code == 0, printed
    assert "step 2: bleu" in printed and "outputs/small/checkpoint: 4 steps, loss" in printed
    point = printed_point(printed, "dataset.split=validation")  # the data have no test split
    assert (point.policy, point.setting["dataset"], point.setting["draft"]) == (
        "vanilla",
        "multi30k",
        None,
    )
    assert (point.setting["target"], point.setting["split"]) == (
        "outputs/small/checkpoint",
        "validation",
    )
    assert len(point.examples) == 6
    metrics = json.loads(Path("outputs/small/metrics.json").read_text())
    assert metrics["recipe"]["name"] == "small" and metrics["dataset"]["name"] == "multi30k"
    assert (metrics["train_examples"], metrics["validation_examples"]) == (30, 6)
    pair = bild_lab.load(
        "outputs/small/checkpoint", "outputs/small/checkpoint", policy="speculative"
    )
    assert pair.generate("Haus Hund", max_new_tokens=4).token_ids
    code, printed = command("name=small", *TINY, *dataset, *QUICK)
    assert code == 0 and "step" not in printed.replace("4 steps", "")  # it is not trained again
    code, printed = command("name=again", "model.path=outputs/small/checkpoint", *dataset, *QUICK)
    assert code == 0, printed
    again = json.loads(Path("outputs/again/metrics.json").read_text())
    assert again["recipe"]["name"] == "paper" and again["start"] == "outputs/small/checkpoint"


@pytest.mark.slow
def test_learning_rates_are_tried_until_a_finished_trainings_score(
    command: Command, dataset: list[str]
) -> None:
    words = [*TINY, *dataset, *QUICK, "train.max_steps=2"]
    assert command("name=first", *words)[0] == 0
    code, printed = command(
        "name=both", *words, "train.learning_rate=[0.05,0.01]", "train.stop_at_score=outputs/first"
    )
    assert code == 0 and "on validation, learning rate 0." in printed and "of 2" in printed, printed
    metrics = json.loads(Path("outputs/both/metrics.json").read_text())
    first = json.loads(Path("outputs/first/metrics.json").read_text())
    assert list(metrics["learning_rates"]) == ["0.05", "0.01"]
    assert metrics["recipe"]["stop_at_score"] == first["best"]["bleu"]
    assert sorted(path.name for path in Path("outputs").iterdir()) == [
        "both",
        "both_rate_0.01",
        "both_rate_0.05",
        "first",
    ]


def test_training_examples_can_be_held_out_for_validation(
    command: Command, dataset: list[str]
) -> None:
    words = ["validation.split=null", "validation.limit=7", "train.max_steps=2"]
    code, printed = command("name=held", *TINY, *dataset, *QUICK, *words)
    assert code == 0, printed
    metrics = json.loads(Path("outputs/held/metrics.json").read_text())
    assert (metrics["train_examples"], metrics["validation_examples"]) == (23, 7)


def test_one_file_is_not_both_splits(dataset: list[str], tmp_path: Path) -> None:
    """Fault: a file that serves as any split gave its first rows as validation too."""
    file = Path(dataset[1].partition("=")[2]) / "train.jsonl"
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_bytes(file.read_bytes())
    columns = {"source_column": "de", "reference_column": "en", "metric": "bleu"}
    spec = DatasetSpec(name="pairs", path=str(pairs), split="train", **columns)
    for path in (pairs, tmp_path):
        with pytest.raises(UserError, match=r"set validation\.split=null to hold out the last"):
            finetune.examples(replace(spec, path=str(path)), ValidationSpec("validation", 5))
    train, held_out = finetune.examples(spec, ValidationSpec(None, 5))
    assert (len(train), len(held_out)) == (25, 5) and not {*train} & {*held_out}
    twice = replace(spec, chat_template=["Say. {question}", "{question}"])
    train, held_out = finetune.examples(twice, ValidationSpec(None, 5))
    assert (len(train), len(held_out)) == (54, 6)  # no question in one template alone
    passages = tmp_path / "passages.jsonl"
    passages.write_text("".join(f'{{"de": "{text}", "en": "Yes."}}\n' for text in "ABBC"))
    parts = finetune.examples(replace(spec, path=str(passages)), ValidationSpec(None, 2))
    assert [[example.source for example in part] for part in parts] == [["A"], ["B", "B", "C"]]
    apart = replace(spec, path=str(file.parent), limit=9)
    assert [len(part) for part in finetune.examples(apart, ValidationSpec("val", 5))] == [9, 5]
    # rows that are left out of the training are not left out of another split
    later = replace(apart, skip=4)
    assert [
        [part[0].id, len(part)] for part in finetune.examples(later, ValidationSpec("val", 5))
    ] == [["train-4", 9], ["validation-0", 5]]


def test_a_command_says_that_it_decodes_what_was_trained_on(
    dataset: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"de": "Ja.", "en": "Yes."}\n')
    apart = dataset[1].partition("=")[2]
    columns = {"source_column": "de", "reference_column": "en", "metric": "bleu"}
    said = {}
    for group, path in (
        ("local", str(pairs)),
        ("multi30k", apart),
        ("local", "gone"),
        ("NAME", apart),
    ):
        spec = DatasetSpec(name=None, path=path, split="train", **columns)
        print_decoding("python run.py", [f"dataset={group}"], spec)
        said[group, path] = "these texts were trained on" in capsys.readouterr().out
    assert [pair for pair, learned in said.items() if learned] == [("local", str(pairs))]


@pytest.mark.slow
def test_a_command_finds_the_configurations_that_the_training_found(
    command: Command, dataset: list[str], tmp_path: Path
) -> None:
    """Fault: a dataset of the user's own folder was not found by the printed command."""
    folder = tmp_path / "mine"
    (folder / "dataset").mkdir(parents=True)
    (folder / "dataset" / "pairs.yaml").write_text(
        f"defaults: [multi30k, _self_]\npath: {dataset[1].partition('=')[2]}\n"
    )
    for given in (["--config-dir", str(folder)], [f"hydra.searchpath=[file://{folder}]"]):
        code, printed = command(f"name=own{len(given)}", *TINY, "dataset=pairs", *QUICK, *given)
        assert code == 0, printed
        assert f" {shlex.join(given)} dataset=pairs" in printed


def test_a_checkpoints_own_chat_template_is_learned(dataset: list[str], checkpoints: Path) -> None:
    start = FromCheckpoint(Checkpoint(str(checkpoints / "llama")))
    start.checkpoint.tokenizer.chat_template = (
        "{{ bos_token }}{% for turn in messages %}w20 {{ turn.content }} w21{% endfor %}"
    )
    words = compose_config(["template=chat", *dataset], "finetune").dataset
    written = finetune.with_text_template(typed(DatasetSpec, words, "dataset"), start)
    assert written.chat_template == ("checkpoint", "<s>w20 {question} w21")


@pytest.mark.slow
def test_curves_go_to_weights_and_biases_offline(command: Command, dataset: list[str]) -> None:
    words = ["logger=wandb", "logger.mode=offline", "train.max_steps=2"]
    code, printed = command("name=logged", *TINY, *dataset, *QUICK, *words)
    assert code == 0, printed
    assert (
        "logged offline: 1 run. Send with: wandb sync outputs/logged/wandb/offline-run-*" in printed
    )
    (written,) = Path("outputs/logged/wandb").glob("offline-run-*/*.wandb")
    content = written.read_bytes()
    for name in (
        b"eval_bleu",
        b"learning_rate",
        b"examples_per_s",
        b"train.batch_size",
        b"best_step",
    ):
        assert name in content, name


BAD_INPUT = {
    "misspelt key": (
        [*TINY, "train.max_setps=3"],
        (
            "no configuration key train.max_setps; did you mean train.max_steps? `python"
            " finetune.py --cfg job`"
        ),
    ),
    "rates twice": (
        [*TINY, "train.learning_rate=[1e-3,1e-3]"],
        "must be a number, or a list of different ones",
    ),
    "no score": (
        [*TINY, "train.stop_at_score=outputs/none"],
        "outputs/none holds no finished training with scores",
    ),
    "no model": (
        [],
        (
            "set model.path=DIR_OR_HUB_ID to start from a checkpoint, or choose one such as"
            " model=t5_tiny"
        ),
    ),
    "missing answers": (
        [*TINY, "dataset=mt_bench"],
        "dataset mt_bench has no answers to learn from",
    ),
    "programs to learn": (
        [*TINY, "dataset=humaneval", "dataset.reference_column=test"],
        "a training learns the texts of dataset.reference_column, not programs with tests",
    ),
    "missing split": ([*TINY, "validation.split=test"], "null holds out training examples instead"),
    "one split twice": (
        [*TINY, "dataset.split=val", "validation.limit=3"],
        "validation.split=validation has the rows of dataset.split=val, so training examples",
    ),
    "a chat template that is yet to be trained": (
        [*TINY, "template=chat"],
        "a tokenizer that is trained anew has no chat template; set model.tokenizer=DIR",
    ),
    "nothing left": (
        [*TINY, "validation.split=null"],
        "validation.limit=200 leaves none to train on",
    ),
    "more tokens than positions": (
        [*TINY[:1], "model=llama_small_cpu", "model.config.max_position_embeddings=3"],
        "but the model has positions for 3",
    ),
}


@pytest.mark.fast("misspelt key", "programs to learn", "one split twice")
@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_gives_one_line_and_leaves_nothing(
    case: str, command: Command, dataset: list[str]
) -> None:
    words, message = BAD_INPUT[case]
    code, printed = command(*dataset, *QUICK, *words)
    assert code == 2, printed
    (line,) = printed.strip().splitlines()
    assert message in line
    assert list(Path().glob("outputs/*")) == []


@pytest.mark.fast("bita", "medusa", "small")
@pytest.mark.parametrize(
    "file", sorted((config_dir() / "train").glob("*.yaml")), ids=lambda file: file.stem
)
def test_every_recipe_of_the_project_is_one(file: Path) -> None:
    first = file.read_text().removeprefix("# @package _global_\n").splitlines()[0]
    assert first.startswith("#") and "python run.py" in first and f"train={file.stem}" in first
    assert (
        typed(TrainSpec, compose_config([f"train={file.stem}"], "train_bita").train, "train").name
        == file.stem
    )


@pytest.fixture
def long(dataset: list[str]) -> list[str]:
    """A training of some seconds, with dropout."""
    return [
        *TINY,
        *dataset,
        *QUICK,
        "train.max_steps=120",
        "train.evaluate_every=20",
        "model.config.dropout_rate=0.1",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), TWO], ids=["one process", "two processes"])
def test_a_training_that_was_killed_twice_ends_as_one_that_was_not(
    launcher: tuple[str, ...], tmp_path: Path, long: list[str]
) -> None:
    finished(started(finetune, tmp_path, ["name=whole", *long], *launcher))
    for step in (40, 80):
        reached = tmp_path / "outputs" / "killed" / "training" / f"checkpoint-{step}" / "complete"
        killed_when(reached.exists, started(finetune, tmp_path, ["name=killed", *long], *launcher))
        assert not (tmp_path / "outputs" / "killed" / "checkpoint").exists()
    assert "resuming from step" in finished(
        started(finetune, tmp_path, ["name=killed", *long], *launcher)
    )
    results = [tmp_path / "outputs" / name for name in ("whole", "killed")]
    whole, killed = (json.loads((folder / "metrics.json").read_text()) for folder in results)
    assert losses(killed) == losses(whole) and killed["best"]["step"] == whole["best"]["step"]
    assert whole["processes"] == killed["processes"] == (2 if launcher else 1)
    one, two = ((folder / "checkpoint" / "model.safetensors").read_bytes() for folder in results)
    assert one == two


@pytest.mark.slow
def test_two_processes_train_what_one_trains(tmp_path: Path, long: list[str]) -> None:
    still = [word for word in long if "dropout" not in word] + [
        "model.config.dropout_rate=0",
        "train.max_steps=40",
    ]
    finished(started(finetune, tmp_path, ["name=one", *still]))
    printed = finished(started(finetune, tmp_path, ["name=two", *still], *TWO))
    assert printed.count("outputs/two/checkpoint: 40 steps") == 1
    one, two = (
        json.loads((tmp_path / "outputs" / name / "metrics.json").read_text())
        for name in ("one", "two")
    )
    assert (one["processes"], two["processes"]) == (1, 2)
    ours, theirs = losses(one), losses(two)
    assert [step for step, _ in ours] == [step for step, _ in theirs]
    assert [loss for _, loss in ours[:20]] == pytest.approx(
        [loss for _, loss in theirs[:20]], abs=1e-3
    )
    assert "step 20" not in finished(started(finetune, tmp_path, ["name=two", *still], *TWO))
