"""What is known of the hub's repositories before anything starts: pickles, gates and pins, from the hub
itself or from the cards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from omegaconf import OmegaConf

from bild_lab import files
from bild_lab.errors import UserError
from bild_lab.papers.runs import repositories
from bild_lab.papers.runs.machine import Machine, blocked_by
from bild_lab.papers.runs.repositories import (
    Repository,
    RepositoryState,
    blocked_by_repositories,
    drafts_with_a_model,
    may_read,
    repositories_in,
    state_of,
    unpinned,
)
from bild_lab.papers.runs.steps import Step, steps_of
from scripts.paper_run import pin_step, require_one_model
from tests.loopback_hub import commit_of, loopback_hub, printed_in_a_fresh_process

VICUNA, LLAMA = "lmsys/vicuna-13b-v1.3", "meta-llama/Llama-2-7b-chat-hf"
LIMA = Repository("datasets", "GAIR/lima", "refs/convert/parquet")


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repositories, "hub_is_reachable", lambda: False)


@pytest.fixture
def pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Pins of the test's own."""
    file = tmp_path / "pins.yaml"
    file.write_text("# head\nmodels: {}\ndatasets: {}\n")
    monkeypatch.setattr(files, "PINS", file)
    files.forget_pins()
    yield file
    files.forget_pins()


@pytest.mark.usefixtures("no_hub", "pins")
@pytest.mark.parametrize(
    ("repository", "logged_in", "told"),
    [
        (Repository("models", VICUNA), True, "in pickles alone: add runtime.allow_pickles=true"),
        (Repository("models", VICUNA, allow_pickles=True), True, None),
        (Repository("models", VICUNA, "refs/pr/5"), True, None),  # cards are of main
        (Repository("models", "google-t5/t5-11b"), True, "google-t5/t5-11b has its weights in"),
        (Repository("models", "google-t5/t5-base"), True, None),
        (Repository("models", "kssteven/T5-large-xsum"), True, None),  # not known
        (Repository("models", LLAMA), True, None),
        (Repository("models", LLAMA), False, f"gated: {LLAMA} may not be read with this login"),
        (LIMA, False, "gated: GAIR/lima"),
        (Repository("models", "me/model"), False, None),
    ],
)
def test_without_a_hub_the_cards_answer(
    repository: Repository, logged_in: bool, told: str | None
) -> None:
    step = Step("python run.py", "x", (), (), repositories=(repository,))
    found = blocked_by(step, Machine("a100", 80, gated=logged_in))
    assert found is None if told is None else told in found
    # what only a card says does not count where force=true tries
    assert blocked_by(step, Machine("a100", 80, gated=logged_in, tries=True)) is None


@pytest.mark.usefixtures("no_hub")
def test_a_pin_to_a_branch_with_safetensors_needs_no_pickles(pins: Path) -> None:
    vicuna = Repository("models", VICUNA)
    entry = {"revision": "abc", "date": "2026-11-28"}
    for branch, pickled in ({}, True), ({"branch": "refs/pr/5"}, False):
        pins.write_text(yaml.safe_dump({"models": {VICUNA: entry | branch}, "datasets": {}}))
        files.forget_pins()
        assert state_of(vicuna).pickled is pickled


def test_the_hub_is_asked_about_the_commit_that_is_read(
    pins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str, str | None]] = []
    known = RepositoryState(pickled=False, gated=False, readable=None, asked=True)
    monkeypatch.setattr(repositories, "hub_is_reachable", lambda: True)
    monkeypatch.setattr(repositories, "_state_on_hub", lambda *of: asked.append(of) or known)
    entry = {"revision": "abc", "date": "2026-11-28"}
    pins.write_text(yaml.safe_dump({"models": {VICUNA: entry}, "datasets": {}}))
    files.forget_pins()
    for revision in (None, "refs/pr/5"):
        assert state_of(Repository("models", VICUNA, revision)) is known
    assert asked == [("models", VICUNA, "abc"), ("models", VICUNA, "refs/pr/5")]


@pytest.mark.usefixtures("pins")
def test_each_revision_of_a_repository_has_a_pin_of_its_own() -> None:
    main, other = Repository("models", "me/a"), Repository("models", "me/a", "old")
    assert (main.key, other.key) == ("me/a", "me/a@old")
    data = Repository("datasets", "me/a")
    assert unpinned([main, other, data, main]) == [main, other, data]


def test_what_the_hub_says_of_a_login_counts_before_what_a_card_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def state(readable: bool | None, asked: bool = True) -> RepositoryState:
        return RepositoryState(False, gated=True, readable=readable, asked=asked)

    assert [may_read(state(readable), True) for readable in (True, False, None)] == [
        True, False, True,
    ]  # fmt: skip
    assert may_read(state(True), False) and not may_read(state(None), False)
    for asked, told in ((True, True), (False, False)):
        monkeypatch.setattr(repositories, "state_of", lambda _, asked=asked: state(False, asked))
        found = blocked_by_repositories([Repository("models", "me/a")], logged_in=True, tries=True)
        assert (found is not None) == told


def test_what_a_command_reads_is_in_its_configuration() -> None:
    cfg = OmegaConf.create(
        {
            "pair": {
                "target": "me/large", "target_revision": None, "draft": "me/small", "draft_revision": "old",
                "second_draft": "outputs/aligned/checkpoint", "second_draft_revision": None,
            },
            "model": {"path": None, "tokenizer": "me/words"},
            "unaligned": {"path": "me/before", "revision": None},
            "dataset": {"hub_id": "me/data", "hub_revision": None, "path": None},
            "runtime": {"allow_pickles": True},
        }
    )  # fmt: skip
    target = Repository("models", "me/large", None, allow_pickles=True)
    draft = Repository("models", "me/small", "old", allow_pickles=True)
    others = [
        Repository("models", "me/before", None, allow_pickles=True),
        Repository("models", "me/words", None, allow_pickles=True),
        Repository("datasets", "me/data"),
    ]
    assert set(repositories_in([cfg, cfg], ["bita", "speculative"])) == {target, draft, *others}
    assert set(repositories_in([cfg], ["bita"])) == {target, *others}
    cfg.dataset.path = "rows"
    cfg.runtime.allow_pickles = False
    read = repositories_in([cfg], [])
    assert Repository("models", "me/large") in read and LIMA.kind not in {one.kind for one in read}


def test_a_policy_says_whether_it_drafts_with_a_model() -> None:
    drafting = {"speculative", "bild", "hf_assisted", "speculative_hierarchy", "the user's own"}
    assert all(map(drafts_with_a_model, drafting))
    assert not any(map(drafts_with_a_model, ("vanilla", "bita", "medusa", "prompt_lookup", "ppd")))


ASK = """
import json, sys
from bild_lab.papers.runs.repositories import Repository, blocked_by_repositories
for words in json.loads(sys.argv[1]):
    print(blocked_by_repositories([Repository(*words)], logged_in=True, tries=True))
"""
SAFE, PICKLED = {"model.safetensors": b""}, {"pytorch_model.bin": b""}
SHARDS = {
    "pytorch_model.bin.index.json": b"{}",
    "pytorch_model-00001-of-00002.bin": b"",
    "pytorch_model-00002-of-00002.bin": b"",
}


def test_pickles_among_data_are_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    info = SimpleNamespace(siblings=[SimpleNamespace(rfilename="pytorch_model.bin")], gated=False)
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", lambda *_, **__: info)
    asked = repositories._state_on_hub.__wrapped__  # without what the process remembers
    found = [asked(kind, "me/both", None).pickled for kind in ("models", "datasets")]
    assert found == [True, False]


@pytest.mark.slow
def test_the_hub_itself_is_asked_where_it_can_be_reached(tmp_path: Path) -> None:
    """It may have changed since the cards were written."""
    models = {
        VICUNA: SAFE,
        "kssteven/T5-large-xsum": SHARDS,
        "kssteven/T5-large-xsum@refs/pr/1": SAFE,
        "me/both": {**SAFE, **PICKLED},
        LLAMA: SAFE,
        "me/gated": SAFE,
    }
    data = {f"{LIMA.name}@{LIMA.revision}": {"plain_text/train/0000.parquet": b""}}
    asked = [
        ["models", VICUNA],
        ["models", "kssteven/T5-large-xsum"],
        ["models", "kssteven/T5-large-xsum", "refs/pr/1"],
        ["models", "me/both"],
        ["models", LLAMA],
        ["models", "me/gated"],
        [LIMA.kind, LIMA.name, LIMA.revision],
        ["models", "me/nowhere"],
    ]
    consent = {"my token": [LLAMA]}
    gated = [LLAMA, LIMA.name, "me/gated"]
    with loopback_hub(data, models, gated=gated, consent=consent) as endpoint:
        told = printed_in_a_fresh_process(
            ASK, endpoint, tmp_path, json.dumps(asked), token="my token"
        )
        nobody = printed_in_a_fresh_process(ASK, endpoint, tmp_path, json.dumps(asked))
    free = ["None"]
    assert told[:1] + told[2:5] + told[7:] == free * 5
    assert told[1].startswith("kssteven/T5-large-xsum has its weights in pickles alone")
    assert told[5].startswith("gated: me/gated may not") and told[6].startswith("gated: GAIR/lima")
    assert nobody[4].startswith(f"gated: {LLAMA}") and nobody[5:] == told[5:]


PIN = """
import sys
from pathlib import Path
from bild_lab import files
files.PINS = Path(sys.argv.pop())
from scripts.paper_run import pin_named, pin_step
from bild_lab.papers.runs.repositories import Repository
from bild_lab.papers.runs.steps import Step
read = (Repository("models", "lmsys/vicuna-13b-v1.3"), Repository("datasets", "GAIR/lima", "refs/convert/parquet"))
steps = [Step("python run.py", "x", (), (), repositories=read)]
print(pin_step(steps, run=False))
pin_named(["lmsys/vicuna-13b-v1.3=refs/pr/5"])
for run in (False, True, False):
    print(pin_step(steps, run))
"""


@pytest.mark.slow
def test_a_run_pins_what_it_reads_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "pins.yaml"
    file.write_text("# head\nmodels: {}\ndatasets: {}\n")
    models = {VICUNA: PICKLED, f"{VICUNA}@refs/pr/5": SAFE}
    data = {LIMA.key: {"plain_text/train/0000.parquet": b""}}
    with loopback_hub(data, models) as endpoint:
        listed, vicuna, left, pinned, done = printed_in_a_fresh_process(
            PIN, endpoint, tmp_path, str(file)
        )
    assert listed == (
        f"to do: 2 repositories are not pinned yet ({VICUNA}, {LIMA.key}); run=true pins"
    )
    assert vicuna == f"{VICUNA}: {commit_of(VICUNA, 'refs/pr/5')}"
    assert left == f"to do: 1 repository is not pinned yet ({LIMA.key}); run=true pins"
    assert pinned == f"pinned {LIMA.key} to {commit_of(LIMA.name, LIMA.revision)}"
    assert done == "done: all 2 repositories are pinned"
    kept = yaml.safe_load(file.read_text())
    assert kept["models"][VICUNA]["branch"] == "refs/pr/5" and list(kept["datasets"]) == [LIMA.key]


@pytest.mark.usefixtures("no_hub")
def test_a_run_without_a_hub_says_so_and_goes_on(pins: Path) -> None:
    step = Step("python run.py", "x", (), (), repositories=(Repository("models", VICUNA),))
    assert pin_step([step], run=True).startswith("not done, as the hub cannot be reached")
    assert yaml.safe_load(pins.read_text())["models"] == {}
    assert pin_step([], run=True) == "nothing to pin"


@pytest.mark.slow
def test_trainings_learn_the_other_answers_where_limas_may_not_be_read() -> None:
    with_lima, without = (
        {step.writes: step for step in steps_of("bita_tab1", "paper", ["pair=vicuna_33b"], names)}
        for names in ((), ("lima",))
    )
    assert with_lima.keys() - without.keys() == {"calibration_vicuna_33b_lima"}
    assert with_lima["bita_vicuna_33b"].reads[1:] == without["bita_vicuna_33b"].reads
    switched = steps_of("bita_tab1", "paper", ["pair=vicuna_33b", "runtime.allow_pickles=true"])
    models = [one for step in switched for one in step.repositories if one.kind == "models"]
    assert models and all(repository.allow_pickles for repository in models)
    assert blocked_by_repositories(models, logged_in=True, tries=False) is None


@pytest.mark.slow
def test_released_answers_take_the_place_of_answering_and_are_of_one_model() -> None:
    given = ["calibration=[released/a.jsonl,released/b.jsonl]"]
    steps = steps_of("bita_tab1", "paper", [*given, "pair=llama2_7b_chat"])
    assert [step.writes for step in steps] == [
        "bita_generate_paper",
        "bita_llama2_7b_chat",
        "bita_tab1_paper",
        "figures/bita_tab1",
    ]
    training = steps[1]
    assert "released/a.jsonl,released/b.jsonl" in training.command and not training.reads
    require_one_model(steps, given)
    both = [*steps, *steps_of("bita_tab1", "paper", [*given, "pair=vicuna_33b"])]
    with pytest.raises(UserError, match=r"are of meta-llama.*, lmsys/vicuna-33b-v1.3; choose one"):
        require_one_model(both, given)
    require_one_model(both, ["pair=vicuna_33b"])
