"""The benchmark's arms do equal work, on shapes small enough for a test."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bild_lab.engine.models.native import compiled, why_no_kernels
from bild_lab.engine.peers.methods import Peer
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from bild_lab.lab.measure.bench import arms, costs, shapes
from bild_lab.lab.measure.bench.arms import Bench, started, synthetic_benches
from bild_lab.lab.measure.bench.rounds import run

CPU = torch.device("cpu")


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch) -> dict[str, Bench]:
    small = {
        "t5_small": shapes.Shape(lambda: shapes.t5(64, 1, 2, 64), None, 9),
        "t5_large": shapes.Shape(lambda: shapes.t5(128, 2, 2, 128), "t5_small", 9),
        "llama_2": shapes.Shape(lambda: shapes.llama(1), None, 9),
        "llama_12": shapes.Shape(lambda: shapes.llama(2), "llama_2", 9),
    }
    monkeypatch.setattr(arms, "SHAPES", small)
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    return {each.shape: each for each in synthetic_benches(CPU, torch.float32, small)}


KERNELS = why_no_kernels(torch.device("cpu"), torch.float32) is None


@pytest.mark.slow
def test_every_arm_of_a_shape_emits_the_same_tokens(benches: dict[str, Bench]) -> None:
    for each in benches.values():
        texts = {arm: method.decode(each.requests[0], Trace()) for arm, method in each.methods.items()}
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
        *(["kernels", "kernels_speculative"] if KERNELS else []),
    }


def test_synthetic_drafts_are_all_accepted(benches: dict[str, Bench]) -> None:
    for shape in ("t5_large", "llama_12"):
        trace = Trace()
        benches[shape].methods["native_speculative"].decode(benches[shape].requests[0], trace)
        assert trace.rollbacks == 0
        assert trace.rounds[0].accepted == arms.WINDOW


def test_rows_tell_time_ratio_and_share_of_every_arm(benches: dict[str, Bench]) -> None:
    rows = run(benches["t5_large"], 2, lambda: None)
    assert {row["arm"] for row in rows} == set(benches["t5_large"].methods)
    assert next(row for row in rows if row["arm"] == "hf_generate")["ratio_to_generate"] == 1.0
    assert next(row for row in rows if row["arm"] == "hf_assisted_workaround")["ratio_to_assisted"] == 1.0
    for row in rows:
        assert 0 < row["ms_low"] <= row["ms_per_token"] <= row["ms_high"]
        assert row["linear_share"] > 0
        assert (row["same_tokens"], row["precision"]) == (True, "float32")
        assert row["bandwidth_share"] > 0 if KERNELS else row["bandwidth_share"] is None


def test_the_floor_multiplies_every_weight_that_a_token_needs_once(benches: dict[str, Bench]) -> None:
    native = benches["llama_12"].native
    counted = sum(weight.numel() for _, weight in costs.decoder_matrices(native))
    module = native.checkpoint.weights(torch.float32)
    expected = sum(weight.numel() for name, weight in module.named_parameters() if "norm" not in name)
    assert counted == expected  # the tied head is the embedding


def test_drafting_is_timed_eagerly_and_as_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "DRAFTERS", {"small": lambda: shapes.llama(1, 64, 64, 2, 1000)})
    rows = costs.drafter_rows("small", CPU, torch.float32, lambda: None)
    assert [row["arm"] for row in rows] == ["eager", *(["compiled"] if KERNELS else [])]
    assert all(0 < row["ms_low"] <= row["ms_per_token"] <= row["ms_high"] for row in rows)
    assert {row["per"] for row in rows} == {"drafted token"}


def test_no_matrix_of_a_shape_equals_another() -> None:
    """Engines that keep equal weights once would read less memory than a real model has."""
    module = shapes.SyntheticCheckpoint("t5", shape=shapes.t5(64, 3, 2, 64)).weights(torch.bfloat16)
    matrices = [weight.flatten()[:4096].tolist() for name, weight in module.named_parameters() if "norm" not in name]
    assert len(set(map(tuple, matrices))) == len(matrices) > 20


def test_the_drafters_have_the_sizes_of_trained_ones() -> None:
    """1.2 and 2.0 million weights, with the embedding (shared/models)."""
    counted = {}
    for name, config in shapes.DRAFTERS.items():
        module = shapes.SyntheticCheckpoint(name, shape=config()).weights(torch.float32)
        counted[name] = round(sum(weight.numel() for weight in module.parameters()) / 1e6, 1)
    assert counted == {"t5_tiny_drafter": 1.2, "llama_2_drafter": 2.0}


def test_texts_that_differ_from_those_of_generate_are_told(benches: dict[str, Bench]) -> None:
    class Wrong:
        def decode(self, request: Request, trace: Trace) -> list[int]:
            return [*request.source.prompt, *[7] * 9]

    bench = benches["llama_2"]
    methods = {"hf_generate": bench.methods["hf_generate"], "wrong": Wrong()}
    rows = run(replace(bench, methods=methods), 1, lambda: None)
    assert [row["same_tokens"] for row in rows] == [True, False]


def test_milliseconds_are_those_of_all_texts_together(benches: dict[str, Bench]) -> None:
    class Slow:
        def prepare(self, request: Request) -> None:
            time.sleep(0.05)  # outside the clock

        def decode(self, request: Request, trace: Trace) -> list[int]:
            time.sleep(0.001 * request.limits.max_new_tokens)
            return [*request.source.prompt, *[7] * request.limits.max_new_tokens]

    bench = benches["llama_2"]
    (first,) = bench.requests
    second = replace(first, limits=Limits(first.limits.prompt_length, 3))
    methods = {"hf_generate": Slow()}
    (row,) = run(replace(bench, methods=methods, requests=(first, second)), 1, lambda: None)
    assert 1.0 <= row["ms_per_token"] < 5.0


@pytest.mark.usefixtures("fake_engines")
def test_other_engines_are_arms_where_they_can_run_and_end_after_their_turn(
    benches: dict[str, Bench], caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for each in synthetic_benches(CPU, torch.bfloat16, ["llama_12"], peers=True):
        peers = {arm: method for arm, method in each.methods.items() if isinstance(method, Peer)}
        found = [(arm, each.precision(arm)) for arm in peers]
        folder = Path(peers["openvino"]._target.checkpoint.path)
        assert (folder / "tokenizer.json").is_file() and folder.parent != Path()
        workers = [method._worker for method in peers.values()]
    bfloat16 = [("openvino", "bfloat16"), ("openvino_speculative", "bfloat16")]
    assert found == [("ctranslate2", "float32"), *bfloat16]
    assert not any(worker.alive for worker in workers) and not folder.exists()
    broken = started({"openvino": Refusing()}, each.requests[0])
    assert broken == {} and "openvino is left out: no such layers" in caplog.text


class Refusing:
    def prepare(self, request: Request) -> None:
        raise UserError("no such layers")


def test_forwards_are_timed_by_query_and_context_length(
    benches: dict[str, Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "QUERY_LENGTHS", (1, 3))
    monkeypatch.setattr(costs, "CONTEXTS", (64, 300))
    rows = costs.forward_costs(benches["t5_small"], lambda: None)
    assert [(row["by"], row["length"]) for row in rows] == [
        ("query", 1),
        ("query", 3),
        ("context", 64),
        ("context", 300),
    ]


def test_a_request_of_the_benchmark_ends_at_its_length_only() -> None:
    checkpoint = shapes.SyntheticCheckpoint("t5", shape=shapes.t5(64, 1, 2, 64))
    request = Request(Source((0,), torch.tensor([[5]])), Limits(1, 4, checkpoint.end_tokens))
    assert not request.limits.reached([0, 1, 1])


@pytest.mark.slow
def test_a_shape_is_measured_alone_with_the_drafter_that_it_needs(benches: dict[str, Bench]) -> None:
    found = list(synthetic_benches(CPU, torch.float32, ["llama_12"]))
    assert [each.shape for each in found] == ["llama_12"]
    assert found[0].methods.keys() == benches["llama_12"].methods.keys()
