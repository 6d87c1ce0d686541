"""The benchmark's methods do equal work, on shapes small enough for a test."""

from __future__ import annotations

import csv
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bild_lab.benchmark import bench
from bild_lab.benchmark.bench import SHAPES, Bench, Shape, bench_of, run, synthetic_bench
from bild_lab.benchmark.peer_methods import Peer
from bild_lab.engine.models.native import compiled, why_no_kernels
from bild_lab.engine.request import Limits, Request
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from bild_lab.lab.measure import machine
from scripts import bench as script
from tests.benchmark.test_llama_cpp import written

CPU = torch.device("cpu")
KERNELS = why_no_kernels(CPU, torch.float32) is None
QUANTIZED = {"kernels_int8": "int8", "kernels_int4": "int4"} if KERNELS else {}


def t5(dim: int, layers: int) -> dict[str, Any]:
    sizes = {
        "d_model": dim,
        "d_ff": dim,
        "num_layers": layers,
        "num_decoder_layers": layers,
        "num_heads": 2,
        "vocab_size": 1000,
    }
    return {**SHAPES["t5_small"].target, **sizes}


def llama(layers: int) -> dict[str, Any]:
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "vocab_size": 1000,
    }
    return {**SHAPES["llama_2"].target, **sizes}


SMALL = {
    "t5_large": Shape(t5(128, 2), 9, t5(64, 1)),
    "llama_2": Shape(llama(1), 9),
    "llama_12": Shape(llama(2), 9, llama(1)),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SHAPES", SMALL)
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    monkeypatch.setattr(machine, "BUFFER_BYTES", 2**20)


@pytest.fixture
def bench_named() -> Iterator[Callable[[str], Bench]]:
    """Makes the benchmark of a shape."""
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(synthetic_bench(name, CPU, torch.float32))


def test_every_method_of_a_shape_emits_the_same_tokens(
    bench_named: Callable[[str], Bench],
) -> None:
    benches = {name: bench_named(name) for name in SMALL}
    for each in benches.values():
        exact = each.methods.keys() - QUANTIZED
        texts = {name: each.methods[name].decode(each.requests[0], Trace()) for name in exact}
        assert len(set(map(tuple, texts.values()))) == 1, each.shape
        assert len(texts["native"]) == each.requests[0].limits.prompt_length + 9
    assert set(benches["t5_large"].methods) == {
        "hf_generate",
        "hf_assisted",
        "hf_assisted_workaround",
        "hf_loop",
        "native",
        "native_compiled",
        "native_speculative",
        *(["kernels", "kernels_speculative", *QUANTIZED] if KERNELS else []),
    }


def test_rows_tell_time_ratios_and_calls_of_every_method(
    bench_named: Callable[[str], Bench],
) -> None:
    t5_large = bench_named("t5_large")
    rows = {row["method"]: row for row in run(t5_large, 2, lambda: None)}
    assert rows.keys() == t5_large.methods.keys()
    assert (
        rows["hf_generate"]["ratio_to_generate"]
        == rows["hf_assisted_workaround"]["ratio_to_assisted"]
        == 1.0
    )
    assert (
        rows["native"]["tokens_per_target_call"]
        == 1
        < rows["native_speculative"]["tokens_per_target_call"]
    )
    for row in rows.values():
        assert 0 < row["ms_low"] <= row["ms_per_token"] <= row["ms_high"]
        assert row["precision"] == QUANTIZED.get(row["method"], "float32")
        assert row["same_tokens"] or row["method"] in QUANTIZED
        assert (row["agreement"], row["quality"]) == (float(row["same_tokens"]), None)
        assert (
            row["log_probability"] == rows["hf_generate"]["log_probability"]
            or not row["same_tokens"]
        )
        assert row["bandwidth_share"] > 0 if KERNELS else row["bandwidth_share"] is None


def test_texts_that_differ_from_those_of_generate_are_marked(
    bench_named: Callable[[str], Bench],
) -> None:
    llama_2 = bench_named("llama_2")

    class Wrong:
        def decode(self, request: Request, trace: Trace) -> list[int]:
            return [*request.source.prompt, *[7] * 9]

    methods = {"hf_generate": llama_2.methods["hf_generate"], "wrong": Wrong()}
    rows = run(replace(llama_2, methods=methods), 1, lambda: None)
    assert [row["same_tokens"] for row in rows] == [True, False]
    # which are of 9 tokens of little probability
    assert rows[0]["log_probability"] > rows[1]["log_probability"]


def test_quality_is_beside_speed(bench_named: Callable[[str], Bench]) -> None:
    llama_2 = bench_named("llama_2")
    (first,) = llama_2.requests
    with bench_of(
        "pair",
        (llama_2.native, llama_2.methods["hf_loop"].target),
        None,
        (first,),
        judge=len,
    ) as each:
        assert {row["quality"] for row in run(each, 1, lambda: None)} == {1}


def test_milliseconds_are_those_of_all_texts_together(
    bench_named: Callable[[str], Bench],
) -> None:
    llama_2 = bench_named("llama_2")

    class Slow:
        def prepare(self, request: Request) -> None:
            time.sleep(0.05)  # outside the clock

        def decode(self, request: Request, trace: Trace) -> list[int]:
            time.sleep(0.001 * request.limits.max_new_tokens)
            return [*request.source.prompt, *[7] * request.limits.max_new_tokens]

    (first,) = llama_2.requests
    second = replace(first, limits=Limits(first.limits.prompt_length, 3))
    two = replace(llama_2, methods={"hf_generate": Slow()}, requests=(first, second))
    (row,) = run(two, 1, lambda: None)
    assert 1.0 <= row["ms_per_token"] < 5.0


def test_a_method_decodes_each_text_once_before_the_timed_rounds_whose_median_and_range_are_told(
    bench_named: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    llama_2, calls = bench_named("llama_2"), []

    class Counted:
        def decode(self, request: Request, trace: Trace) -> list[int]:
            calls.append(request)
            return [*request.source.prompt, 7]

    monkeypatch.setattr(bench, "ms_per_token", lambda _: [1.0, 6.0, 2.0])
    monkeypatch.setattr(bench, "weights_read_ms", lambda *_: 0.5)
    (row,) = run(replace(llama_2, methods={"hf_generate": Counted()}), 3, lambda: None)
    assert len(calls) == 1 + 3
    assert (row["ms_low"], row["ms_per_token"], row["ms_high"]) == (1.0, 2.0, 6.0)
    assert row["bandwidth_share"] == 0.25


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    assert bench.ratio([2.0, 9.0, 4.0], [1.0, 1.0, 4.0]) == 2.0


def test_a_gpu_reads_weights_in_their_bytes_over_its_bytes_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "read_gb_per_s", lambda *_: 13.0)
    packed = SimpleNamespace(weight_bytes=26e9)
    there = SimpleNamespace(
        kernels=SimpleNamespace(packed=packed), native=SimpleNamespace(device=torch.device("cuda"))
    )
    assert bench.weights_read_ms(there, lambda: None) == 2000


@pytest.mark.usefixtures("fake_engines")
def test_other_engines_take_part_where_they_can_run_and_end_after_their_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with synthetic_bench("llama_12", CPU, torch.bfloat16, peers=True) as each:
        peers = {name: method for name, method in each.methods.items() if isinstance(method, Peer)}
        precisions = {name: each.precision(name) for name in peers}
        folder = Path(peers["openvino"]._target.checkpoint.path)
        assert (folder / "tokenizer.json").is_file() and folder.parent != Path()
        workers = [method._worker for method in peers.values()]
    bfloat16 = {"openvino": "bfloat16", "openvino_speculative": "bfloat16"}
    bits = {"ctranslate2_int8": "int8", "openvino_int8": "int8", "openvino_int4": "int4"}
    assert precisions == {"ctranslate2": "float32", **bfloat16, **bits}
    assert not any(worker.alive for worker in workers) and not folder.exists()

    class Refusing:
        def prepare(self, request: Request) -> None:
            raise UserError("no such layers")

        def close(self) -> None:
            pass

    models = each.native, each.methods["hf_loop"].target
    with bench_of("llama", models, None, each.requests, {"openvino": Refusing}) as other:
        assert (
            "openvino" not in other.methods
            and "openvino is left out: no such layers" in caplog.text
        )


class Metronome(Peer):
    """Takes 0.2 ms for a token of the prompt, and says that a new one takes 1 ms, from the eleventh
    on 2 ms.
    """

    precision, versions = "q4_k_m", {}

    def __init__(self) -> None:
        pass

    def prepare(self, request: Request) -> None:
        pass

    def decode(self, request: Request, trace: Trace) -> list[int]:
        time.sleep(0.0002 * len(request.source.prompt))
        count = request.limits.max_new_tokens
        self.times = [0.001 * place + 0.001 * max(0, place - 10) for place in range(count)]
        return [*request.source.prompt, *[7] * count]

    @property
    def emission_s(self) -> list[float]:
        return self.times


def test_long_texts_are_timed_by_the_length_of_the_prompt_and_the_position_of_a_token(
    bench_named: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "PROMPTS", (10, 100))
    monkeypatch.setattr(bench, "SPANS", ((0, 10), (20, 30)))
    each = bench_named("llama_2")
    rows = bench.long_texts(
        replace(each, methods={**each.methods, "peer": Metronome()}), 3, lambda: None
    )
    ours = "kernels" if KERNELS else "native"
    places = [("prompt", 0, 10), ("prompt", 0, 100), ("new token", 0, 10), ("new token", 20, 30)]
    for name in ("hf_generate", ours, "peer"):
        own = [row for row in rows if row["method"] == name]
        assert [(row["by"], row["from"], row["to"]) for row in own] == places
        assert all(row["ms"] > 0 for row in own)
    assert len(rows) == 12 and own[0]["precision"] == "q4_k_m"
    assert 2 <= own[0]["ms"] < 20 <= own[1]["ms"]
    assert [round(row["ms"], 6) for row in own[2:]] == [1.0, 2.0]


def test_tokens_are_timed_one_by_one_as_they_come(bench_named: Callable[[str], Bench]) -> None:
    each = bench_named("llama_2")
    for name in ("hf_generate", "native"):
        times = bench.emission_s(each.methods[name], each.requests[0], each.native)
        assert len(times) == 9 and all(0 < before < after for before, after in pairwise(times))


@pytest.mark.slow
@pytest.mark.usefixtures("fake_engines")
def test_the_command_times_long_texts_beside_a_peer_that_is_given(
    command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "PROMPTS", (10, 20))
    monkeypatch.setattr(bench, "SPANS", ((0, 4), (8, 12)))
    monkeypatch.setattr(bench, "HIGHEST_MADE_UP", 12)
    words = [
        "long",
        f"pair.target={written(tmp_path / 'tiny.gguf')}",
        "name=mine",
        "dataset.limit=1",
    ]
    code, printed = command(script, *words, "policy=llama_cpp", config=None)
    assert code == 0 and "q4_k_m" in printed
    with Path("outputs/mine/long.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert {row["method"] for row in rows} >= {"hf_generate", "llama_cpp"}
    assert json.loads(Path("outputs/mine/long.json").read_text())["rows"][0]["ms"] == float(
        rows[0]["ms"]
    )
    code, printed = command(script, *words, "policy=prompt_lookup", config=None)
    assert (
        code == 2
        and "the benchmark has our methods, got policy=prompt_lookup; give a peer's" in printed
    )


@pytest.mark.parametrize(
    ("words", "overrides", "gpu", "found"),
    [
        ([], [], False, [*(name for name, shape in SHAPES.items() if not shape.gpu), "toy"]),
        ([], [], True, ["llama_1b", "t5_3b"]),
        (["toy", "t5_small"], [], True, ["t5_small", "toy"]),
        ([], ["pair.target=x"], False, ["pair"]),
        (["t5_small"], ["pair.target=x"], False, None),
        (["t6"], [], False, None),
    ],
)
def test_shapes_are_those_that_are_named_or_the_devices(
    words: list[str],
    overrides: list[str],
    gpu: bool,
    found: list[str] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "SHAPES", SHAPES)
    if found is None:
        with pytest.raises(UserError):
            script.shapes_to_measure(words, overrides, gpu)
    else:
        assert script.shapes_to_measure(words, overrides, gpu) == found


@pytest.mark.parametrize(
    "word",
    [
        "runtime.weights=4",
        "runtime.batch=4",
        "decoding=sample",
        "+decoding.temperature=1",
        "measure.repeats=9",
        "pair.draft_weights=4",
    ],
)
def test_a_key_that_would_change_nothing_is_refused(word: str) -> None:
    script.require_taken(
        [
            "pair=toy",
            "experiment=quickstart",
            "runtime.dtype=float32",
            "dataset.limit=2",
            "policy.bits=8",
        ]
    )
    script.require_taken(["hydra.searchpath=[file:///own]", "++dataset.limit=3"])
    with pytest.raises(UserError, match=f"{re.escape(word)} would change nothing"):
        script.require_taken(["pair.target=x", word])


@pytest.mark.slow
@pytest.mark.usefixtures("fake_engines")
def test_the_command_times_the_targets_weights_in_a_file(
    command, data: Path, tmp_path: Path
) -> None:
    file = written(tmp_path / "tiny.gguf")
    words = [
        "name=mine",
        "pair.draft=null",
        "dataset.limit=2",
        "dataset=multi30k",
        f"dataset.path={data}",
    ]
    code, _ = command(
        script, f"pair.target={file}", file, *words, "decoding.max_new_tokens=4", config=None
    )
    rows = {
        row["method"]: row
        for row in json.loads(Path("outputs/mine/bench.json").read_text())["rows"]
    }
    assert (
        code == 0
        and rows["llama_cpp_q4_k_m"]["precision"] == rows["kernels_q4_k_m"]["precision"] == "q4_k_m"
    )
    assert all(row["quality"] is not None and row["log_probability"] < 0 for row in rows.values())
    code, printed = command(script, "toy", file, config=None)
    assert (
        code == 2
        and "tiny.gguf holds the weights of a pair's target; give its folder too" in printed
    )


@pytest.mark.slow
def test_the_command_times_a_pair_and_keeps_its_rows(
    command, checkpoints: Path, data: Path
) -> None:
    pair = [
        f"pair.target={checkpoints / 'llama'}",
        f"pair.draft={checkpoints / 'llama-draft'}",
        "name=mine",
    ]
    words = ["dataset=multi30k", f"dataset.path={data}", "decoding.max_new_tokens=4"]
    code, printed = command(script, *pair, *words, config=None)
    assert code == 0 and "the machine reads" in printed
    found = json.loads(Path("outputs/mine/bench.json").read_text())
    assert {row["shape"] for row in found["rows"]} == {"llama"} and found["environment"][
        "read_gb_per_s"
    ] > 0
    assert all(row["same_tokens"] for row in found["rows"] if row["method"] == "hf_loop")


def test_all_shapes_of_a_device_have_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SHAPES", SHAPES)
    usual = script.shapes_to_measure([], [], gpu=False)
    assert (
        script.shapes_to_measure(["all"], [], gpu=False)
        == usual
        == ["t5_small", "t5_large", "llama_2", "llama_12", "toy"]
    )
    assert script.shapes_to_measure(["all"], [], gpu=True) == ["llama_1b", "t5_3b"]
    assert script.shapes_to_measure(["all", "llama_1b"], [], gpu=False) == [
        *usual[:-1],
        "llama_1b",
        "toy",
    ]
