"""What the papers' runs need is known before they start, and their names are those of the hub's
cards.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from bild_lab.errors import UserError
from bild_lab.lab.config.compose import HYDRA_VERSION, config_dir
from bild_lab.lab.metrics import sentence_data
from bild_lab.papers.published import load_published, published_names
from bild_lab.papers.runs.needs import needs
from bild_lab.papers.runs.paper_runs import RunSetting, commands, hub, items_of, settings_of
from bild_lab.papers.runs.steps import Step, steps_of
from bild_lab.papers.runs.training_needs import FINE_TUNING
from scripts import paper_run


def setting(**changes: object) -> RunSetting:
    dataset = {
        "name": "xsum", "hub_id": "EdinburghNLP/xsum", "hub_config": None, "hub_data_dir": "default", "split": "test",
        "source_column": "document", "reference_column": "summary", "id_column": "id", "category_column": None,
        "limit": 200, "max_source_tokens": 512,
    }  # fmt: skip
    plain = RunSetting(
        "kssteven/T5-large-xsum", ("kssteven/T5-small-xsum",), dataset, "float32", 128, 1, 25
    )
    return replace(plain, dataset={**dataset, **changes.pop("dataset", {})}, **changes)


COLUMN_KEYS = ("source_column", "input_column", "reference_column", "id_column", "category_column")


def misspelt(setting: RunSetting) -> list[str]:
    """What the cards of the hub do not have, in sentences: ids, configurations, splits and
    columns.
    """
    unknown = {setting.target, *setting.drafts} - {None, *hub()["models"]}
    # which another command writes from nothing or a user gives
    local = ("outputs/", "toy:", "/", ".")
    found = [f"no checkpoint {one} is known" for one in unknown if not one.startswith(local)]
    data = setting.dataset
    if data["hub_id"] is None:
        return found
    card = hub()["datasets"].get(data["hub_id"])
    if card is None:
        return [*found, f"no data set {data['hub_id']} is known"]
    named = data["hub_config"] or data["hub_data_dir"]
    if (named is None) == bool(card["configs"]) or (
        named is not None and named not in card["configs"]
    ):
        found.append(
            f"{data['hub_id']} has the configurations {', '.join(card['configs']) or 'none'}, got"
            f" {named}"
        )
    if data["split"] not in card["splits"]:
        found.append(
            f"{data['hub_id']} has the splits {', '.join(card['splits'])}, got {data['split']}"
        )
    for key in COLUMN_KEYS:
        value = data.get(key)
        columns = [] if value is None else [value] if isinstance(value, str) else value
        if columns and not set(columns) & set(card["columns"]):
            found.append(
                f"{data['hub_id']} has the columns {', '.join(card['columns'])}, got {key}"
                f" {columns[0]}"
            )
    return found


@pytest.fixture(autouse=True)
def hydra(request: pytest.FixtureRequest) -> Iterator[None]:
    """The configuration is found once for a test that composes many."""
    if "command" in request.fixturenames:  # which starts by itself
        yield
        return
    with initialize_config_dir(str(config_dir()), **HYDRA_VERSION):
        yield


@pytest.mark.fast("bild_fig10")
@pytest.mark.parametrize("figure", published_names())
def test_a_dry_run_of_every_step_of_every_figure_finds_its_names_on_the_cards(figure: str) -> None:
    for step in steps_of(figure):
        for each in step.settings:
            assert not misspelt(each), step.command
            assert needs(each, "a100").memory_gb > 0
            assert each.target is None or each.points == 0 or needs(each, "a100").examples, (
                step.command
            )


def others() -> list[str]:
    """Experiments that no figure's commands name."""
    every = (load_published(figure).commands for figure in published_names())
    named = {
        word
        for one in every
        for commands in one.values()
        for command in commands
        for word in command.split()
    }
    folder = config_dir() / "experiment"
    names = (
        str(file.relative_to(folder).with_suffix("")) for file in sorted(folder.rglob("*.yaml"))
    )
    return [name for name in names if f"experiment={name}" not in named]


@pytest.mark.slow
@pytest.mark.parametrize("name", others())
def test_a_dry_run_of_every_other_experiment_finds_its_names_on_the_cards(name: str) -> None:
    assert items_of(name) == [name]
    (command,) = commands(name, "paper")
    for each in settings_of(tuple(shlex.split(command))):
        assert not misspelt(each)
        assert needs(each, "a100").examples > 0


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"dataset": {"hub_id": "xsum"}}, "no data set xsum is known"),
        ({"dataset": {"split": "tests"}}, "has the splits train, validation, test, got tests"),
        ({"dataset": {"source_column": "dokument"}}, "got source_column dokument"),
        ({"dataset": {"hub_config": "3.0.0"}}, "has the configurations default, got 3.0.0"),
    ],
)
def test_a_name_that_no_card_has_is_named(fault: dict, told: str) -> None:
    assert not misspelt(setting())
    (message,) = misspelt(setting(**fault))
    assert told in message


def test_memory_is_that_of_the_published_sizes() -> None:
    """T5-large has 738 million weights, T5-small 60.5 (their cards); a cache of 640 tokens is small
    beside them.
    """
    needed = needs(setting(), "t4")
    assert needed.weights_gb == pytest.approx(4 * (0.7377 + 0.0605), rel=0.01)
    assert needed.row_gb == pytest.approx(640 * 4 * 2 * (24 * 1024 + 6 * 512) / 1e9)
    assert needed.download_gb["kssteven/T5-large-xsum"] == pytest.approx(2.95, rel=0.01)
    assert needs(setting(dtype="bfloat16"), "t4").weights_gb == pytest.approx(needed.weights_gb / 2)


def test_a_record_of_all_texts_takes_less_than_to_decode_them_at_every_point() -> None:
    texts = {"limit": 11332}
    live, recorded = setting(dataset=texts), setting(dataset=texts, at_once=16)
    assert 0 < 5 * needs(recorded, "a100").hours < needs(live, "a100").hours
    # a sixteenth of the forwards; the host's part stays
    alone = needs(replace(recorded, at_once=1), "a100").hours
    host = (16 * needs(recorded, "a100").hours - alone) / 15
    assert needs(replace(recorded, points=50), "a100").hours == pytest.approx(
        needs(recorded, "a100").hours + host
    )


def test_time_grows_with_points_texts_and_a_slower_memory() -> None:
    plain = needs(setting(), "t4").hours
    assert needs(setting(points=50), "t4").hours == pytest.approx(2 * plain)
    assert needs(setting(dataset={"limit": 400}), "t4").hours == pytest.approx(403 / 203 * plain)
    whole, held_out = (
        needs(setting(dataset={"limit": None, "skip": skip}), "t4").examples for skip in (0, 34)
    )
    assert held_out == whole - 34
    asked = setting(points=0, at_once=32)
    assert needs(replace(asked, templates=2), "t4").hours == pytest.approx(
        2 * needs(asked, "t4").hours
    )
    assert (
        0 < needs(asked, "t4").hours < plain / 32 and needs(setting(points=0), "t4").hours is None
    )
    llama = setting(target="meta-llama/Llama-2-7b-chat-hf")
    assert needs(llama, "t4").hours > 5 * needs(llama, "h100").hours
    with pytest.raises(UserError, match="gpu must be one of"):
        needs(setting(), "abacus")


def test_hours_are_of_the_gpus_that_are_there() -> None:
    """One GPU holds one row of the answers of this model, two hold 22. Fault: the hours of eight
    GPUs on a machine with one.
    """
    asked = setting(
        target="lmsys/vicuna-33b-v1.3", drafts=(), dtype="float16", spread=True, points=0, at_once=32,
        max_new_tokens=1600,
    )  # fmt: skip
    alone, node = needs(asked, "a100", 1), needs(asked, "a100", 8)
    assert (alone.gpus, node.gpus) == (1, 2)
    assert alone.gpu_hours > 5 * node.gpu_hours


def test_a_training_goes_over_its_data_as_often_as_its_configuration_says() -> None:
    words = "name=heads model.path=lmsys/vicuna-13b-v1.3 layers=[10,20] dataset=sharegpt"
    (trained,) = settings_of(
        ("python", "scripts/train_lm_heads.py", *words.split(), "template=vicuna_full")
    )
    assert (trained.training.passes, trained.training.steps) == (3, None)


def test_a_training_for_each_rate_and_a_question_in_each_template() -> None:
    (tuned,) = settings_of(
        (
            *("python", "scripts/finetune.py", "name=x", "model.path=google/mt5-small"),
            *("dataset=iwslt2017", "train.learning_rate=[1e-4,2e-4]", "validation.limit=null"),
        )
    )
    assert (tuned.training.trainings, tuned.training.evaluated) == (2, 0)
    words = ("python", "scripts/generate_calibration.py", "name=x", "dataset=alpaca_gpt4")
    for template, count in (("vicuna_full", 1), ("vicuna_both", 2)):
        (asked,) = settings_of((*words, "model.path=lmsys/vicuna-7b-v1.3", f"template={template}"))
        assert asked.templates == count


def only_setting(command: str) -> RunSetting:
    (found,) = settings_of(("python", *command.split()))
    return found


def test_a_setting_has_the_models_data_and_repeats_of_its_command() -> None:
    alone = only_setting("run.py pair=toy pair.draft=null policy=vanilla measure.repeats=7")
    assert (alone.target, alone.drafts, alone.repeats) == ("toy:large", (), 7)
    words = "name=gpt_lm1b model=gpt_lm1b dataset=lm1b train.loss=mean"
    fresh = only_setting(f"scripts/finetune.py {words}")
    assert fresh.outline["vocab_size"] == 8000
    assert (fresh.training.kind, fresh.training.loss) == (FINE_TUNING, "mean")
    words = "name=aligned calibration=[answers.jsonl] align.loss=kl train.evaluate_every=70"
    aligned = only_setting(f"scripts/align.py {words}")
    assert (aligned.dataset["name"], aligned.training.kind) == ("answers", "distillation")
    assert aligned.training.evaluate_every == 70
    words = "name=heads model.path=large module=medusa train.max_tokens=99"
    assert only_setting(f"scripts/train_module.py {words}").training.all_tokens == 99


def test_released_heads_are_models_that_draft() -> None:
    heads = "FasterDecoding/medusa-vicuna-7b-v1.3"
    words = ("python", "run.py", "pair=vicuna_7b", "dataset=mt_bench", "policy=medusa")
    for path in (heads, "outputs/medusa/heads"):
        (measured,) = settings_of((*words, f"policy.heads={path}"))
        assert (path in measured.drafts) == (path == heads)


def test_a_model_that_is_trained_from_nothing_is_known_by_what_it_becomes() -> None:
    words = ("python", "scripts/finetune.py", "name=gpt_lm1b", "model=gpt_lm1b", "dataset=lm1b")
    (trained,) = settings_of(words)
    assert trained.target == "outputs/gpt_lm1b/checkpoint"
    needed = needs(trained, "a100")
    assert needed.weights_gb == pytest.approx(4 * 0.097)  # in float32
    assert needed.state_gb == pytest.approx((12 + 2) * 0.097)  # by AdamW, and cast once
    assert 10 < needed.memory_gb < 80 and needed.hours > 0.1


@pytest.mark.slow
def test_the_script_tells_what_a_figure_or_an_experiment_needs(
    command: Callable[..., tuple[int, str]],
) -> None:
    code, told = command(paper_run, "bild/fig2", "gpu=t4", config=None)
    assert code == 0 and "1 kssteven/mT5-large-wmt2014-de-en has its weights in pickles" in told
    code, told = command(
        paper_run, "bild/fig2", "gpu=t4", "runtime.allow_pickles=true", config=None
    )
    assert code == 0
    pins, sentences, first, *_, drawn = [line for line in told.splitlines() if line[:1].isdigit()]
    assert pins.startswith("0 pins: to do: ") and "kssteven/mT5-large-wmt2014-de-en" in pins
    assert sentences.startswith("0 sentences: ")
    assert first.startswith("1 to do: python run.py experiment=bild/fig2 ")
    assert "; writes bild_fig2_paper; " in first
    assert "GB of memory (fits in 16 GB)" in first and "GB to download" in first
    assert "GPU-hours" in first
    assert (
        drawn
        == "3 to do: python scripts/figures.py bild_fig2 scale=paper; reads bild_fig2_paper; writes"
        " figures/bild_fig2; no GPU"
    )
    assert (
        command(paper_run, "bild_fig2", "bild_fig4", config=None)[0]
        == command(paper_run, "bild_fig2", "run=maybe", config=None)[0]
        == 2
    )
    code, told = command(paper_run, "bild_fig2", "gpu=t4", "walk=true", config=None)
    assert code == 2 and "no step of bild_fig2 has the key walk" in told
    assert "bild/thresholds" in others()
    code, told = command(paper_run, "bild/thresholds", "gpu=t4", config=None)
    assert code == 0 and "kssteven/mT5-large-iwslt2017-de-en" in told
    assert command(paper_run, "bild/abacus", config=None)[0] == 2


def test_a_data_set_that_is_a_script_is_read_from_the_hubs_conversion() -> None:
    files = {name: config_dir() / f"dataset/{name}.yaml" for name in dataset_names()}
    read = {name: OmegaConf.load(file) for name, file in files.items()}
    scripts = {hub_id for hub_id, card in hub()["datasets"].items() if card.get("script")}
    asked = [(name, data) for name, data in read.items() if data.get("hub_id") in scripts]
    assert {"xsum", "iwslt2017", "lima", "humaneval_x"} <= {name for name, _ in asked}
    for name, data in asked:
        assert data.hub_revision == "refs/convert/parquet" and "hub_config" not in data, name
        assert data.hub_data_dir in hub()["datasets"][data.hub_id]["configs"], name


def dataset_names() -> list[str]:
    return sorted(file.stem for file in (config_dir() / "dataset").glob("*.yaml"))


def test_a_listing_says_what_splits_sentences_and_a_run_fetches_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def line(
        run: bool, reason: str | None, here: str = "punkt_abbreviations", **data: object
    ) -> str:
        monkeypatch.setattr("bild_lab.lab.metrics.writing.splitter_name", lambda: here)
        monkeypatch.setattr(sentence_data, "fetch_sentence_data", lambda: reason)
        step = Step("python run.py", "x", (), (), settings=(setting(dataset=data),))
        return str(paper_run.sentences_line([step], run))

    summaries = {"metric": "rougeLsum"}
    assert line(False, None, metric="bleu") == line(True, None, metric="bleu") == "None"
    assert line(False, None, **summaries).startswith("to do: run=true fetches NLTK's punkt_tab")
    assert line(False, None, "punkt_tab", **summaries).startswith("done: NLTK's punkt_tab splits")
    assert "was fetched into outputs/nltk_data" in line(True, None, metrics=["bleu", "rougeLsum"])
    offline = line(True, "no route to host", **summaries)
    assert "(no route to host): sentences are split by a short list of abbreviations" in offline
