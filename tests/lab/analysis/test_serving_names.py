"""The figures of other tools, counted by hand for three rounds and one without a draft."""

from __future__ import annotations

from typing import Any

import pytest

from bild_lab.errors import UserError
from bild_lab.lab.analysis.statistics import ENGINES, figures, judged_by_position, require_engines
from tests.report.sample import sample_result

ROUNDS = [(3, 3), (3, 1), (2, 0), (0, 0)]  # drafted, accepted
# 4 accepted of 8 drafted tokens in 3 drafts and 4 calls; with the target's own 8 tokens, of which the limit cut one
COUNTS = {"accepted": 4, "drafted": 8, "target_calls": 4, "judged_by_position": judged_by_position(ROUNDS)}
EXPECTED: dict[str, dict[str, Any]] = {
    "vllm": {
        "Mean acceptance length": 1 + 4 / 3,
        "Avg Draft acceptance rate": 4 / 8,
        "Per-position acceptance rate": [2 / 3, 1 / 3, 1 / 3],
    },
    "sglang": {"spec_accept_length": 7 / 4, "spec_accept_rate": 4 / 8, "spec_verify_ct": 4},
    "tensorrt_llm": {"acceptance_length": 7 / 4, "acceptance_rate": 4 / 8},
    "spec_bench": {"Mean accepted tokens": 2.0},
}


@pytest.mark.parametrize("engine", ENGINES)
def test_figures_are_those_of_the_tool(engine: str) -> None:
    assert figures(sample_result("speculative", {}, 1.5, tokens=7, **COUNTS), engine) == EXPECTED[engine]


def test_a_tree_counts_by_its_nodes_and_for_tensorrt_by_its_longest_branch() -> None:
    result = sample_result("medusa", {}, 1.5, tokens=7, **{**COUNTS, "drafted": 20})
    assert figures(result, "vllm")["Avg Draft acceptance rate"] == 4 / 20
    assert figures(result, "tensorrt_llm")["acceptance_rate"] == 4 / 8


def test_results_that_drafted_nothing_have_none() -> None:
    result = sample_result("vanilla", {}, 1.0, **{**COUNTS, "judged_by_position": []})
    for engine in ENGINES:
        assert set(figures(result, engine).values()) == {None}


def test_an_unknown_tool_is_refused() -> None:
    require_engines(ENGINES)
    with pytest.raises(UserError, match="names must be of vllm, sglang, tensorrt_llm, spec_bench, got 'tgi'"):
        require_engines(["vllm", "tgi"])
