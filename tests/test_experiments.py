"""Every experiment of conf/experiment composes, sweeps what it says, and could start."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from itertools import product, zip_longest
from pathlib import Path

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf

from bild_lab.engine.adapters.layer_heads import LayerHeads
from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.engine.models.hf import HuggingFaceModel
from bild_lab.engine.models.native import NativeModel
from bild_lab.errors import UserError
from bild_lab.lab.config import PairSpec, config_dir, typed
from bild_lab.lab.data.examples import DatasetSpec, load_examples
from bild_lab.lab.point import cached_examples, prepare
from bild_lab.papers.figures import FIGURES, measured
from bild_lab.papers.match_rate_command import match_rates
from bild_lab.papers.published import SCALES, load_published
from tests.engine.adapters.tiny import files_of
from tests.engine.drafters.tables import ngram_table
from tests.thinned import thinned
from tests.tiny import tiny_llama

FOLDER = config_dir() / "experiment"
EVERY = sorted(file.relative_to(FOLDER).with_suffix("").as_posix() for file in FOLDER.rglob("*.yaml"))
MATCH_RATES = [name for name in EVERY if name.startswith("ppd_tab")]  # run by scripts/match_rates.py
EXPERIMENTS = [name for name in EVERY if name not in MATCH_RATES]
SCREENED = [name for name in EVERY if name.startswith("bild_fig2/")]  # run by scripts/screen.py
RUN = "python run.py experiment="


def commands(figure: str, scale: str) -> list[str]:
    """What is run for a figure, each as an experiment's name and its overrides."""
    return [one.removeprefix(RUN) for one in load_published(figure).commands[scale] if one.startswith(RUN)]


COMMANDS = sorted({*EXPERIMENTS, *(one for name in FIGURES for scale in SCALES for one in commands(name, scale))})

TEMPERATURES, WINDOWS = ("decoding.temperature", "0,1"), ("policy.window", "3,5,7")
WINDOW, LENIENCES = ("policy.window", "7"), ("policy.lenience", "1,0.5,0.3,0.1")
DRAFTERS = "google-t5/t5-small,google-t5/t5-base,google-t5/t5-large"
# what speculative decoding sweeps over in each of its tables, and what it decodes
TABLES = {
    "spec_tab2": {TEMPERATURES, WINDOWS},
    "spec_tab3": {TEMPERATURES, WINDOW},
    "spec_tab5": {TEMPERATURES, WINDOW, LENIENCES},
}
TASKS = {
    "ende": ("translate English to German: a text", ("ein Text",), "bleu"),
    "cnndm": ("summarize: a text", ("a summary",), "rouge"),
}
ROW = {"en": "a text", "de": "ein Text", "article": "a text", "highlights": "a summary", "id": "one"}
# what BiTA's data sets have
ROW |= {"document": "a text", "summary": "a summary", "prompt": "a text", "task_id": "one", "question_id": 1}
# and PPD's
ROW |= {"context": "a text", "question": "what is it?", "answers": {"text": ["a text"]}}
BITA = [name for name in FIGURES if name.startswith("bita_")]
BITA_DATA = {"xsum", "mt_bench", "cip", "humaneval_x"}
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

# BiLD's sweeps: the paper's ranges of thresholds (§7.1.2), for translation and for summaries, and the released pairs
TRANSLATED = {("policy.fallback", "0.5,0.6,0.7,0.8,0.9"), ("policy.rollback", "1,2,3,5,10")}
SUMMARIZED = {("policy.fallback", "0.2,0.3,0.4,0.5,0.6"), ("policy.rollback", "2,3,4,5,6")}
EARLY = {("policy.fallback", "0.2,0.4,0.6,0.8"), ("policy.rollback", "0.5,1,1.5")}
CALM = {("policy.threshold", "0.7,0.8,0.9,0.98"), ("policy.temperature", "0,1,2,4,8")}
BILD = {
    "bild_fig4/iwslt2017": TRANSLATED | {("pair", "mt5_iwslt2017,mt5_iwslt2017_aligned")},
    "bild_fig4/wmt14": TRANSLATED | {("pair", "mt5_wmt14,mt5_wmt14_aligned")},
    "bild_fig4/xsum": SUMMARIZED | {("pair", "t5_xsum,t5_xsum_aligned")},
    "bild_fig4/cnn_dailymail": SUMMARIZED | {("pair", "t5_cnn_dailymail,t5_cnn_dailymail_aligned")},
    "bild_fig4/small": {
        ("policy.fallback", "0.3,0.5,0.8"),
        ("policy.rollback", "0.69,2,5"),
        ("pair", "toy,toy_aligned"),
    },
    "bild_fig6_7/bild": EARLY | {("dataset", "iwslt2017,wmt14")},
    "bild_fig6_7/calm": CALM | {("dataset", "iwslt2017,wmt14")},
    "bild_fig6_7/small_bild": EARLY,
    "bild_fig6_7/small_calm": CALM,
}


@pytest.fixture(scope="module", autouse=True)
def hydra() -> Iterator[None]:
    """The configuration is found once for all tests of this module."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        yield


@lru_cache(maxsize=256)
def composed(experiment: str, *overrides: str) -> DictConfig:
    return compose("config", [f"experiment={experiment}", *overrides], return_hydra_config=True)


def configured(experiment: str, job: Sequence[str]) -> DictConfig:
    """The same for any job; values are set without composing anew, which takes long."""
    overrides = OverridesParser.create().parse_overrides(list(job))
    groups = [one.input_line for one in overrides if (config_dir() / one.get_key_element()).is_dir()]
    config = deepcopy(composed(experiment, *groups))
    for one in overrides:
        if one.input_line not in groups:
            OmegaConf.update(config, one.get_key_element(), one.value())  # of a key that is there
    return config


def swept(command: str) -> dict[str, str]:
    """What a command sweeps over: its file's lists, in whose place come its own words."""
    experiment, *words = shlex.split(command)
    given = {key: value for key, _, value in (word.partition("=") for word in words)}
    if (params := given.pop("hydra.sweeper.params", None)) is not None:
        given |= yaml.safe_load(params)
    return {**(composed(experiment).hydra.sweeper.params or {}), **given}


def values(command: str, key: str) -> set[str]:
    """Every value that a key or a group has in the command's jobs."""
    told = swept(command).get(key) or OmegaConf.select(composed(shlex.split(command)[0]), f"{key}.name")
    return set(told.split(","))


def covering(params: dict[str, str]) -> list[list[str]]:
    """Overrides in which every value of the sweep comes at least once, not their whole product."""
    given = OverridesParser.create().parse_overrides([f"{key}={value}" for key, value in params.items()])
    lists = [[job[0] for job in BasicSweeper.split_arguments([one], None)[0]] for one in given]
    firsts = [values[0] for values in lists]
    return [[one or first for one, first in zip(row, firsts, strict=True)] for row in zip_longest(*lists)] or [[]]


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
    assert f"python {'scripts/screen.py' if experiment in SCREENED else 'run.py'} experiment={experiment}" in head


def test_what_experiments_share_is_shared() -> None:
    """A file of conf/scale that only one of them takes belongs into that one."""
    texts = [file.read_text() for folder in (FOLDER, FOLDER.parent / "scale") for file in folder.rglob("*.yaml")]
    for file in (FOLDER.parent / "scale").glob("*.yaml"):
        assert sum(f"  - /scale/{file.stem}\n" in text for text in texts) > 1, file


@pytest.mark.parametrize(
    "command",
    thinned(COMMANDS, 12),
)
def test_an_experiment_can_start_and_sweeps_over_knobs_that_are_there(
    command: str, checkpoints: Path, rows: Path
) -> None:
    """The check before a run, on tiny checkpoints and a local row in place of what the hub has."""
    experiment, sweep = shlex.split(command)[0], swept(command)
    assert composed(experiment).hydra.mode.name == "MULTIRUN"
    *others, last = covering(sweep)
    for job in others:
        OmegaConf.to_container(configured(experiment, job).policy, resolve=True)
    plain = configured(experiment, last)
    family = "llama" if experiment.startswith("bita_") or plain.policy.name == "step_cascade" else "t5"
    here = [f"pair.target={checkpoints / family}", f"pair.draft={checkpoints / f'{family}-draft'}"]
    here += [f"dataset.path={rows}"] if plain.dataset.name != "toy" else []
    if "table" in plain.policy:
        here.append(f"policy.table={ngram_table(checkpoints / 't5')}")
    needed = files_of(plain.policy.name, tiny_llama(1).config, checkpoints)  # of the tiny model
    here += [f"policy.{knob}={path}" for knob, path in needed.items()]
    if plain.policy.name == "ppd":  # the tiny model has one layer to exit from
        here.append("policy.exit_layer=1")
    if plain.policy.name == "layer_skip":
        here.append("policy.skipped_layers=[1]")
    cfg = configured(experiment, [*last, *here])
    assert prepare(cfg).policy == cfg.policy.name  # its parts are those of the policy's file
    cached_examples.cache_clear()


@pytest.mark.parametrize("table", ["spec_tab2/ende", "spec_tab2/cnndm", "spec_tab3/ende", "spec_tab3/cnndm"])
def test_a_table_of_speculative_decoding_has_the_papers_target_drafters_task_and_values(table: str, rows: Path) -> None:
    name, _, task = table.partition("/")
    cfg = composed(table, f"dataset.path={rows}")
    (example,) = load_examples(typed(DatasetSpec, cfg.dataset, "dataset"))
    assert (example.prompt, example.references, cfg.dataset.metric) == TASKS[task]
    assert (cfg.name, cfg.pair.target, cfg.policy.name) == (name, "google-t5/t5-11b", "speculative")
    assert set(swept(table).items()) == TABLES[name] | {("pair.draft", DRAFTERS)}


def test_table_5_of_speculative_decoding_is_of_the_small_drafter_on_translation(rows: Path) -> None:
    cfg = composed("spec_tab5/ende_small", f"dataset.path={rows}")
    (example,) = load_examples(typed(DatasetSpec, cfg.dataset, "dataset"))
    assert (example.prompt, example.references, cfg.dataset.metric) == TASKS["ende"]
    assert set(swept("spec_tab5/ende_small").items()) == TABLES["spec_tab5"] | {("pair.draft", "google-t5/t5-small")}


@pytest.mark.parametrize("task", TASKS)
def test_n_grams_of_table_3_are_counted_where_the_experiment_looks_for_them(task: str) -> None:
    (command,) = [one for one in commands("spec_tab3", "paper") if one.startswith(f"spec_tab3/{task} pair.draft=null")]
    sweep = swept(command)
    built = [one for one in load_published("spec_tab3").commands["paper"] if f"name=ngrams_{task} " in f"{one} "]
    assert (sweep["policy"], sweep["policy.order"], sweep["decoding.temperature"]) == ("ngram", "1,2", "0,1")
    assert len(built) == 1 and sweep["policy.table"] == f"outputs/ngrams_{task}/table.safetensors"


@pytest.mark.parametrize("table", ["table2", "table3", "table5"])
def test_a_small_experiment_asks_for_the_users_checkpoints(table: str, checkpoints: Path, rows: Path) -> None:
    data = f"dataset.path={rows}"
    with pytest.raises(UserError, match=r"pair\.target must be a folder or a hub id, got null"):
        prepare(composed(f"spec_small/{table}", data))
    with pytest.raises(UserError, match=r"give one with pair\.draft"):
        prepare(composed(f"spec_small/{table}", data, f"pair.target={checkpoints / 't5'}"))
    assert set(swept(f"spec_small/{table}").items()) == TABLES[table.replace("table", "spec_tab")]


def test_the_small_table_of_drafters_takes_n_grams_as_its_comment_says(checkpoints: Path, rows: Path) -> None:
    overrides = [f"pair.target={checkpoints / 't5'}", f"dataset.path={rows}", "policy.window=7"]
    drafter = ["policy=ngram", "policy.order=2", f"policy.table={ngram_table(checkpoints / 't5')}"]
    point = prepare(composed("spec_small/table3", *overrides, *drafter))
    assert (point.policy, point.knobs["window"], point.knobs["order"]) == ("ngram", 7, 2)


@pytest.mark.parametrize("experiment", BILD)
def test_bilds_curves_sweep_the_papers_thresholds_over_its_pairs(experiment: str) -> None:
    figure, _, file = experiment.partition("/")
    cfg = composed(experiment)
    assert set(swept(experiment).items()) == BILD[experiment]
    if figure == "bild_fig4":
        assert (cfg.name, cfg.policy.name) == (figure + ("_small" if file == "small" else ""), "bild")
        assert cfg.policy.window == 10  # "the maximum generation length of the small model"
        assert cfg.dataset.name == ("toy" if file == "small" else file)
    else:
        assert cfg.name == ("bild_fig7_small" if "small" in file else "bild_fig7")
        assert cfg.policy.name == ("calm" if "calm" in file else "bild_early_exit")


def test_bilds_early_exit_drafts_with_the_first_of_mt5_smalls_eight_layers() -> None:
    early, calm = composed("bild_fig6_7/bild"), composed("bild_fig6_7/calm", "dataset=wmt14")
    assert (early.policy.exit_layer, early.pair.draft) == (1, None)
    assert early.pair.target == "outputs/mt5_small_iwslt2017_early_exit/checkpoint"
    assert calm.pair.target == "outputs/mt5_small_wmt14_calm/checkpoint"
    assert calm.policy.measure == "hidden_state"


@pytest.mark.parametrize("task", ["mt5_iwslt2017", "mt5_wmt14", "t5_xsum", "t5_cnn_dailymail"])
def test_bilds_pairs_are_the_released_ones_of_their_data(task: str) -> None:
    plain, aligned = (OmegaConf.load(config_dir() / "pair" / f"{task}{end}.yaml") for end in ("", "_aligned"))
    words = {"mt5_iwslt2017": ("mT5", "iwslt2017"), "mt5_wmt14": ("mT5", "wmt2014"), "t5_xsum": ("T5", "xsum")}
    family, data = words.get(task, ("T5", "cnndm"))
    assert plain.target == aligned.target and plain.target.startswith(f"kssteven/{family}-large-{data}")
    assert plain.draft.startswith(f"kssteven/{family}-small-{data}") and aligned.draft.startswith(
        f"kssteven/{family}-small-{data}"
    )


@pytest.mark.parametrize("name", thinned(["bild_fig8", "bild_fig9", "bild_fig4", "bild_fig5"], 2))
def test_bilds_figures_have_the_drafters_that_their_rows_are_named_after(name: str) -> None:
    """Figure 4 has both, the others the aligned one alone."""
    found = {
        compose("config", [f"pair={pair}"]).pair.aligned
        for command in [*commands(name, "paper"), *commands(name, "small")]
        for pair in values(command, "pair")
    }
    assert found == ({False, True} if name == "bild_fig4" else {True})


def test_a_pair_is_aligned_where_its_file_says_so() -> None:
    """And the released checkpoints say it too."""
    pairs = [typed(PairSpec, OmegaConf.load(file), "pair") for file in sorted((config_dir() / "pair").glob("*.yaml"))]
    released = [pair for pair in pairs if str(pair.target).startswith("kssteven/")]
    assert {pair.aligned for pair in released} == {True, False}
    assert all(pair.aligned == pair.draft.endswith("-bild-aligned") for pair in released)
    assert [pair.name for pair in pairs if pair.aligned and pair not in released] == ["toy_aligned"]


@pytest.mark.parametrize("name", ["bita_tab1", "bita_tab2", "bita_tab7"])
def test_bitas_commands_measure_every_row_and_panel_that_the_paper_prints(name: str) -> None:
    blocks = load_published(name).values
    several = [(values(command, "pair"), values(command, "dataset")) for command in commands(name, "paper")]
    pairs, data = (set.union(*sets) for sets in zip(*several, strict=True))
    told = {panel for block in blocks for panel in block.panels}, {row for block in blocks for row in block.rows}
    if name == "bita_tab2":  # a panel is a pair, a row a policy
        policies = set.union(*(values(command, "policy") for command in commands(name, "paper")))
        assert (pairs, policies - {"prompt_lookup", "hf_prompt_lookup"}) == told
    else:
        assert pairs == told[1]
    assert data == (BITA_DATA if name == "bita_tab1" else {"mt_bench"})


@pytest.mark.parametrize("name", BITA)
def test_bitas_experiments_ask_in_the_models_own_template(name: str, rows: Path) -> None:
    for command in commands(name, "paper"):
        experiment, sweep = shlex.split(command)[0], swept(command)
        template = [f"template={sweep['template']}"] if "template" in sweep else []
        cfg = composed(experiment, *template)
        assert (cfg.name, cfg.decoding.temperature) == (name, 0)
        example = load_examples(replace(typed(DatasetSpec, cfg.dataset, "dataset"), path=str(rows)))[0]
        (opening,) = {text for family, text in CHAT.items() for pair in values(command, "pair") if family in pair}
        assert example.prompt.startswith(opening), command


def test_an_adapter_is_looked_for_under_the_models_name() -> None:
    assert composed("bita_tab1", "pair=vicuna_33b").policy.adapter == "outputs/bita_vicuna_33b/adapter"
    assert composed("bita_fig7/medusa", "pair=vicuna_13b").policy.heads == "outputs/medusa_vicuna_13b/heads"
    (job,) = covering({"policy": "bita", "policy.adapter": swept(commands("bita_tab2", "paper")[1])["policy.adapter"]})
    assert composed("bita_tab2", *job, "pair=llama2_70b_chat").policy.adapter == "outputs/bita_llama2_70b_chat/adapter"


def test_the_ways_of_decoding_are_those_of_bitas_table_4() -> None:
    best, full = commands("bita_tab4_9", "paper")
    ways = [(values(one, "policy.tree"), swept(one).get("policy.top_k")) for one in (best, full)]
    assert ways == [({"straightforward", "efficient_tree"}, None), ({"full_tree"}, "1,2,3,4")]
    assert composed("bita_tab4_9").policy.top_k == 5


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
def test_an_experiment_of_match_rates_names_its_own_command(experiment: str) -> None:
    first, second, *_ = (FOLDER / f"{experiment}.yaml").read_text().splitlines()
    assert first == "# @package _global_"
    assert second.endswith(f": python scripts/match_rates.py experiment={experiment}")


@pytest.mark.parametrize("experiment", MATCH_RATES)
def test_an_experiment_of_match_rates_is_refused_by_the_main_job(experiment: str) -> None:
    """Which would measure the default policy on the default pair instead."""
    with pytest.raises(ConfigCompositionException, match="Could not override 'model'"):
        composed(experiment)


@pytest.mark.parametrize("table", ["ppd_tab1", "ppd_tab4_6"])
@pytest.mark.parametrize("scale", SCALES)
def test_ppds_tables_share_a_run_for_each_data_set(table: str, scale: str) -> None:
    published = load_published(table)
    words = [command.partition("experiment=")[2] for command in published.commands[scale]]
    ran = [word for word in words if word]  # the others train heads
    assert ran == [f"ppd_tab1/{file}" for file in (PROMPTS if scale == "paper" else ["small"])]
    assert published.folders[scale] == [of_match_rates(name).name for name in ran]


@pytest.mark.parametrize("dataset", PROMPTS)
def test_a_row_of_ppds_tables_has_the_papers_prompt_and_all_the_numbers_it_prints(dataset: str, rows: Path) -> None:
    cfg = of_match_rates(f"ppd_tab1/{dataset}", f"dataset.path={rows}")
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


@pytest.mark.parametrize("experiment", thinned([f"ppd_tab1/{file}" for file in ("small", *PROMPTS)], 3))
def test_an_experiment_of_match_rates_fills_both_figures(
    experiment: str, checkpoints: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a tiny checkpoint with heads for its first layer, and a local row in place of what the hub has."""
    monkeypatch.chdir(tmp_path)
    plain = of_match_rates(experiment)
    target = NativeModel(HuggingFaceModel(Checkpoint(str(checkpoints / "llama")), torch.device("cpu"), torch.float32))
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
