"""The benchmark's arms do equal work, on shapes small enough for a test."""

from __future__ import annotations

import pytest
import torch

from bild_lab.engine.models.native import compiled, why_no_kernels
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.trace import Trace
from bild_lab.lab.measure import bench


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch) -> dict[str, bench.Bench]:
    small = {
        "t5_small": bench.Shape(lambda: bench.t5(64, 1, 2, 64), None, 9),
        "t5_large": bench.Shape(lambda: bench.t5(128, 2, 2, 128), "t5_small", 9),
        "llama_2": bench.Shape(lambda: bench.llama(1), None, 9),
        "llama_12": bench.Shape(lambda: bench.llama(2), "llama_2", 9),
    }
    monkeypatch.setattr(bench, "SHAPES", small)
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    return {each.shape: each for each in bench.synthetic_benches(torch.device("cpu"), torch.float32)}


KERNELS = why_no_kernels(torch.device("cpu"), torch.float32) is None


def test_every_arm_of_a_shape_emits_the_same_tokens(benches: dict[str, bench.Bench]) -> None:
    for each in benches.values():
        texts = {arm: method.decode(each.request, Trace()) for arm, method in each.methods.items()}
        assert len(set(map(tuple, texts.values()))) == 1, each.shape
        assert len(texts["native"]) == each.request.limits.prompt_length + 9
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


def test_synthetic_drafts_are_all_accepted(benches: dict[str, bench.Bench]) -> None:
    for shape in ("t5_large", "llama_12"):
        trace = Trace()
        benches[shape].methods["native_speculative"].decode(benches[shape].request, trace)
        assert trace.rollbacks == 0
        assert trace.rounds[0].accepted == bench.WINDOW


def test_rows_tell_time_ratio_and_share_of_every_arm(benches: dict[str, bench.Bench]) -> None:
    rows = bench.run(benches["t5_large"], 2, lambda: None)
    assert {row["arm"] for row in rows} == set(benches["t5_large"].methods)
    assert next(row for row in rows if row["arm"] == "hf_generate")["ratio_to_generate"] == 1.0
    assert next(row for row in rows if row["arm"] == "hf_assisted_workaround")["ratio_to_assisted"] == 1.0
    for row in rows:
        assert 0 < row["ms_low"] <= row["ms_per_token"] <= row["ms_high"]
        assert row["linear_share"] > 0
        assert row["bandwidth_share"] > 0 if KERNELS else row["bandwidth_share"] is None


def test_the_floor_multiplies_every_weight_that_a_token_needs_once(benches: dict[str, bench.Bench]) -> None:
    native = benches["llama_12"].native
    counted = sum(weight.numel() for _, weight in bench.decoder_matrices(native))
    module = native.checkpoint.weights(torch.float32)
    expected = sum(weight.numel() for name, weight in module.named_parameters() if "norm" not in name)
    assert counted == expected  # the tied head is the embedding


def test_drafting_is_timed_eagerly_and_as_one_program(benches: dict[str, bench.Bench]) -> None:
    rows = bench.drafting_costs(benches["llama_2"], lambda: None)
    assert [row["arm"] for row in rows] == ["eager", *(["compiled"] if KERNELS else [])]
    assert all(row["ms_per_drafted_token"] > 0 for row in rows)


def test_forwards_are_timed_by_query_and_context_length(
    benches: dict[str, bench.Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "QUERY_LENGTHS", (1, 3))
    monkeypatch.setattr(bench, "CONTEXTS", (64, 300))
    rows = bench.forward_costs(benches["t5_small"], lambda: None)
    assert [(row["by"], row["length"]) for row in rows] == [
        ("query", 1),
        ("query", 3),
        ("context", 64),
        ("context", 300),
    ]


def test_a_request_of_the_benchmark_ends_at_its_length_only() -> None:
    checkpoint = bench.SyntheticCheckpoint("t5", shape=bench.t5(64, 1, 2, 64))
    request = Request(Source((0,), torch.tensor([[5]])), Limits(1, 4, checkpoint.end_tokens))
    assert not request.limits.reached([0, 1, 1])


def test_a_shape_is_measured_alone_with_the_drafter_that_it_needs(benches: dict[str, bench.Bench]) -> None:
    found = list(bench.synthetic_benches(torch.device("cpu"), torch.float32, ["llama_12"]))
    assert [each.shape for each in found] == ["llama_12"]
    assert found[0].methods.keys() == benches["llama_12"].methods.keys()
