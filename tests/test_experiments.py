"""Every experiment of conf/experiment composes at both scales, sweeps what it says, and could
start.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from copy import deepcopy
from functools import lru_cache
from itertools import product, zip_longest
from pathlib import Path

import pytest
import torch
from hydra import compose
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from bild_lab.engine.methods.early_exit.layer_heads import LayerHeads
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.hf.model import HuggingFaceModel
from bild_lab.engine.models.native import NativeModel
from bild_lab.lab.config.compose import config_dir
from bild_lab.lab.config.schemas import PairSpec, typed
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.data.examples import cached_examples, load_examples
from bild_lab.lab.point.prepare import prepare
from bild_lab.papers.figures import FIGURES, measured
from bild_lab.papers.match_rates import match_rates
from bild_lab.papers.published import SCALES, load_published
from bild_lab.papers.runs.needs import size_of
from tests.engine.methods.drafters.tables import ngram_table
from tests.engine.methods.modules.tiny import files_of
from tests.tiny import tiny_llama

pytestmark = pytest.mark.usefixtures("found_configuration")

FOLDER = config_dir() / "experiment"
EXPERIMENTS = sorted(
    file.relative_to(FOLDER).with_suffix("").as_posix() for file in FOLDER.rglob("*.yaml")
)
PAPERS = [name for name in EXPERIMENTS if name.partition("/")[0] in ("bild", "spec", "bita", "ppd")]
RUN = "python run.py experiment="


def commands(figure: str, scale: str = "paper") -> list[str]:
    """What is run for a figure, each as an experiment's name and its overrides."""
    return [
        one.removeprefix(RUN)
        for one in load_published(figure).commands[scale]
        if one.startswith(RUN)
    ]


SMALL = [f"{name} scale=small" for name in PAPERS]
OF_FIGURES = [one for name in FIGURES for scale in SCALES for one in commands(name, scale)]
COMMANDS = sorted({*EXPERIMENTS, *SMALL, *OF_FIGURES})

TEMPERATURES, WINDOW = ("decoding.temperature", "0,1"), ("policy.window", "7")
DRAFTERS = ("pair", "t5_11b_small,t5_11b_base,t5_11b_large")
TABLES = {  # what speculative decoding sweeps over in each of its tables
    "spec/tab2": {TEMPERATURES, ("policy.window", "3,5,7"), DRAFTERS},
    "spec/tab3": {TEMPERATURES, ("policy.knobs", "{window:1}"), DRAFTERS},
    "spec/tab5": {
        TEMPERATURES,
        WINDOW,
        ("policy.lenience", "1,0.5,0.3,0.1"),
        ("pair", "t5_11b_small"),
    },
}
TASKS = {  # by data set, what is decoded
    "wmt14_en_de": ("translate English to German: a text", ("ein Text",), "bleu"),
    "cnn_dailymail": ("summarize: a text", ("a summary",), "rougeLsum"),
}
ROW = {
    "en": "a text",
    "de": "ein Text",
    "article": "a text",
    "highlights": "a summary",
    "id": "one",
}
ROW |= {
    "text": "a text",
    "document": "a text",
    "summary": "a summary",
    "prompt": "a text",
    "task_id": "one",
    "question_id": 1,
}
ROW |= {"context": "a text", "question": "what is it?", "answers": {"text": ["a text"]}}
BITA = [name for name in FIGURES if name.startswith("bita_")]
PROMPTS = {  # PPD's Table 3 with the contents of ROW
    "squad": (
        "We have provided context information below.\na text\n"
        "### Given this information, please answer the question: what is it?\n### Assistant:"
    ),
    "wmt15_en_fr": (
        "### Instruction: Translate English sentence into French.\nEnglish: Sounds like a typical"
        " rugby club to me.\nFrench: Ça m'a l'air d'être un club de rugby typique. #\nEnglish: At"
        " an English university, perhaps\nFrench: Dans une université anglaise, peut-être"
        " #\nEnglish: a text\nFrench:"
    ),
    "cnn_dailymail_ppd": "# Article\na text\n# Summarize the article\n### Assistant:",
}


@lru_cache(maxsize=256)
def composed(experiment: str, *overrides: str) -> DictConfig:
    return compose("config", [f"experiment={experiment}", *overrides], return_hydra_config=True)


@lru_cache(maxsize=256)
def name_in(experiment: str, scale: str) -> str:
    """The name of an experiment's folder, read from its file, or from the first that it begins with
    that has one. Nothing is composed, which takes a third of a second.
    """
    return _named(f"experiment/{experiment}").replace("${scale}", scale)


def _named(place: str) -> str:
    content = OmegaConf.load(config_dir() / f"{place}.yaml")
    parents = [one for one in content.get("defaults", []) if isinstance(one, str)]
    given = OmegaConf.to_container(content).get("name")
    return given or next(filter(None, map(_named, (one.removeprefix("/") for one in parents))), "")


def of_command(command: str) -> DictConfig:
    """The configuration of a command, with its scale."""
    experiment, *words = shlex.split(command)
    return composed(experiment, *(word for word in words if word.startswith("scale=")))


def configured(command: str, job: Sequence[str]) -> DictConfig:
    """The same for any job; values are set without composing anew, which takes long."""
    experiment, *words = shlex.split(command)
    overrides = OverridesParser.create().parse_overrides(list(job))
    groups = [
        one.input_line for one in overrides if (config_dir() / one.get_key_element()).is_dir()
    ]
    config = deepcopy(
        composed(experiment, *(word for word in words if word.startswith("scale=")), *groups)
    )
    for one in overrides:
        if one.input_line not in groups:
            OmegaConf.update(config, one.get_key_element(), one.value())  # of a key that is there
    return config


def swept(command: str) -> dict[str, str]:
    """What a command sweeps over: its file's lists, in whose place come its own words."""
    given = {
        key: value for key, _, value in (word.partition("=") for word in shlex.split(command)[1:])
    }
    given.pop("scale", None)
    return {**(of_command(command).hydra.sweeper.params or {}), **given}


def values(command: str, key: str) -> set[str]:
    """Every value that a key or a group has in the command's jobs."""
    told = swept(command).get(key) or OmegaConf.select(of_command(command), f"{key}.name")
    return set(told.split(","))


def covering(params: dict[str, str]) -> list[list[str]]:
    """Overrides in which every value of the sweep comes at least once, not their whole product."""
    given = OverridesParser.create().parse_overrides(
        [f"{key}={value}" for key, value in params.items()]
    )
    lists = [[job[0] for job in BasicSweeper.split_arguments([one], None)[0]] for one in given]
    firsts = [values[0] for values in lists]
    return [
        [one or first for one, first in zip(row, firsts, strict=True)]
        for row in zip_longest(*lists)
    ] or [[]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file, good for any split, that has the columns of all data sets."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    row = {**ROW, "translation": {"en": ROW["en"], "de": ROW["de"], "fr": "un texte"}}
    file.write_text(json.dumps(row) + "\n")
    return file


@pytest.mark.fast("bild/fig4_summaries", "bita/tab2", "spec/tab2")
@pytest.mark.parametrize("experiment", PAPERS)
def test_an_experiment_composes_with_the_name_in_its_file(experiment: str) -> None:
    for scale in SCALES:
        assert composed(experiment, f"scale={scale}").name == name_in(experiment, scale)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_names_its_own_command_and_has_a_folder_for_each_scale(
    experiment: str,
) -> None:
    head = "\n".join((FOLDER / f"{experiment}.yaml").read_text().splitlines()[:2])
    assert head.startswith("# @package _global_\n")
    assert f"python run.py experiment={experiment}" in head
    if experiment in PAPERS:
        names = [name_in(experiment, scale) for scale in SCALES]
        assert [name.rpartition("_")[2] for name in names] == list(SCALES)
        assert experiment.replace("/", "_").startswith(names[0].removesuffix("_paper"))


@pytest.mark.parametrize("figure", sorted(FIGURES))
def test_a_figure_reads_the_folders_that_its_commands_write(figure: str) -> None:
    """And those of other figures, whose commands are named there."""
    published = load_published(figure)
    for scale in SCALES:
        written = {name_in(shlex.split(one)[0], scale) for one in commands(figure, scale)}
        assert not written or written <= set(published.folders[scale])


@pytest.mark.fast("bild/fig4 scale=small", "bita/tab7 scale=small")
@pytest.mark.parametrize("command", COMMANDS)
def test_an_experiment_can_start_and_sweeps_over_knobs_that_are_there(
    command: str, checkpoints: Path, rows: Path
) -> None:
    """The check before a run, on tiny checkpoints and a local row in place of what the hub has."""
    sweep = swept(command)
    assert of_command(command).hydra.mode.name == "MULTIRUN"
    *others, last = covering(sweep)
    for job in others:
        OmegaConf.to_container(configured(command, job).policy, resolve=True)
    plain = configured(command, last)
    decoder_only = command.startswith("bita/")
    family = "llama" if decoder_only else "t5"
    here = [f"pair.target={checkpoints / family}", f"pair.draft={checkpoints / f'{family}-draft'}"]
    here += [f"dataset.path={rows}"] if plain.dataset.name != "toy" else []
    if "table" in plain.policy:
        here.append(f"policy.table={ngram_table(checkpoints / 't5')}")
    if "table" in (plain.policy.get("knobs") or {}):  # of the drafter that policy=alpha measures
        here.append(f"policy.knobs.table={ngram_table(checkpoints / 't5')}")
    needed = files_of(plain.policy.name, tiny_llama(1).config, checkpoints)  # of the tiny model
    here += [f"policy.{knob}={path}" for knob, path in needed.items()]
    if plain.policy.name == "ppd":  # the tiny model has one layer to exit from
        here.append("policy.exit_layer=1")
    if plain.policy.name == "medusa":  # the tiny heads are fewer than those that were released
        here += ["policy.tree=full_tree", "policy.top_k=2"]
    if plain.policy.name == "layer_skip":
        here += [
            "policy.skipped_layers=[1]",
            "policy.skipped_attention=[]",
            "policy.skipped_feed_forward=[]",
        ]
    cfg = configured(command, [*last, *here])
    assert prepare(cfg).policy == cfg.policy.name  # its parts are those of the policy's file
    cached_examples.cache_clear()


@pytest.mark.fast("bild/fig4_summaries", "bita/tab2", "ppd/fig2", "spec/tab2")
@pytest.mark.parametrize("experiment", PAPERS)
def test_small_takes_nothing_of_the_papers_models_and_data(experiment: str) -> None:
    cfg, sweep = composed(experiment, "scale=small"), swept(f"{experiment} scale=small")
    assert (sweep["pair"], sweep["dataset"]) == ("toy", "toy") and "pair.draft" not in sweep
    models = {cfg.pair.target, cfg.pair.draft} - {None}
    assert (
        all(one.startswith(("toy:", "outputs/toy")) for one in models) and cfg.dataset.name == "toy"
    )
    assert cfg.dataset.limit == 24 and cfg.dataset.chat_template == "{question}"


@pytest.mark.fast("bild/fig10", "bild/fig2", "bild/fig4_summaries", "bild/lossy_lenience")
@pytest.mark.parametrize(
    "command", [one for one in COMMANDS if one.startswith("bild/") and "scale=" not in one]
)
def test_bilds_runs_decode_the_whole_validation_split_by_algorithm_1(command: str) -> None:
    """The paper's figures and the released `--do_eval` are of the validation split; Figure 10 is
    for reading, and `generate` is timed on a part.
    """
    experiment = shlex.split(command)[0]
    cfg = of_command(command)
    assert cfg.dataset.split == "validation"
    in_part = "fig10" in experiment or "generate" in experiment
    assert (cfg.dataset.limit is None) != in_part
    assert "dataset.split" not in swept(command) and "dataset.limit" not in swept(command)
    unverified = not cfg.policy.get("verify_tail", True)
    assert unverified == (cfg.policy.name.startswith("bild") and experiment != "bild/fig2")


@pytest.mark.fast("wmt14_en_de-spec/tab2", "cnn_dailymail-spec/tab3")
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("data", TASKS)
def test_a_table_of_speculative_decoding_has_the_papers_target_drafters_task_and_values(
    table: str, data: str, rows: Path
) -> None:
    cfg = composed(table, f"dataset={data}", f"dataset.path={rows}")
    (example,) = load_examples(typed(DatasetSpec, cfg.dataset, "dataset"))
    assert (example.prompt, example.references, cfg.dataset.metric) == TASKS[data]
    policy = "alpha" if table == "spec/tab3" else "speculative"
    assert (cfg.pair.target, cfg.policy.name) == ("google-t5/t5-11b", policy)
    assert set(swept(table).items()) == TABLES[table]


def test_n_grams_of_table_3_are_counted_where_the_experiment_looks_for_them() -> None:
    built = [one for one in load_published("spec_tab3").commands["paper"] if "module=ngram" in one]
    names = [
        word.removeprefix("name=")
        for one in built
        for word in one.split()
        if word.startswith("name=")
    ]
    drafted = [swept(one) for one in commands("spec_tab3") if "policy.drafter=ngram" in one]
    tables = [f"table:outputs/{name}/table.safetensors" for name in names]
    knobs = [
        ",".join(f"{{order:{order},window:1,{table}}}" for order in (1, 2)) for table in tables
    ]
    assert [one["policy.knobs"] for one in drafted] == knobs
    assert {one["decoding.temperature"] for one in drafted} == {"0,1"}


@pytest.mark.fast("bild_fig4", "bild_fig8")
@pytest.mark.parametrize("name", ["bild_fig8", "bild_fig9", "bild_fig4", "bild_fig5"])
def test_bilds_figures_have_the_drafters_that_their_rows_are_named_after(name: str) -> None:
    """Figure 4 has both, the others the aligned one alone."""
    pairs = {
        pair
        for scale in SCALES
        for command in commands(name, scale)
        if not command.startswith("bild/generate")  # which drafts nothing
        for pair in values(command, "pair")
    }
    files = [OmegaConf.load(config_dir() / f"pair/{pair}.yaml") for pair in pairs]
    found = {typed(PairSpec, file, "pair").aligned for file in files}
    assert found == ({False, True} if name == "bild_fig4" else {True})


def test_a_pair_is_aligned_where_its_file_says_so() -> None:
    """And the released checkpoints say it too."""
    pairs = [
        typed(PairSpec, OmegaConf.load(file), "pair")
        for file in sorted((config_dir() / "pair").glob("*.yaml"))
    ]
    released = [pair for pair in pairs if str(pair.target).startswith("kssteven/")]
    assert {pair.aligned for pair in released} == {True, False}
    assert all(pair.aligned == pair.draft.endswith("-bild-aligned") for pair in released)
    assert [pair.name for pair in pairs if pair.aligned and pair not in released] == ["toy_aligned"]


@pytest.mark.fast("bita_tab2")
@pytest.mark.parametrize("name", ["bita_tab1", "bita_tab2", "bita_tab7"])
def test_bitas_commands_measure_every_row_and_panel_that_the_paper_prints(name: str) -> None:
    blocks = load_published(name).values
    several = [(values(command, "pair"), values(command, "dataset")) for command in commands(name)]
    pairs, data = (set.union(*sets) for sets in zip(*several, strict=True))
    told = (
        {panel for block in blocks for panel in block.panels},
        {row for block in blocks for row in block.rows},
    )
    if name == "bita_tab2":  # a panel is a pair, a row a policy
        policies = set.union(*(values(command, "policy") for command in commands(name)))
        # the table has no copied drafts, and its baseline no row
        ours = {"prompt_lookup", "hf_prompt_lookup", "vanilla"}
        assert (pairs, policies - ours) == told
    else:
        assert pairs == told[1]
    assert data == (
        {"xsum", "mt_bench", "cip", "humaneval_x"} if name == "bita_tab1" else {"mt_bench"}
    )


def test_layers_to_skip_are_chosen_for_the_depth_of_each_target() -> None:
    """No command shares a list among targets, and the blocks left out lie in every third of the
    target's layers.
    """
    skipping = [one for one in commands("bita_tab2") if "policy=layer_skip" in one]
    assert sorted(pair for one in skipping for pair in values(one, "pair")) == [
        "llama2_70b_chat",
        "llama2_7b_chat",
    ]
    for one in skipping:
        (pair,) = values(one, "pair")
        depth = size_of(compose("config", [f"pair={pair}"]).pair.target).layers
        words = dict(word.split("=", 1) for word in shlex.split(one)[1:])
        blocks = [
            at
            for key, value in words.items()
            if key.startswith("policy.skipped_")
            for at in json.loads(value)
        ]
        assert max(blocks) < depth and {3 * at // depth for at in blocks} == {0, 1, 2}, one


def of_match_rates(command: str, *overrides: str) -> DictConfig:
    """The configuration of a command of scripts/match_rates.py."""
    return compose("match_rates", [*shlex.split(command)[2:], *overrides])


def rates_of(scale: str) -> list[str]:
    return [
        one for one in load_published("ppd_tab1").commands[scale] if "scripts/match_rates.py" in one
    ]


@pytest.mark.fast("small")
@pytest.mark.parametrize("scale", SCALES)
def test_ppds_tables_share_a_run_for_each_data_set(scale: str) -> None:
    first, by_position = load_published("ppd_tab1"), load_published("ppd_tab4_6")
    assert first.commands == by_position.commands and first.folders == by_position.folders
    assert first.folders[scale] == [of_match_rates(command).name for command in rates_of(scale)]
    assert all(f"match={scale}" in command for command in rates_of(scale))
    made = next(
        place
        for place, one in enumerate(first.commands[scale])
        if "scripts/train_lm_heads.py" in one
    )
    for command in first.commands[scale][:made]:
        assert of_match_rates(command).heads == "shared", (
            "heads are measured before they are trained"
        )
    _, second, *_ = (config_dir() / f"match/{scale}.yaml").read_text().splitlines()
    assert f": python scripts/match_rates.py match={scale}" in second


def test_a_translation_ends_as_those_of_ppds_prompt_do_but_its_tables_count_all_positions() -> None:
    assert compose("config", ["dataset=wmt15_en_fr"]).decoding.stop == ["#"]
    assert composed("ppd/fig2").decoding.stop is None
    command = "python scripts/match_rates.py match=paper dataset=wmt15_en_fr"
    assert of_match_rates(command).decoding.stop is None


@pytest.mark.slow
@pytest.mark.parametrize("command", rates_of("paper"))
def test_a_row_of_ppds_tables_has_the_papers_prompt_and_all_the_numbers_it_prints(
    command: str, rows: Path
) -> None:
    cfg = of_match_rates(command, f"dataset.path={rows}")
    dataset = cfg.dataset.name
    (example,) = load_examples(typed(DatasetSpec, cfg.dataset, "dataset"))
    assert (example.prompt, cfg.dataset.max_source_tokens, cfg.dataset.limit) == (
        PROMPTS[dataset],
        None,
        None,
    )
    kind = "trained" if cfg.name.startswith("ppd_tab1_trained") else "shared"
    (training,) = [
        one for one in load_published("ppd_tab1").commands["paper"] if "train_lm_heads" in one
    ]
    made = compose("train_lm_heads", shlex.split(training)[2:])
    assert (cfg.model.path, made.model.path) == ("lmsys/vicuna-13b-v1.3", "lmsys/vicuna-13b-v1.3")
    assert cfg.heads == ("shared" if kind == "shared" else f"outputs/{made.name}/heads")
    assert list(made.layers) == list(cfg.layers) and made.train.max_target_tokens == 2048
    groups, rest = divmod(cfg.decoding.max_new_tokens, cfg.positions)
    ends = [(group * cfg.positions + 1, (group + 1) * cfg.positions) for group in range(groups)]
    panels = [dataset, *(f"{dataset}, tokens {first}-{last}" for first, last in ends)]
    asked = {
        (panel, f"layer {layer}, {heads}, k = {top_k}", "match rate")
        for panel, layer, heads, top_k in product(panels, cfg.layers, (kind,), cfg.top_k)
    }
    every = load_published("ppd_tab4_6").printed
    printed = {
        key for key in every if key[0].partition(",")[0] == dataset and f", {kind}," in key[1]
    }
    assert (asked, rest) == (printed, 0)


@pytest.mark.fast("small")
@pytest.mark.parametrize("scale", SCALES)
def test_match_rates_fill_both_tables(
    scale: str, checkpoints: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a tiny checkpoint with heads for its first layer, and a local row in place of what the hub
    has.
    """
    monkeypatch.chdir(tmp_path)
    several = rates_of(scale)[
        ::3
    ]  # at the paper's scale the first data set, with the shared head and with trained ones
    plain, last = of_match_rates(several[0]), of_match_rates(several[-1])
    target = NativeModel(
        HuggingFaceModel(Checkpoint(str(checkpoints / "llama")), torch.device("cpu"), torch.float32)
    )
    LayerHeads.fresh(target.decoder, {"fingerprint": target.checkpoint.fingerprint}, [1]).save(
        last.heads if isinstance(last.heads, str) else last.heads[1]
    )
    here = [f"model.path={checkpoints / 'llama'}", "layers=[1]", "runtime.device=cpu"]
    here += [f"dataset.path={rows}"] if plain.dataset.name != "toy" else ["dataset.limit=2"]
    for command in several:
        match_rates(of_match_rates(command, *here))
    expected = [
        f"layer 1, {heads}, k = {top_k}" for heads in ("shared", "trained") for top_k in (1, 3, 5)
    ]
    for name in ("ppd_tab1", "ppd_tab4_6"):
        rates = measured(FIGURES[name], load_published(name), Path("outputs"), scale)
        cells = FIGURES[name].numbers(rates)
        assert [cell.row for cell in cells if cell.panel == plain.dataset.name] == expected
        assert (
            f"{plain.dataset.name}, tokens 1-{plain.positions}" in {cell.panel for cell in cells}
        ) == ("4" in name)
