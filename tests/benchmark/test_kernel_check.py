"""The checks of `make gpu` pass in Triton's interpreter, and find a planted fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, T5Config
from transformers import T5ForConditionalGeneration as T5

from tests.triton_interpreter import (
    interpreter,  # noqa: F401
    needs_triton,
)

pytestmark = [needs_triton, pytest.mark.slow, pytest.mark.usefixtures("interpreter")]
CPU = torch.device("cpu")


def tiny_llama(width: int, inner: int, spread: float) -> PreTrainedModel:
    """spread: of the random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=2,
            num_attention_heads=2,
            initializer_range=spread,
        )
    )


TINY: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: tiny_llama(32, 48, 0.3),
    "llama in blocks": lambda: tiny_llama(64, 64, 0.2),
    "t5": lambda: T5(
        T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2)
    ),
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, as the interpreter is slow."""
    from bild_lab.benchmark import kernel_check, kernel_times

    monkeypatch.setattr(kernel_check, "ROW_COUNTS", (2, 9))
    monkeypatch.setattr(kernel_check, "PROMPT", 12)
    monkeypatch.setattr(kernel_check, "SOURCE", 9)
    monkeypatch.setattr(kernel_check, "LONG_TEXT", 20)
    monkeypatch.setattr(kernel_check, "REPEATS", 2)
    tree_spec = replace(kernel_check.TREE, nodes=9, depth=3, width=2, children=2)
    for module in (kernel_check, kernel_times):
        monkeypatch.setattr(module, "CHAIN_STEPS", 4)
        monkeypatch.setattr(module, "TREE", tree_spec)


def findings(name: str, dtype: torch.dtype, type: int = 0) -> list[Any]:
    from bild_lab.benchmark.kernel_check import KernelCheck

    return list(KernelCheck(TINY[name], CPU, dtype, type).findings())


@pytest.mark.usefixtures("small")
def test_all_is_right_with_weights_in_blocks() -> None:
    found = findings("llama in blocks", torch.float16, Type.Q4_0)
    assert [finding.text for finding in found if finding.right is False] == []


@torch.inference_mode()
def test_a_layer_of_several_types_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    from bild_lab.benchmark import kernel_check
    from bild_lab.engine.models.native.gpu.block_matrix import ProductWeights

    monkeypatch.setattr(kernel_check, "PROMPT", 5)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=1, initializer_range=0.1, **sizes)
    check = kernel_check.KernelCheck(
        lambda: LlamaForCausalLM(config), CPU, torch.float32, Type.Q4_K, mixed=True
    )
    parts = ProductWeights.parts(check.decoder.layers[0].qkv.matrix)
    assert [part.type for part in parts] == [Type.Q4_K, Type.Q6_K]
    assert check.numbers().right


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["llama", "t5"])
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
@pytest.mark.parametrize("kind", ["chains", "trees"])
@torch.inference_mode()
def test_texts_that_end_with_the_first_of_their_program_are_found(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bild_lab.benchmark.kernel_check import KernelCheck
    from bild_lab.engine.models.native.gpu.chains import ChainTables
    from bild_lab.engine.models.native.gpu.trees import TreeRules

    tables = {"chains": ChainTables, "trees": TreeRules}[kind]
    fill = tables.fill

    def one_runs(self: Any, specs: Any, running: torch.Tensor) -> None:
        fill(self, specs, running)
        running.fill_(1)

    check = KernelCheck(TINY["llama"], CPU, torch.float16)
    assert check.programs_side_by_side().right is True
    monkeypatch.setattr(tables, "fill", one_runs)
    finding = check.programs_side_by_side()
    assert finding.right is False
    assert finding.text.endswith(f"in one program: OTHER BITS of {kind}")


def test_kernels_that_give_other_results_once_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from bild_lab.benchmark import kernel_check

    results = [{"1 rows": torch.tensor([0.5, 1.5]), "a chain": [3, 5]} for _ in range(4)]
    passes = iter(results)
    monkeypatch.setattr(kernel_check, "REPEATS", len(results))
    check = kernel_check.KernelCheck.__new__(kernel_check.KernelCheck)
    check.long_session = lambda: SimpleNamespace(length=500)
    check._passes = lambda session, length: next(passes)
    assert check.repeats_are_equal().right is True
    results[2]["1 rows"] = torch.tensor([0.5, 1.5000001])
    passes = iter(results)
    finding = check.repeats_are_equal()
    assert finding.right is False
    assert finding.text.endswith("OTHER RESULTS of 1 rows")


def test_what_raises_an_error_is_wrong_and_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from bild_lab.benchmark.kernel_check import Finding, KernelCheck

    names = [
        name
        for name, check in vars(KernelCheck).items()
        if getattr(check, "__annotations__", {}).get("return") == "Finding" and name[0] != "_"
    ]
    for name in names:
        monkeypatch.setattr(KernelCheck, name, named(name, lambda check: Finding("", right=True)))
    monkeypatch.setattr(KernelCheck, "same_bits", named("same_bits", illegal_access))
    checked = list(KernelCheck.findings(KernelCheck.__new__(KernelCheck)))
    assert len(checked) == len(names)
    assert [finding.right for finding in checked].count(False) == 1
    text = next(finding.text for finding in checked if not finding.right)
    assert text.startswith("same bits raised an error")
    assert "illegal_access" in text and "RuntimeError: an illegal memory access" in text


def named(name: str, check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    check.__name__ = name
    return check


def illegal_access(check: Any) -> Any:
    raise RuntimeError("an illegal memory access")


@pytest.mark.usefixtures("small")
def test_every_figure_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from bild_lab.benchmark import kernel_check, kernel_times

    monkeypatch.setattr(kernel_times, "TIMED_ROWS", (1, 2))
    monkeypatch.setattr(kernel_times, "REPLAYS", 1)

    def one_millisecond(
        work: Callable[[], Any], synchronize: Callable[[], None], runs: int
    ) -> float:
        work()
        return 0.001

    monkeypatch.setattr(kernel_times, "median_s", one_millisecond)
    check = kernel_check.KernelCheck(TINY["llama"], CPU, torch.float16)
    texts = [finding.text for finding in kernel_times.KernelTimes(check, 1.0).findings()]
    assert [text.split(":")[0] for text in texts] == [
        "ms a forward",
        "of these on the GPU",
        "ms a chain of 4",
        "ms a tree of 3 levels of 2",
        "ms a row that leaves early",
        "ms a forward by PyTorch, kernel by kernel",
    ]
    for text in texts[:2]:
        assert "1 rows 1.000, 2 rows 1.000; floor" in text
