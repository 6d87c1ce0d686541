"""Training a small module beside a frozen model: its result, resuming, and refused input."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from bild_lab.engine.methods.bita import BitaAdapter
from bild_lab.errors import UserError
from bild_lab.lab.config.compose import compose_config
from bild_lab.training.folder import TrainingFolder
from bild_lab.training.modules import frozen
from bild_lab.training.modules.frozen import frozen_recipe, train_beside_frozen
from scripts import train_bita, train_module
from tests.training.jobs import Kill, losses
from tests.training.modules.frozen_jobs import BITA, MICRO, answers, calibration, frozen_job
from tests.training.printed import printed_point

Command = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, checkpoints: Path
) -> tuple[Path, dict[str, Any]]:
    """A training that was not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, train_beside_frozen(frozen_job(folder, checkpoints / "llama"))


def test_a_training_leaves_the_adapter_and_nothing_else(
    whole: tuple[Path, dict[str, Any]], checkpoints: Path
) -> None:
    folder, metrics = whole
    assert [path.name for path in folder.iterdir()] == ["adapter"]
    names = ["adapter.safetensors", "adapter_config.json", "metrics.json"]
    assert sorted(path.name for path in (folder / "adapter").iterdir()) == names
    adapter = BitaAdapter.load(folder / "adapter")
    assert adapter.config.base["path"] == str(checkpoints / "llama")
    assert metrics["parameters"] == 2 * 2 * 2 * 2 * 8 + 3 * 32
    assert (
        metrics["train_examples"],
        metrics["held_out_examples"],
        metrics["dropped_examples"],
    ) == (14, 4, 0)
    assert metrics["evaluations"] == 3 and metrics["best"]["accepted"] >= 0


def test_a_command_finds_the_configurations_that_the_training_found(
    tmp_path: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, also where the answers were made with the same."""
    own = ["--config-dir", "mine"]
    monkeypatch.setattr(frozen, "own_configurations", lambda: own)
    job = frozen_job(tmp_path, checkpoints / "llama")
    assert job.command.startswith("python run.py -m policy=bita ")
    assert job.command.endswith(" --config-dir mine")
    manifest = {**job.calibration.manifest, "dataset_words": [*own, "dataset=pairs"]}
    answered = replace(job, calibration=replace(job.calibration, manifest=manifest))
    assert answered.command.startswith("python run.py -m policy=bita ")
    assert answered.command.endswith(" --config-dir mine dataset=pairs")


def test_a_command_keeps_the_drafter_that_the_modules_policy_needs(
    tmp_path: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: pair.draft=null came behind it, and the printed command was refused."""
    job = frozen_job(tmp_path, checkpoints / "llama")
    assert "pair.draft=null" in job.command
    words = ["policy=mine", "pair.draft=small"]
    monkeypatch.setattr(type(job.spec), "words", lambda self, folder: words)
    assert "pair.draft=small" in job.command and "pair.draft=null" not in job.command


@pytest.mark.fast("3")
@pytest.mark.parametrize("step", [3, 6])
def test_a_killed_training_resumes_as_if_it_had_not_been_killed(
    step: int, whole: tuple[Path, dict[str, Any]], tmp_path: Path, checkpoints: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_beside_frozen(frozen_job(tmp_path, checkpoints / "llama", callbacks=(Kill(step),)))
    saved = load_file(TrainingFolder(tmp_path).last_checkpoint() / "model.safetensors")
    assert {name.split(".")[0] for name in saved} == {"weights"}
    assert losses(train_beside_frozen(frozen_job(tmp_path, checkpoints / "llama"))) == losses(
        whole[1]
    )
    ours, theirs = (
        load_file(folder / "adapter" / "adapter.safetensors") for folder in (tmp_path, whole[0])
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_answers_too_short_for_the_masks_are_dropped_and_counted(
    tmp_path: Path, checkpoints: Path
) -> None:
    job = frozen_job(tmp_path, checkpoints / "llama")
    rows = answers(18, shortest=2)
    short = sum(len(row.answer_token_ids) < 4 for row in rows)
    mixed = replace(job, calibration=calibration(job.base, rows))
    assert 0 < short and len(mixed.rows) == 18 - short
    many = replace(job, spec=replace(BITA, mask_tokens=12))
    message = (
        r"of the 18 answers in words, 18 are dropped: they have fewer than the 13 tokens that 12"
        r" predictions need"
    )
    with pytest.raises(UserError, match=message):
        train_beside_frozen(many)
    assert list(tmp_path.iterdir()) == []


def test_a_question_in_two_templates_is_not_learned_in_one_and_held_out_in_the_other(
    tmp_path: Path, checkpoints: Path
) -> None:
    job = frozen_job(tmp_path, checkpoints / "llama")
    twice = tuple(
        replace(row, id=f"{row.id}@{template}", prompt=f"{row.prompt} w{35 + template}")
        for row in answers(9)
        for template in (1, 2)
    )
    learned, held_out = replace(job, calibration=calibration(job.base, twice)).parts
    assert (len(learned), len(held_out)) == (14, 4)
    asked = [
        {tuple(row.tokens[: row.prompt_length - 1].tolist()) for row in part}
        for part in (learned, held_out)
    ]
    assert len(asked[1]) == 2 and not asked[0] & asked[1]


def test_prompt_and_answer_are_cut_together(tmp_path: Path, checkpoints: Path) -> None:
    job = frozen_job(tmp_path, checkpoints / "llama", max_tokens=8)
    longer = frozen_job(tmp_path, checkpoints / "llama").rows
    assert max(row.length for row in longer) > 8 == max(row.length for row in job.rows)
    cut = [
        (row.tokens[:8].tolist(), row.prompt_length) for row in longer if 8 - row.prompt_length >= 4
    ]
    kept = [(row.tokens.tolist(), row.prompt_length) for row in job.rows]
    # a prompt that leaves too little room is dropped
    assert cut == kept and len(kept) < len(longer)


@pytest.mark.parametrize("knob", [{"loss": "calm"}, {"soft_targets": 2}])
def test_a_loss_of_whole_models_is_refused(knob: dict[str, Any]) -> None:
    ((key, value),) = knob.items()
    with pytest.raises(UserError, match=rf"train\.{key}={value} has no effect beside a frozen"):
        frozen_recipe(OmegaConf.create({**vars(MICRO), **knob}))


def test_a_group_with_smoothed_labels_trains_a_module_without() -> None:
    for group in ("small", "toy"):
        train = compose_config([f"train={group}"], "train_bita").train
        assert train.label_smoothing == 0.1 and frozen_recipe(train).label_smoothing == 0


def test_answers_of_another_model_are_refused(tmp_path: Path, checkpoints: Path) -> None:
    job = frozen_job(tmp_path, checkpoints / "llama")
    with pytest.raises(
        UserError, match="with other weights than .*llama-draft, but a BiTA adapter learns the"
    ):
        frozen_job(tmp_path, checkpoints / "llama-draft", calibration=job.calibration)


def test_a_folder_of_another_base_is_refused(tmp_path: Path, checkpoints: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_beside_frozen(frozen_job(tmp_path, checkpoints / "llama", callbacks=(Kill(3),)))
    with pytest.raises(
        UserError,
        match=r"model.weights=\w+, but this command has model.weights=\w+; choose another",
    ):
        train_beside_frozen(frozen_job(tmp_path, checkpoints / "llama-draft"))
    with pytest.raises(
        UserError, match="holds a training with bita.splits=2, but this command has bita.splits=3"
    ):
        train_beside_frozen(
            frozen_job(tmp_path, checkpoints / "llama", spec=replace(BITA, splits=3))
        )


QUICK = [
    "train.max_steps=2",
    "train.batch_size=4",
    "train.accumulate=1",
    "train.evaluate_every=2",
    "train.log_every=1",
]
QUICK += [
    "train.device=cpu",
    "train.precision=float32",
    "held_out=2",
    "answers.max_new_tokens=8",
    "dataset.split=test",
]


def words(data: Path) -> list[str]:
    return ["dataset=multi30k", f"dataset.path={data}", *QUICK]


@pytest.mark.slow
def test_the_answers_are_generated_first_and_kept(
    command: Command, checkpoints: Path, data: Path
) -> None:
    line = ["name=bita", f"model.path={checkpoints / 'llama'}", *words(data), "bita.mask_tokens=1"]
    line += ["dataset.prompt_template=German: {source} English:"]
    code, printed = command(train_bita, *line)
    assert code == 0, printed
    assert (
        "outputs/bita/adapter: 2 steps, loss" in printed
        and "policy.adapter=outputs/bita/adapter" in printed
    )
    for_target = printed_point(printed)
    assert for_target.policy == "bita" and for_target.setting["target"] == str(
        checkpoints / "llama"
    )
    assert (
        for_target.examples[0].prompt.startswith("German: ")
        and for_target.setting["dataset"] == "multi30k"
    )
    metrics = json.loads(Path("outputs/bita/metrics.json").read_text())
    assert metrics["answers"]["folder"] == "outputs/bita/calibration"
    code, printed = command(train_bita, *line)
    assert code == 0 and "step 1:" not in printed  # nothing is trained again
    heads = [
        "name=medusa",
        f"model.path={checkpoints / 'llama'}",
        *QUICK,
        "calibration=outputs/bita/calibration",
    ]
    code, printed = command(train_module, *heads, "module.heads=1", "dataset.path=nowhere")
    assert code == 0, printed
    assert "policy=medusa policy.heads=outputs/medusa/heads" in printed
    # of the answers, not of the path that is nowhere
    assert printed_point(printed).examples == for_target.examples
    assert sorted(path.name for path in Path("outputs/medusa").iterdir()) == [
        "heads",
        "metrics.json",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "llama"])
def test_the_command_trains_beside_both_families(
    family: str, command: Command, checkpoints: Path, data: Path
) -> None:
    line = ["module=eagle3", f"model.path={checkpoints / family}", *words(data), "module.steps=2"]
    code, printed = command(train_module, *line)
    assert code == 0, printed
    assert "outputs/eagle3/heads: 2 steps, loss" in printed
    assert "policy=eagle3 policy.heads=outputs/eagle3/heads" in printed


def test_ngrams_take_a_pair_and_no_calibration(command: Command, checkpoints: Path) -> None:
    code, printed = command(train_module, "module=ngram", f"model.path={checkpoints / 'llama'}")
    assert code == 2 and "n-grams take pair.target in place of model.path" in printed
    words = [f"pair.target={checkpoints / 'llama'}", "calibration=outputs/answers"]
    code, printed = command(train_module, "module=ngram", *words)
    assert code == 2 and "take no calibration=outputs/answers; to count these answers" in printed


def test_a_printed_command_decodes_a_split_that_there_is(
    command: Command, checkpoints: Path, tmp_path: Path
) -> None:
    row = json.dumps({"prompt": "a b", "answer": "c d"})
    columns = ["source_column=prompt", "reference_column=answer", "metric=chrf"]
    line = [f"pair.target={checkpoints / 'llama'}", "dataset=local", f"dataset.path={tmp_path}"]
    for split, at_the_end in (("train", " dataset.split=train"), ("test", "")):
        (tmp_path / f"{split}.jsonl").write_text(row)
        words = [*line, *(f"dataset.{column}" for column in columns), f"name={split}"]
        code, printed = command(train_module, "module=ngram", *words)
        assert code == 0 and f"dataset.metric=chrf{at_the_end}\n" in printed, printed


BAD_INPUT = {
    "no model": ([], "model.path must be a folder or a hub id, got null"),
    "an encoder–decoder": (
        ["model.path={t5}"],
        "a BiTA adapter needs a decoder-only model, got the encoder–decoder",
    ),
    "no masks": (
        ["model.path={llama}", "bita.mask_tokens=0"],
        "bita.mask_tokens must be a whole number >= 1",
    ),
    "smoothed labels": (
        ["model.path={llama}", "train=small", "train.label_smoothing=0.1"],
        "train.label_smoothing=0.1 has no effect beside a frozen model",
    ),
    "no calibration": (
        ["model.path={llama}", "calibration=nowhere"],
        "no calibration data in nowhere",
    ),
    "in the way": (
        ["model.path={llama}", "name=taken"],
        "taken/adapter is in the way: it is not the result of a",
    ),
}


@pytest.mark.fast("no model")
@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_gives_one_line_and_no_answers(
    case: str, command: Command, checkpoints: Path, data: Path
) -> None:
    Path("outputs/taken/adapter").mkdir(parents=True)
    changed, message = BAD_INPUT[case]
    paths = {"{t5}": str(checkpoints / "t5"), "{llama}": str(checkpoints / "llama")}
    for mark, path in paths.items():
        changed = [word.replace(mark, path) for word in changed]
    code, printed = command(train_bita, *words(data), *changed)
    assert code == 2 and message in printed and len(printed.strip().splitlines()) == 1
    assert not list(Path("outputs").rglob("*.parquet"))
