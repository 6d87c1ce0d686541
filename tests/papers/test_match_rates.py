"""Match rates: counted as a naive program without caches counts them, at all positions, layers and
k.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from transformers import PreTrainedModel

import scripts.match_rates
from bild_lab.engine.methods.early_exit.layer_heads import LayerHeads
from bild_lab.engine.methods.ppd.pipeline import PredictivePipeline
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.hf.model import HuggingFaceModel
from bild_lab.engine.models.native import NativeModel
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from bild_lab.lab.measure.prediction import pipeline_log
from bild_lab.lab.metrics.bootstrap import central_interval, resample_counts
from bild_lab.lab.store.table import write_csv
from bild_lab.papers import match_rates
from bild_lab.papers.match_rates import (
    TOTAL,
    MatchRates,
    MatchSpec,
    Rate,
    grouped,
    layers_of,
    measure_match_rates,
    read_rates,
)
from tests.policies import FAMILIES, in_memory
from tests.tiny import END, PAD, START, VOCABULARY, save, tiny_llama, tiny_t5

LONGEST, LAYERS, TOP_KS = 7, (1, 2, 3), (1, 3, 5)
MODELS = {"t5": tiny_t5, "llama": tiny_llama}
Command = Callable[..., tuple[int, str]]


def spec(**changes: object) -> MatchSpec:
    return MatchSpec(
        **{"layers": LAYERS, "top_k": TOP_KS, "heads": "shared", "positions": 2, **changes}
    )


def prompts(family: str) -> list[list[int]]:
    chance = np.random.default_rng(1)
    found = [chance.integers(3, VOCABULARY, chance.integers(2, 6)).tolist() for _ in range(6)]
    return [[*words, END] if family == "t5" else [START, *words] for words in found]


def requests(family: str) -> list[Request]:
    sources = [
        Source((PAD,), torch.tensor([ids])) if family == "t5" else Source(tuple(ids))
        for ids in prompts(family)
    ]
    return [
        Request(source, Limits(len(source.prompt), LONGEST, frozenset([END]))) for source in sources
    ]


def states_of(
    model: PreTrainedModel, family: str, prompt: list[int], text: list[int]
) -> list[torch.Tensor]:
    """What every layer puts out at the last token, the whole text run anew; the last one's after
    the final norm.
    """
    if family == "t5":
        ids = {
            "input_ids": torch.tensor([prompt]),
            "decoder_input_ids": torch.tensor([[PAD, *text]]),
        }
        states = model(**ids, output_hidden_states=True).decoder_hidden_states
    else:
        states = model(
            input_ids=torch.tensor([[*prompt, *text]]), output_hidden_states=True
        ).hidden_states
    return [state[0, -1] for state in states[1:]]


@torch.no_grad()
def naive_counts(model: PreTrainedModel, family: str) -> tuple[Counter, Counter]:
    """Matches by layer, k and position, and tokens by position, each token decoded from nothing."""
    matches, tokens = Counter(), Counter()
    scale = model.config.d_model**-0.5 if family == "t5" else 1.0
    norm = model.decoder.final_layer_norm if family == "t5" else model.model.norm
    for prompt in prompts(family):
        text: list[int] = []
        while len(text) < LONGEST and END not in text:
            states = states_of(model, family, prompt, text)
            token = int(model.lm_head(states[-1] * scale).argmax())
            tokens[len(text)] += 1
            for layer in LAYERS:
                best = (
                    model.lm_head(norm(states[layer - 1]) * scale).argsort(descending=True).tolist()
                )
                for k in TOP_KS:
                    matches[layer, k, len(text)] += token in best[:k]
            text.append(token)
    return matches, tokens


@pytest.mark.fast("llama")
@pytest.mark.parametrize("family", FAMILIES)
def test_matches_are_those_of_a_program_without_caches(family: str) -> None:
    model = MODELS[family](3, 4)
    expected, tokens = naive_counts(model, family)
    found = measure_match_rates(in_memory(model, "native"), requests(family), spec(positions=1))
    rows = {(row.layer, row.top_k, row.position): row for row in found.rows()}
    assert len(rows) == len(LAYERS) * len(TOP_KS) * (len(tokens) + 1)
    for (layer, k, place), matched in expected.items():
        row = rows[layer, k, str(place + 1)]
        assert (row.matches, row.count) == (matched, tokens[place])
    for layer in LAYERS:
        for k in TOP_KS:
            row, every = rows[layer, k, TOTAL], [expected[layer, k, place] for place in tokens]
            assert (row.matches, row.count) == (sum(every), sum(tokens.values()))
            assert row.rate == sum(every) / sum(tokens.values()) and 0 < row.rate < 1


def test_every_layer_and_k_has_its_own_interval_of_the_same_draws() -> None:
    chance = np.random.default_rng(2)
    counts = chance.integers(50, 100, (20, 3))
    matches = chance.integers(0, counts[:, None, None, None], (20, 1, 2, 2, 3))
    found = MatchRates(("shared",), (1, 2), (1, 3), 100, matches, counts)
    drawn = resample_counts(20, 0)
    for place, total in enumerate(found.totals()):
        some = matches[:, 0, place // 2, place % 2].sum(-1)
        assert (total["low"], total["high"]) == pytest.approx(
            central_interval(drawn @ some / (drawn @ counts.sum(-1)))
        )


def test_a_table_comes_back_as_it_was_written_and_folders_without_one_are_passed_over(
    tmp_path: Path,
) -> None:
    rates = [
        Rate(20, 3, "shared", "1-2", 3, 10, 0.3),
        Rate(20, 1, 'my,\r\n"heads"', TOTAL, 7, 11, 7 / 11),
    ]
    for name, written in (("b", rates), ("c", rates[:1])):
        (tmp_path / name).mkdir()
        write_csv(tmp_path / name / "match_rates.csv", pd.DataFrame(written))
        (tmp_path / name / "metrics.json").write_text(
            json.dumps({"settings": {"dataset.name": name}})
        )
    folders = [tmp_path / name for name in "abc"]
    assert read_rates(folders) == [("b", rates[0]), ("b", rates[1]), ("c", rates[0])]


@pytest.mark.fast("llama")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_pipeline_finds_the_same_matches(family: str) -> None:
    """Its texts end without a prediction of the last token, which the rates count too."""
    target = in_memory(MODELS[family](3, 4), "native")
    found = measure_match_rates(
        target, requests(family), spec(layers=(2, 3), top_k=(2, 4), positions=1)
    )
    for i, layer in enumerate((2, 3)):
        for j, k in enumerate((2, 4)):
            for text, request in enumerate(requests(family)):
                trace = Trace()
                PredictivePipeline(target, layer, k).decode(request, trace)
                tokens = found.counts[text].sum()
                assert found.matches[text, 0, i, j, : tokens - 1].tolist() == list(
                    pipeline_log(trace).matches
                )


def test_several_kinds_of_heads_see_the_same_texts(tmp_path: Path) -> None:
    save(tiny_llama(3, 4), tmp_path / "llama")
    target = native(tmp_path / "llama")
    fresh = LayerHeads.fresh(target.decoder, {"fingerprint": target.checkpoint.fingerprint}, LAYERS)
    fresh.save(tmp_path / "fresh")
    with torch.no_grad():
        fresh.matrices[1].neg_()  # of layer 2
    fresh.save(tmp_path / "spoilt")
    names = ("shared", str(tmp_path / "fresh"), str(tmp_path / "spoilt"))
    assert layers_of(spec(layers=(1, 3), heads=names[1]), target) == (1, 3)
    others = {"path": "elsewhere", "fingerprint": "other weights"}
    LayerHeads.fresh(target.decoder, others, LAYERS).save(tmp_path / "others")
    with pytest.raises(UserError, match="trained for elsewhere, whose weights are not"):
        layers_of(spec(layers=None, heads=str(tmp_path / "others")), target)
    every = spec(layers=None, heads=[*names, "shared"])
    assert layers_of(every, target) == LAYERS and every.heads == names
    found = measure_match_rates(target, requests("llama"), every)
    shared, same, spoilt = (found.matches[:, index] for index in range(3))
    assert (shared == same).all() and (shared[:, [0, 2]] == spoilt[:, [0, 2]]).all()
    assert spoilt[:, 1].sum() < shared[:, 1].sum()


def test_positions_are_counted_in_groups_and_the_last_may_be_short() -> None:
    values = np.array([[1, 1, 0, 1, 1], [0, 0, 0, 0, 1]])
    assert grouped(values, 2, 4).tolist() == [[2, 1, 1, 0], [0, 0, 1, 0]]
    found = MatchRates(
        ("shared",), (4,), (1,), 2, values[:, None, None, None], np.ones((2, 5), int)
    )
    assert [row.position for row in found.rows()] == ["1-2", "3-4", "5-6", "7-8", "9-10", TOTAL]
    assert [row.matches for row in found.rows()] == [1, 1, 0, 1, 2, 5]


@pytest.mark.parametrize(("tokens", "drawn"), [((30, 30, 5), [1, 3]), ((5, 5, 5), [1])])
def test_positions_of_few_tokens_are_not_drawn(
    tokens: tuple[int, ...], drawn: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first one there is always something."""
    figure = Figure()
    monkeypatch.setattr(match_rates, "paper_figure", lambda *_: nullcontext(figure))
    counts = np.array([tokens])
    found = MatchRates(("shared",), (4,), (1,), 2, counts[:, None, None, None] // 2, counts)
    match_rates.draw_match_rates(found, tmp_path / "rates.png", "")
    assert list(figure.axes[1].lines[0].get_xdata()) == drawn


def test_the_figure_has_a_line_for_each_k_and_the_positions_of_the_middle_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = Figure()
    monkeypatch.setattr(match_rates, "paper_figure", lambda *_: nullcontext(figure))
    chance = np.random.default_rng(3)
    counts = chance.integers(50, 100, (20, 2))
    matches = chance.integers(10, counts[:, None, None, None], (20, 1, 2, 3, 2))
    found = MatchRates(("shared",), (1, 2), (1, 3, 5), 4, matches, counts)
    match_rates.draw_match_rates(found, tmp_path / "rates.png", "")
    totals, (left, right) = found.totals(), figure.axes
    ends = [
        (total["low"], total["high"]) for k in (1, 3, 5) for total in totals if total["top_k"] == k
    ]
    drawn = [tuple(segment[:, 1]) for bars in left.collections for segment in bars.get_segments()]
    assert drawn == [pytest.approx(both) for both in ends]
    middle = matches[:, 0, :, 1].sum(0) / counts.sum(0)
    assert [line.get_ydata().tolist() for line in right.lines[:2]] == [
        pytest.approx(rates) for rates in middle.tolist()
    ]
    assert right.lines[0].get_xdata().tolist() == [1, 5]


def native(path: Path, dtype: torch.dtype = torch.float32) -> NativeModel:
    return NativeModel(HuggingFaceModel(Checkpoint(str(path)), torch.device("cpu"), dtype))


@pytest.fixture
def command(command: Command) -> Command:
    """Runs scripts/match_rates.py in an empty folder; returns its exit code and everything it
    printed.
    """
    return partial(command, scripts.match_rates, config="match_rates")


def plain_words(checkpoints: Path, data: Path) -> list[str]:
    model = f"model.path={checkpoints / 'llama'}"
    return [
        "name=match",
        model,
        "dataset=multi30k",
        f"dataset.path={data}",
        "decoding.max_new_tokens=6",
    ]


def test_the_script_leaves_a_table_a_figure_and_its_settings(
    command: Command, checkpoints: Path, data: Path
) -> None:
    line = [*plain_words(checkpoints, data), "layers=[1,2]", "top_k=[3,1]", "positions=4"]
    line.append("decoding.stop=zzz")
    code, printed = command(*line)
    assert code == 0, printed
    folder = Path("outputs/match")
    assert sorted(file.name for file in folder.iterdir()) == [
        "match_rates.csv",
        "match_rates.png",
        "metrics.json",
    ]
    with (folder / "match_rates.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0]) == ["layer", "top_k", "heads", "position", "matches", "count", "rate"]
    assert [row["position"] for row in rows[:3]] == ["1-4", "5-8", "all"] and len(rows) == 2 * 2 * 3
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["texts"] == 6 and metrics["tokens"] == int(rows[2]["count"])
    settings, target = metrics["settings"], native(checkpoints / "llama")
    assert (
        settings
        | {
            "model.weights": target.checkpoint.fingerprint,
            "layers": [1, 2],
            "top_k": [1, 3],
            "heads": ["shared"],
            "positions": 4,
            "decoding.max_new_tokens": 6,
            "decoding.stop": ["zzz"],
            "runtime.dtype": "float32",
            "dataset.name": "multi30k",
            "dataset.path": str(data),
        }
        == settings
    )
    assert settings["data"] and settings["heads' files"]  # hashes
    # the last layer has it among three
    assert metrics["totals"][-1]["rate"] == float(rows[-1]["rate"]) == 1.0
    assert all(total["low"] <= total["rate"] <= total["high"] for total in metrics["totals"])
    assert "100.0 [100.0, 100.0]" in printed and "6 texts" in printed
    assert Image.open(folder / "match_rates.png").size == (1500, 720)
    before = (folder / "match_rates.csv").read_bytes()
    assert command(*line)[0] == 0 and (folder / "match_rates.csv").read_bytes() == before
    code, printed = command(*line, "positions=2")
    assert (
        code == 2
        and "match rates with positions=4, but this command has positions=2; choose" in printed
    )
    assert (folder / "match_rates.csv").read_bytes() == before


def test_texts_are_cut_and_ended_as_those_of_a_point(
    command: Command, checkpoints: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(target: NativeModel, asked: list[Request], *_: object) -> None:
        longest = max(len(request.source.prompt) for request in asked)
        assert {request.limits.stop.strings for request in asked} == {("w7",)}
        raise UserError(f"prompts of {longest} tokens")

    monkeypatch.setattr(match_rates, "measure_match_rates", measure)
    words = [*plain_words(checkpoints, data), "decoding.stop=w7", "layers=[1]", "top_k=[1]"]
    lengths = {}
    for limit in ("null", "2"):
        code, printed = command(*words, f"dataset.max_source_tokens={limit}")
        assert code == 2
        lengths[limit] = int(re.search(r"prompts of (\d+) tokens", printed)[1])
    assert lengths["2"] < lengths["null"]


@pytest.mark.slow
def test_articles_beyond_the_models_context_are_named(
    command: Command, checkpoints: Path, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(checkpoints / "llama", "short")
    config = json.loads(Path("short/config.json").read_text())
    Path("short/config.json").write_text(json.dumps({**config, "max_position_embeddings": 8}))
    assert (
        command(*plain_words(checkpoints, data), "model.path=short", "layers=[1]", "top_k=[1]")[0]
        == 0
    )
    assert "short was trained for texts of 8 tokens, and 6 of 6 here may be longer" in caplog.text


BAD_INPUT = {  # words of the command, and what the message names
    "layers=[1,3]": "got 3; the target has 2 layers",
    "layers=[]": "layers must list whole numbers",
    "layers=[0]": "each of layers",
    "top_k=[1,41]": "got 41; the target has 40 tokens",
    "top_k=3": "top_k",
    "heads=null": "heads must be shared",
    "heads=nowhere": "nowhere is no folder of per-layer heads",
    "heads=others": "the heads others: trained for elsewhere, whose weights are not",
    "heads=own layers=[2]": "own has heads for, [1], got [2]",
    "positions=0": "positions must be a whole number >= 1",
    "decoding.max_new_tokens=0": "decoding.max_new_tokens must be a whole number >= 1",
    "name=trained": "outputs/trained holds match rates with model.weights=None",
}


@pytest.mark.fast("layers=[1,3]", "top_k=[1,41]", "heads=nowhere")
@pytest.mark.parametrize("words", BAD_INPUT)
def test_bad_input_gives_one_line_and_leaves_nothing(
    words: str, command: Command, checkpoints: Path, data: Path
) -> None:
    target = native(checkpoints / "llama")
    for name, fingerprint in (("own", target.checkpoint.fingerprint), ("others", "other weights")):
        LayerHeads.fresh(
            target.decoder, {"path": "elsewhere", "fingerprint": fingerprint}, [1]
        ).save(name)
    held = Path("outputs/trained/metrics.json")
    held.parent.mkdir(parents=True)
    held.write_text('{"loss": 1}')
    code, printed = command(*plain_words(checkpoints, data), *words.split())
    assert code == 2 and BAD_INPUT[words] in printed, printed
    assert len(printed.strip().splitlines()) == 1
    assert {path: path.read_text() for path in Path("outputs").rglob("*.*")} == {
        held: '{"loss": 1}'
    }
