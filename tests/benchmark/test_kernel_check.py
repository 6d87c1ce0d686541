"""The checks of `make gpu` pass in Triton's interpreter, and find a planted fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, T5Config
from transformers import T5ForConditionalGeneration as T5

from tests.triton_interpreter import (
    interpreter,  # noqa: F401
    needs_triton,
)

pytestmark = [needs_triton, pytest.mark.slow, pytest.mark.usefixtures("interpreter")]
CPU = torch.device("cpu")
TINY: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            initializer_range=0.3,
        )
    ),
    "t5": lambda: T5(
        T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2)
    ),
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, as the interpreter is slow."""
    from bild_lab.benchmark import kernel_check

    monkeypatch.setattr(kernel_check, "ROW_COUNTS", (2, 9))
    monkeypatch.setattr(kernel_check, "PROMPT", 12)
    monkeypatch.setattr(kernel_check, "SOURCE", 9)
    monkeypatch.setattr(kernel_check, "CHAIN_STEPS", 4)
    tree_spec = replace(kernel_check.TREE, nodes=9, depth=3, width=2, children=2)
    monkeypatch.setattr(kernel_check, "TREE", tree_spec)


def findings(name: str, dtype: torch.dtype) -> list[Any]:
    from bild_lab.benchmark.kernel_check import KernelCheck

    return list(KernelCheck(TINY[name], CPU, dtype, 1.0).findings(times=False))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", TINY)
def test_all_is_right_in_the_interpreter(name: str) -> None:
    dtype = torch.float32 if name == "t5" else torch.float16
    wrong = [finding.text for finding in findings(name, dtype) if finding.right is False]
    assert wrong == []


@pytest.mark.usefixtures("small")
def test_rows_that_change_with_their_number_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from bild_lab.engine.models.native.gpu.plan import ForwardPlan

    launches = ForwardPlan.launches

    def disturbed(plan: ForwardPlan, shape: Any, *others: Any, **more: Any) -> list[Any]:
        logits = plan.scores_of(plan.heads.of(None)).logits
        extra = [lambda: logits.add_(1e-3)] if shape.rows > 8 else []
        return [*launches(plan, shape, *others, **more), *extra]

    monkeypatch.setattr(ForwardPlan, "launches", disturbed)
    wrong = [finding.text for finding in findings("llama", torch.float16) if finding.right is False]
    assert any("other bits with [9]" in text for text in wrong)


@pytest.mark.usefixtures("small")
def test_every_figure_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from bild_lab.benchmark import kernel_check

    monkeypatch.setattr(kernel_check, "TIMED_ROWS", (1, 2))
    monkeypatch.setattr(kernel_check, "TIMED_START", 20)
    monkeypatch.setattr(kernel_check, "REPLAYS", 1)

    def one_millisecond(
        work: Callable[[], Any], synchronize: Callable[[], None], runs: int
    ) -> float:
        work()
        return 0.001

    monkeypatch.setattr(kernel_check, "median_s", one_millisecond)
    check = kernel_check.KernelCheck(TINY["llama"], CPU, torch.float16, 1.0)
    texts = [finding.text for finding in check.times()]
    assert [text.split(":")[0] for text in texts[2:]] == [
        "ms a chain of 4",
        "ms a tree of 3 levels of 2",
        "ms a row that leaves early",
        "ms a forward by PyTorch, kernel by kernel",
    ]
    assert "1 rows 1.000, 2 rows 1.000; floor" in texts[0]
