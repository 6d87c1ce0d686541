"""Every experiment of conf/experiment composes, sweeps what it says, and could start."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product, takewhile, zip_longest
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf

from bild_lab.engine.adapters.layer_heads import LayerHeads
from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.engine.models.native import NativeModel
from bild_lab.errors import UserError
from bild_lab.lab.config import config_dir, typed
from bild_lab.lab.data.examples import DatasetSpec, load_examples
from bild_lab.lab.point import cached_examples, prepare
from bild_lab.papers.figures import FIGURES, measured
from bild_lab.papers.published import load_published
from scripts.match_rates import match_rates
from tests.engine.adapters.tiny import files_of
from tests.engine.drafters.tables import ngram_table
from tests.tiny import tiny_llama

FOLDER = config_dir() / "experiment"
EVERY = sorted(file.relative_to(FOLDER).with_suffix("").as_posix() for file in FOLDER.rglob("*.yaml"))
MATCH_RATES = [name for name in EVERY if name.startswith("ppd_tab")]  # run by scripts/match_rates.py
EXPERIMENTS = [name for name in EVERY if name not in MATCH_RATES]

TEMPERATURES, WINDOWS = ("decoding.temperature", "0,1"), ("policy.window", "3,5,7")
LENIENCES, ORDERS = ("policy.lenience", "1,0.5,0.3,0.1"), ("policy.order", "1,2")
# what speculative decoding sweeps over in each of its tables, and what it decodes
TABLES = {"spec_tab2": {TEMPERATURES, WINDOWS}, "spec_tab3": {TEMPERATURES}, "spec_tab5": {TEMPERATURES, LENIENCES}}
TABLES["spec_tab4"] = TABLES["spec_tab2"]  # the same runs, of which it shows other columns
TASKS = {
    "ende": ("translate English to German: a text", ("ein Text",), "bleu"),
    "cnndm": ("summarize: a text", ("a summary",), "rouge"),
}
ROW = {"en": "a text", "de": "ein Text", "article": "a text", "highlights": "a summary", "id": "one"}
# what BiTA's data sets have
ROW |= {"document": "a text", "summary": "a summary", "prompt": "a text", "task_id": "one", "question_id": 1}
# and PPD's
ROW |= {"context": "a text", "question": "what is it?", "answers": {"text": ["a text"]}}
# BiTA's tables: the data sets, and what is swept over them
BITA_DATA = ["xsum", "mt_bench", "cip", "humaneval_x"]
BITA = {
    "bita_tab1": (["llama2_7b", "llama2_13b", "vicuna_33b", "falcon_40b", "llama2_70b"], BITA_DATA),
    "bita_tab2": (["bita", "hf_assisted", "speculative", "self_speculative", "prompt_lookup"], ["mt_bench"]),
    "bita_tab3_8": (["masks_only", "shallow", "deep"], BITA_DATA),
    "bita_tab4_9": (["straightforward", "full_tree", "efficient_tree"], BITA_DATA),
    "bita_tab7": (
        ["llama2_7b", "vicuna_7b", "llama2_13b", "vicuna_13b", "vicuna_33b", "falcon_40b", "llama2_70b"],
        ["mt_bench"],
    ),
    "bita_fig7": (["bita", "medusa"], ["mt_bench"]),
    "bita_fig8": (BITA_DATA, None),  # a data set is a curve
    "bita_fig9": (BITA_DATA, None),
}
CHAT = {"llama2": "[INST] <<SYS>>", "vicuna": "A chat between", "falcon": "User: "}
# PPD's Table 3 with the contents of ROW
PROMPTS = {
    "squad": "We have provided context information below.\na text\n"
    "### Given this information, please answer the question: what is it?\n### Assistant:",
    "wmt15_en_fr": "### Instruction: Translate English sentence into French.\n"
    "English: Sounds like a typical rugby club to me.\nFrench: Ça m'a l'air d'être un club de rugby typique. #\n"
    "English: At an English university, perhaps\nFrench: Dans une université anglaise, peut-être #\n"
    "English: a text\nFrench:",
    "cnn_dailymail": "# Article\na text\n# Summarize the article\n### Assistant:",
}


@pytest.fixture(scope="module", autouse=True)
def hydra() -> Iterator[None]:
    """The configuration is found once for all tests of this module."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        yield


@lru_cache(maxsize=256)
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
    """A file, good for any split, that has the columns of all data sets."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    row = {**ROW, "translation": {"en": ROW["en"], "de": ROW["de"], "fr": "un texte"}}
    file.write_text(json.dumps(row) + "\n")
    return file


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


def one_row_of_each_table(experiment: str) -> object:
    """BiTA's tables have rows that differ in little more than a name: the others are for `make test-slow`."""
    table, _, row = experiment.partition("/")
    again = table in BITA and row != BITA[table][0][0]
    return pytest.param(experiment, marks=pytest.mark.slow) if again else experiment


@pytest.mark.parametrize("experiment", map(one_row_of_each_table, EXPERIMENTS))
def test_an_experiment_can_start_and_sweeps_over_knobs_that_are_there(
    experiment: str, checkpoints: Path, rows: Path
) -> None:
    """The check before a run, on tiny checkpoints and a local row in place of what the hub has."""
    plain = composed(experiment)
    assert plain.hydra.mode.name == "MULTIRUN"
    *others, last = covering(plain.hydra.sweeper.params)
    for job in others:
        OmegaConf.to_container(composed(experiment, *job).policy, resolve=True)
    family = "llama" if experiment.startswith("bita_") else "t5"
    here = [f"pair.target={checkpoints / family}", f"pair.draft={checkpoints / f'{family}-draft'}"]
    here += [f"dataset.path={rows}"] if plain.dataset.name != "toy" or "dataset" in swept(experiment) else []
    here += [f"policy.table={ngram_table(checkpoints / 't5')}"] if "table" in plain.policy else []
    last = [word for word in last if not word.startswith("policy.adapter=")]  # of the tiny model instead
    needed = files_of(plain.policy.name, tiny_llama(1).config, checkpoints)
    here += [f"policy.{knob}={path}" for knob, path in needed.items()]
    if plain.policy.name == "ppd":  # the tiny model has one layer to exit from
        last = [*last, "policy.exit_layer=1"]
    if plain.policy.name == "layer_skip":
        here.append("policy.skipped_layers=[1]")
    cfg = composed(experiment, *here, *last)
    assert prepare(cfg).policy == cfg.policy.name  # its parts are those of the policy's file
    cached_examples.cache_clear()


@pytest.mark.parametrize("experiment", [name for name in EXPERIMENTS if re.match("spec_tab./(ende|cnndm)", name)])
def test_a_row_of_a_table_has_the_papers_target_drafter_task_and_values(experiment: str, rows: Path) -> None:
    table, _, row = experiment.partition("/")
    task, drafter = row.split("_")
    cfg = composed(experiment, f"dataset.path={rows}")
    (example,) = load_examples(typed(DatasetSpec, cfg.dataset, "dataset"))
    assert (example.prompt, example.references, cfg.dataset.metric) == TASKS[task]
    assert cfg.name == table.replace("spec_tab4", "spec_tab2")
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


@pytest.mark.parametrize("table", BITA)
def test_bitas_experiments_have_a_file_for_each_row_and_the_papers_data_sets(table: str) -> None:
    files, data = BITA[table]
    assert sorted(files) == sorted(file.stem for file in (FOLDER / table).glob("*.yaml"))
    for file in files:
        cfg = composed(f"{table}/{file}")
        assert cfg.name == table
        assert swept(f"{table}/{file}").get("dataset", cfg.dataset.name).split(",") == (data or [file])
        assert cfg.decoding.temperature == 0


@pytest.mark.parametrize("experiment", [name for name in EXPERIMENTS if name.startswith(("bita_tab", "bita_fig"))])
def test_bitas_experiments_ask_in_the_models_own_template(experiment: str, rows: Path) -> None:
    cfg = composed(experiment)
    models = swept(experiment).get("pair", cfg.pair.name).split(",")
    example = load_examples(replace(typed(DatasetSpec, cfg.dataset, "dataset"), path=str(rows)))[0]
    assert {example.prompt.startswith(CHAT[model.split("_")[0]]) for model in models} == {True}
    assert cfg.policy.name not in ("bita", "medusa") or (
        str(cfg.policy.get("adapter") or cfg.policy.get("heads")).startswith("outputs/")
        or all(path.startswith("outputs/") for path in swept(experiment)["policy.adapter"].split(","))
    )


def test_an_adapter_is_looked_for_under_the_models_name() -> None:
    assert composed("bita_tab1/vicuna_33b").policy.adapter == "outputs/bita_vicuna_33b/adapter"
    assert composed("bita_fig7/medusa", "pair=vicuna_13b").policy.heads == "outputs/medusa_vicuna_13b/heads"


def test_the_ways_of_decoding_are_those_of_bitas_table_4() -> None:
    assert composed("bita_tab4_9/straightforward").policy.decoding == "straightforward"
    assert composed("bita_tab4_9/full_tree").policy.decoding == "full_tree"
    assert swept("bita_tab4_9/full_tree")["policy.top_k"] == "1,2,3,4"
    efficient = composed("bita_tab4_9/efficient_tree").policy
    assert (efficient.decoding, efficient.top_k) == ("efficient_tree", 5)


@pytest.mark.parametrize("file", sorted(file.stem for file in (FOLDER / "bita_small").glob("*.yaml")))
def test_a_small_bita_experiment_asks_for_the_users_target(file: str) -> None:
    with pytest.raises(UserError, match=r"pair\.target must be a folder or a hub id, got null"):
        prepare(composed(f"bita_small/{file}"))


@lru_cache
def of_match_rates(experiment: str, *overrides: str) -> DictConfig:
    return compose("match_rates", [f"experiment={experiment}", *overrides])


def scale_of(experiment: str) -> str:
    return "small" if experiment.endswith("/small") else "paper"


@pytest.mark.parametrize("experiment", MATCH_RATES)
def test_an_experiment_of_match_rates_names_its_own_command_the_hardware_and_the_cost(experiment: str) -> None:
    first, second, *others = (FOLDER / f"{experiment}.yaml").read_text().splitlines()
    assert first == "# @package _global_"
    assert second.endswith(f": python scripts/match_rates.py experiment={experiment}")
    comment = "\n".join(takewhile(lambda line: line.startswith("#"), others))
    assert "The paper: Vicuna-13B, its heads trained on 8 A100" in comment and "Cost: " in comment


@pytest.mark.parametrize("experiment", MATCH_RATES)
def test_an_experiment_of_match_rates_is_refused_by_the_main_job(experiment: str) -> None:
    """Which would measure the default policy on the default pair instead."""
    with pytest.raises(ConfigCompositionException, match="Could not override 'model'"):
        composed(experiment)


@pytest.mark.parametrize("table", ["ppd_tab1", "ppd_tab4_6"])
def test_ppds_tables_have_a_file_for_each_data_set_and_a_small_one_that_share_their_runs(table: str) -> None:
    files = sorted(name.partition("/")[2] for name in MATCH_RATES if name.startswith(f"{table}/"))
    assert files == sorted([*PROMPTS, "small"])
    for file in files:
        assert of_match_rates(f"{table}/{file}") == of_match_rates(f"ppd_tab1/{file}")
    for scale, folders in load_published(table).folders.items():
        own = [name for name in MATCH_RATES if name.startswith(f"{table}/") and scale_of(name) == scale]
        assert sorted(folders) == sorted(of_match_rates(name).name for name in own)


@pytest.mark.parametrize("dataset", PROMPTS)
def test_a_row_of_ppds_tables_has_the_papers_prompt_and_all_the_numbers_it_prints(dataset: str, rows: Path) -> None:
    cfg = of_match_rates(f"ppd_tab4_6/{dataset}", f"dataset.path={rows}")
    (example,) = load_examples(typed(DatasetSpec, cfg.dataset, "dataset"))
    assert (example.prompt, cfg.dataset.max_source_tokens, cfg.dataset.limit) == (PROMPTS[dataset], None, None)
    assert (cfg.model.path, cfg.heads[0]) == ("lmsys/vicuna-13b-v1.3", "shared")
    assert len(cfg.heads) == 2 and cfg.heads[1].startswith("outputs/")
    groups, rest = divmod(cfg.decoding.max_new_tokens, cfg.positions)
    ends = [(group * cfg.positions + 1, (group + 1) * cfg.positions) for group in range(groups)]
    panels = [dataset, *(f"{dataset}, tokens {first}-{last}" for first, last in ends)]
    asked = {
        (panel, f"layer {layer}, {heads}, k = {top_k}", "match rate")
        for panel, layer, heads, top_k in product(panels, cfg.layers, ("shared", "trained"), cfg.top_k)
    }
    printed = {key for key in load_published("ppd_tab4_6").printed if key[0].partition(",")[0] == dataset}
    assert (asked, rest) == (printed, 0)


@pytest.mark.parametrize("experiment", [f"ppd_tab1/{file}" for file in (*PROMPTS, "small")])
def test_an_experiment_of_match_rates_fills_both_figures(
    experiment: str, checkpoints: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a tiny checkpoint with heads for its first layer, and a local row in place of what the hub has."""
    monkeypatch.chdir(tmp_path)
    plain = of_match_rates(experiment)
    target = NativeModel(Checkpoint(str(checkpoints / "llama")), torch.device("cpu"), torch.float32)
    LayerHeads.fresh(target.decoder, {"fingerprint": target.checkpoint.fingerprint}, [1]).save(plain.heads[1])
    here = [f"model.path={checkpoints / 'llama'}", "layers=[1]", "runtime.device=cpu"]
    here += [f"dataset.path={rows}"] if plain.dataset.name != "toy" else ["dataset.limit=2"]
    match_rates(of_match_rates(experiment, *here))
    expected = [f"layer 1, {heads}, k = {top_k}" for heads in ("shared", "trained") for top_k in (1, 3, 5)]
    for name in ("ppd_tab1", "ppd_tab4_6"):
        rates = measured(FIGURES[name], load_published(name), Path("outputs"), scale_of(experiment))
        cells = FIGURES[name].cells(rates)
        assert [cell.row for cell in cells if cell.panel == plain.dataset.name] == expected
        assert (f"{plain.dataset.name}, tokens 1-{plain.positions}" in {cell.panel for cell in cells}) == ("4" in name)
