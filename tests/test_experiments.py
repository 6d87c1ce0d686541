"""Every experiment of conf/experiment composes, sweeps what it says, and could start."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from bild_lab.config import config_dir, typed
from bild_lab.data.tasks import DatasetSpec, load_examples
from bild_lab.errors import UserError
from bild_lab.runner import cached_examples, prepare
from tests.drafters.tables import ngram_table

FOLDER = config_dir() / "experiment"
EXPERIMENTS = sorted(file.relative_to(FOLDER).with_suffix("").as_posix() for file in FOLDER.rglob("*.yaml"))

TEMPERATURES, WINDOWS = ("decoding.temperature", "0,1"), ("policy.window", "3,5,7")
LENIENCES, ORDERS = ("policy.lenience", "1,0.5,0.3,0.1"), ("policy.order", "1,2")
# what speculative decoding sweeps over in each of its tables, and what it decodes
TABLES = {"spec_tab2": {TEMPERATURES, WINDOWS}, "spec_tab3": {TEMPERATURES}, "spec_tab5": {TEMPERATURES, LENIENCES}}
TASKS = {
    "ende": ("translate English to German: a text", ("ein Text",), "bleu"),
    "cnndm": ("summarize: a text", ("a summary",), "rouge"),
}
ROW = {"en": "a text", "de": "ein Text", "article": "a text", "highlights": "a summary", "id": "one"}


@pytest.fixture(scope="module", autouse=True)
def hydra() -> Iterator[None]:
    """The configuration is found once for all tests of this module."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        yield


@lru_cache(maxsize=64)
def composed(experiment: str, *overrides: str) -> DictConfig:
    return compose("config", [f"experiment={experiment}", *overrides], return_hydra_config=True)


def swept(experiment: str) -> dict[str, str]:
    return dict(composed(experiment).hydra.sweeper.params)


def covering(params: dict[str, str]) -> list[list[str]]:
    """Overrides in which every value of the sweep comes at least once, not their whole product."""
    given = OverridesParser.create().parse_overrides([f"{key}={value}" for key, value in params.items()])
    lists = [[job[0] for job in BasicSweeper.split_arguments([one], None)[0]] for one in given]
    firsts = [values[0] for values in lists]
    return [[one or first for one, first in zip(row, firsts, strict=True)] for row in zip_longest(*lists)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A test split that has the columns of all data sets."""
    folder = tmp_path_factory.mktemp("rows")
    row = {**ROW, "translation": {"en": ROW["en"], "de": ROW["de"]}}
    (folder / "test.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def test_the_sweep_of_a_test_covers_every_value() -> None:
    assert covering({"policy.window": "3,5", "decoding.temperature": "0,1,2"}) == [
        ["policy.window=3", "decoding.temperature=0"],
        ["policy.window=5", "decoding.temperature=1"],
        ["policy.window=3", "decoding.temperature=2"],
    ]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_names_its_own_command(experiment: str) -> None:
    head = "\n".join((FOLDER / f"{experiment}.yaml").read_text().splitlines()[:2])
    assert head.startswith("# @package _global_\n")
    assert f"python run.py experiment={experiment}" in head


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_can_start_and_sweeps_over_knobs_that_are_there(
    experiment: str, checkpoints: Path, rows: Path
) -> None:
    """The check before a run, on tiny checkpoints and a local row in place of what the hub has."""
    plain = composed(experiment)
    assert plain.hydra.mode.name == "MULTIRUN"
    *others, last = covering(plain.hydra.sweeper.params)
    for job in others:
        OmegaConf.to_container(composed(experiment, *job).policy, resolve=True)
    here = [f"pair.target={checkpoints / 't5'}", f"pair.draft={checkpoints / 't5-draft'}"]
    here += [] if plain.dataset.name == "toy" else [f"dataset.path={rows}"]
    here += [f"policy.table={ngram_table(checkpoints / 't5')}"] if "table" in plain.policy else []
    cfg = composed(experiment, *here, *last)
    assert prepare(cfg).policy == cfg.policy.name  # its parts are those of the policy's file
    cached_examples.cache_clear()


@pytest.mark.parametrize("experiment", [name for name in EXPERIMENTS if name.startswith("spec_tab")])
def test_a_row_of_a_table_has_the_papers_target_drafter_task_and_values(experiment: str, rows: Path) -> None:
    table, _, row = experiment.partition("/")
    task, drafter = row.split("_")
    cfg = composed(experiment, f"dataset.path={rows}")
    (example,) = load_examples(typed(DatasetSpec, cfg.dataset, "dataset"))
    assert (example.prompt, example.references, cfg.dataset.metric) == TASKS[task]
    assert cfg.name == table
    assert cfg.pair.target == "google-t5/t5-11b"
    assert cfg.pair.draft == (None if drafter == "ngram" else f"google-t5/t5-{drafter}")
    assert cfg.policy.name == ("ngram" if drafter == "ngram" else "speculative")
    assert set(swept(experiment).items()) == TABLES[table] | ({ORDERS} if drafter == "ngram" else set())
    if drafter == "ngram":
        assert cfg.policy.table == f"outputs/ngrams_{task}/table.safetensors"


@pytest.mark.parametrize("table", ["table2", "table3", "table5"])
def test_a_small_experiment_asks_for_the_users_checkpoints(table: str, checkpoints: Path, rows: Path) -> None:
    data = f"dataset.path={rows}"
    with pytest.raises(UserError, match=r"pair\.target must be a folder or a hub id, got null"):
        prepare(composed(f"spec_small/{table}", data))
    with pytest.raises(UserError, match=r"give one with pair\.draft"):
        prepare(composed(f"spec_small/{table}", data, f"pair.target={checkpoints / 't5'}"))
    assert set(swept(f"spec_small/{table}").items()) == TABLES[table.replace("table", "spec_tab")]


def test_the_small_table_of_drafters_takes_n_grams_as_its_comment_says(checkpoints: Path, rows: Path) -> None:
    overrides = [f"pair.target={checkpoints / 't5'}", f"dataset.path={rows}"]
    drafter = ["policy=ngram", "policy.order=2", f"policy.table={ngram_table(checkpoints / 't5')}"]
    point = prepare(composed("spec_small/table3", *overrides, *drafter))
    assert (point.policy, point.knobs["window"], point.knobs["order"]) == ("ngram", 7, 2)
