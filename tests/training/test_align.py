"""`python scripts/align.py`: train a small model on the target's answers, and say what changed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.session import LoadedModel
from bild_lab.errors import UserError
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.data.examples import load_examples
from bild_lab.lab.point.read_model import load_model
from bild_lab.training.align import agreement, examples, require_fits, split_answers
from bild_lab.training.answers import Calibration, TargetAnswer, read_calibration
from bild_lab.training.batches import tokenize
from bild_lab.training.calibration import CalibrationJob, generate_calibration
from scripts import align
from tests.checkpoints import write_data
from tests.tiny import relative_of, save, tiny_llama, tiny_t5, tiny_tokenizer
from tests.training.processes import TWO, finished, started
from tests.training.targets import ending

Command = Callable[..., tuple[int, str]]
LIMIT = 9  # tokens of an answer
FOLDER = Path("outputs/aligned")
FAMILIES = ("t5", "llama", "deaf")


@pytest.fixture
def command(command: Command) -> Command:
    """Runs scripts/align.py in an empty folder; returns its exit code and everything it printed."""
    load_model.cache_clear()  # every test trains an outputs/aligned/checkpoint of its own
    return partial(command, align, config="align")


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("prompts"), rows=160)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets, each with a drafter that often, but not always, agrees; deaf gives one answer to
    every prompt.
    """
    folder = tmp_path_factory.mktemp("pairs")
    models = {
        "t5": ending(tiny_t5(6), 4),
        "llama": ending(tiny_llama(1), 2),
        "deaf": ending(tiny_t5(19), 2),
    }
    for block in models["deaf"].decoder.block:
        block.layer[1].EncDecAttention.o.weight.data.zero_()
    for name, target in models.items():
        save(relative_of(target, 2, noise=0.2), folder / f"{name}-draft")
        save(target, folder / name)
    return folder


@pytest.fixture(scope="session")
def answered(
    pairs: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Calibration data of every target."""
    folder = tmp_path_factory.mktemp("answered")
    dataset = DatasetSpec(
        name="multi30k",
        path=str(prompts),
        source_column="de",
        reference_column="en",
        metric="bleu",
        split="test",
    )
    for family in FAMILIES:
        job = CalibrationJob(
            model_of(pairs / family),
            dataset,
            load_examples(dataset),
            LIMIT,
            32,
            100,
            folder / family,
        )
        generate_calibration(job)
    return {family: folder / family for family in FAMILIES}


@pytest.fixture
def base(pairs: Path, answered: dict[str, Path]) -> list[str]:
    return [
        "name=aligned",
        f"model.path={pairs / 'deaf-draft'}",
        f"calibration={answered['deaf']}",
        "held_out=20",
        "train=paper",
        "train.max_steps=40",
        "train.evaluate_every=40",
        "train.learning_rate=3e-2",
        "train.log_every=10",
        "train.batch_size=16",
        "train.device=cpu",
        f"train.max_target_tokens={LIMIT}",
    ]


def model_of(path: Path) -> LoadedModel:
    return load_model(str(path), None, "cpu", torch.float32, "auto")


@pytest.mark.fast("llama")
@pytest.mark.parametrize("family", ["t5", "llama"])
def test_agreement_is_that_of_one_answer_at_a_time(
    pairs: Path, answered: dict[str, Path], family: str
) -> None:
    answers = read_calibration(answered[family]).answers[:40]
    draft, target = (model_of(pairs / name).transformers for name in (f"{family}-draft", family))
    same, accepted = [], []
    for answer in answers:
        source, tokens = draft.source(answer.prompt), answer.answer_token_ids
        fed = [source.prompt[-1], *tokens[:-1]]
        q, p = (
            model.start(source, LIMIT).extend(fed).logits.softmax(-1) for model in (draft, target)
        )
        same += [one == other for one, other in zip(q.argmax(-1).tolist(), tokens, strict=True)]
        accepted += torch.minimum(p, q).sum(-1).tolist()
    expected = {
        "token_agreement": sum(same) / len(same),
        "acceptance_rate": sum(accepted) / len(accepted),
    }
    assert all(0.1 < share < 0.99 for share in expected.values())  # a drafter that sometimes agrees
    assert agreement(draft, target, answers, None) == pytest.approx(expected, abs=1e-5)
    assert agreement(draft, None, answers, None) == {"token_agreement": expected["token_agreement"]}


def test_held_out_answers_are_spread_evenly_and_not_trained_on() -> None:
    answers = tuple(
        TargetAnswer(str(index), "p", "a", [5, 1], "end" if index != 4 else "length")
        for index in range(9)
    )
    trained_on, held_out = split_answers(Calibration(Path("calib"), {}, answers), 2)
    assert [answer.id for answer in held_out] == ["0", "5"]  # 4 was cut at the length limit
    assert [answer.id for answer in trained_on] == ["1", "2", "3", "6", "7", "8"]
    with pytest.raises(
        UserError, match="8 answers that reach their end, of 9; held_out=8 leaves none"
    ):
        split_answers(Calibration(Path("calib"), {}, answers), 8)


def test_the_tokens_that_the_target_emitted_are_learned_and_its_text_is_the_reference() -> None:
    emitted = TargetAnswer("0", "w5 w6", "w8 w9", [20, 8, 9, 30], "end")
    (example,) = examples([emitted])
    assert (example.id, example.prompt, example.references) == ("0", "w5 w6", ("w8 w9",))
    (learned,) = tokenize([example], tiny_tokenizer(False), False, None, LIMIT)
    assert learned.answer.tolist() == emitted.answer_token_ids


def test_a_question_in_two_templates_is_not_learned_in_one_and_held_out_in_the_other() -> None:
    answers = tuple(
        TargetAnswer(f"train-{index}@{template}", "p", "a", [5, 1], "end")
        for index in range(6)
        for template in (1, 2)
    )
    parts = split_answers(Calibration(Path("calib"), {}, answers), 4)
    learned, held_out = ({answer.id.partition("@")[0] for answer in part} for part in parts)
    assert held_out == {"train-0", "train-3"} and not learned & held_out
    assert [len(part) for part in parts] == [8, 4]


def test_an_aligned_model_agrees_more_and_the_commands_that_measure_it_are_printed(
    command: Command, base: list[str], pairs: Path
) -> None:
    code, printed = command(*base)
    assert code == 0, printed
    alignment = json.loads((FOLDER / "metrics.json").read_text())["alignment"]
    assert (alignment["trained_on"], alignment["held_out"]) == (140, 20)
    assert list(alignment["compared"]) == ["token_agreement", "acceptance_rate"]
    assert (
        alignment["compared"]["token_agreement"]["after"]
        > alignment["compared"]["token_agreement"]["before"]
    )
    for both in alignment["compared"].values():
        assert f"{both['after'] * 100:.2f}" in printed
    assert Checkpoint("outputs/aligned/checkpoint").weights(torch.float32).config.model_type == "t5"
    pair = (
        f"pair.target={pairs / 'deaf'} pair.draft=outputs/aligned/checkpoint pair.aligned=true"
        " dataset=NAME"
    )
    assert f"python run.py -m policy=speculative policy.window=3,5,7 {pair}" in printed
    assert re.search(
        rf"python scripts/screen.py policy=bild policy.fallback=\S+ policy.rollback=\S+ {pair}",
        printed,
    )

    before = {file: file.stat().st_mtime_ns for file in (FOLDER / "checkpoint").iterdir()}
    code, again = command(*base)
    assert code == 0, again
    assert {file: file.stat().st_mtime_ns for file in (FOLDER / "checkpoint").iterdir()} == before
    assert json.loads((FOLDER / "metrics.json").read_text())["alignment"] == alignment


@pytest.mark.slow
def test_without_the_acceptance_rate_no_target_is_needed(
    command: Command, base: list[str], pairs: Path, tmp_path: Path, answered: dict[str, Path]
) -> None:
    moved = tmp_path / "calibration"
    shutil.copytree(answered["deaf"], moved)
    manifest = json.loads((moved / "manifest.json").read_text())
    manifest["model"]["path"] = str(pairs / "gone")
    (moved / "manifest.json").write_text(json.dumps(manifest))
    short = [
        "train.max_steps=2",
        "train.evaluate_every=2",
        "train.log_every=2",
        f"calibration={moved}",
    ]
    code, printed = command(*base, *short)
    assert code == 2
    assert "no checkpoint folder" in printed
    assert not Path("outputs").exists()  # refused before anything is trained
    code, printed = command(*base, *short, "acceptance=false")
    assert code == 0, printed
    assert list(json.loads((FOLDER / "metrics.json").read_text())["alignment"]["compared"]) == [
        "token_agreement"
    ]
    assert (FOLDER / "checkpoint" / "model.safetensors").exists()


def test_a_target_that_changed_since_it_answered_is_refused(
    command: Command, base: list[str], pairs: Path, tmp_path: Path, answered: dict[str, Path]
) -> None:
    moved, other = tmp_path / "calibration", tmp_path / "target"
    shutil.copytree(answered["deaf"], moved)
    shutil.copytree(pairs / "deaf", other)
    shutil.copy(pairs / "deaf-draft" / "model.safetensors", other)
    manifest = json.loads((moved / "manifest.json").read_text())
    manifest["model"]["path"] = str(other)
    (moved / "manifest.json").write_text(json.dumps(manifest))
    soft = ["acceptance=false", "train.soft_targets=3"]  # the target is asked again
    for words in ([], soft):
        code, printed = command(*base, *words, f"calibration={moved}")
        assert code == 2
        assert "has changed since it answered" in printed
        assert not Path("outputs").exists()


# what else the target finds likely, and texts of the drafter's own: words, and the identity's
# entries
LEARNED = {
    "soft targets": (["train.soft_targets=3"], {"train.soft_targets": 3}),
    "own texts": (
        ["align.data=mixture", "align.loss=js"],
        {"align.data": "mixture", "align.loss": "js"},
    ),
}


@pytest.mark.fast("llama-own texts")
@pytest.mark.parametrize("what", LEARNED)
@pytest.mark.parametrize("family", ["t5", "llama"])
def test_an_alignment_learns_more_than_the_answers(
    command: Command,
    base: list[str],
    pairs: Path,
    answered: dict[str, Path],
    family: str,
    what: str,
) -> None:
    own, identity = LEARNED[what]
    words = ["train.max_steps=4", "train.evaluate_every=4", "train.log_every=2"]
    of = [f"model.path={pairs / f'{family}-draft'}", f"calibration={answered[family]}"]
    code, printed = command(*base, *words, *of, *own)
    assert code == 0, printed
    metrics = json.loads((FOLDER / "metrics.json").read_text())
    wanted = {**identity, "teacher": Checkpoint(str(pairs / family)).fingerprint}
    assert {key: metrics["identity"][key] for key in wanted} == wanted
    assert (
        not (FOLDER / "training").exists()
        and (FOLDER / "checkpoint" / "model.safetensors").exists()
    )


@pytest.mark.parametrize(
    ("data", "small", "message"),
    [
        ("t5", "llama-draft", "is decoder-only (llama), but"),
        ("llama", "t5-draft", "is an encoder–decoder (t5), but"),
        ("llama", "llama-words", "has another vocabulary than"),
    ],
)
def test_a_small_model_that_does_not_fit_is_refused(
    checkpoints: Path, answered: dict[str, Path], data: str, small: str, message: str
) -> None:
    calibration = read_calibration(answered[data])
    require_fits(calibration, Checkpoint(str(checkpoints / f"{data}-draft")))
    with pytest.raises(UserError, match=re.escape(message)):
        require_fits(calibration, Checkpoint(str(checkpoints / small)))


BAD_INPUT = {
    "another vocabulary of the unaligned": (
        [
            "calibration={answered}/llama",
            "model.path={checkpoints}/llama-draft",
            "unaligned.path={checkpoints}/llama-words",
        ],
        "llama-words (41 pieces) has another vocabulary than",
    ),
    "no calibration data": (
        ["calibration=/nowhere"],
        "no calibration data in /nowhere; make it with: python",
    ),
    "nothing left to train on": (["held_out=160"], "held_out=160 leaves none to train on"),
    "answers longer than a recipe's": (
        ["train.max_target_tokens=3"],
        "would cut the target's longest answer of",
    ),
}


@pytest.mark.fast("another vocabulary of the unaligned")
@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_gives_one_message_and_leaves_nothing(
    case: str, command: Command, base: list[str], checkpoints: Path, answered: dict[str, Path]
) -> None:
    words, message = BAD_INPUT[case]
    places = {"checkpoints": checkpoints, "answered": answered["llama"].parent}
    code, printed = command(*base, *(word.format(**places) for word in words))
    assert code == 2, printed
    (line,) = printed.strip().splitlines()
    assert message in line
    assert list(Path().iterdir()) == []


@pytest.mark.slow
def test_two_processes_align_and_one_of_them_compares(base: list[str], tmp_path: Path) -> None:
    finished(started(align, tmp_path, base, *TWO))
    metrics = json.loads((tmp_path / FOLDER / "metrics.json").read_text())
    compared = metrics["alignment"]["compared"]["token_agreement"]
    assert compared["after"] > compared["before"]
