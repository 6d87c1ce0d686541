"""What a page keeps of a sweep over the batch: the curves, and what devices would do by their data sheets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig

from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.engine.models.device import DTYPES
from bild_lab.lab.analysis.cost import dimensions
from bild_lab.lab.results.batches import BatchCurve, device_speedup, roofline
from bild_lab.lab.schema.result import Result

# bytes and bfloat16 operations per second, of the manufacturer's data sheets (SXM modules, dense)
DEVICES = {"A100": (2.039e12, 312e12), "H100": (3.35e12, 989e12)}


def batch_table(curves: Sequence[BatchCurve]) -> list[dict[str, Any]]:
    """A row for every point of the curves, with the speedups that devices would have by their bandwidth and speed."""
    rows = []
    for curve in curves:
        alone = next((one.result for one in curve.points if one.batch == 1), None)
        for one in curve.points:
            result = one.result
            rows.append(
                {
                    "policy": curve.label,
                    "batch": one.batch,
                    "speedup": result.speedup.value,
                    "speedup_low": result.speedup.low,
                    "speedup_high": result.speedup.high,
                    "predicted": one.predicted,
                    "tokens_per_s": result.tokens_per_s,
                    "baseline_tokens_per_s": result.baseline_tokens_per_s,
                    "latency_s_median": result.latency_s.median,
                    "latency_s_p95": result.latency_s.p95,
                    "agreement_with_target": result.agreement_with_target,
                    "break_even": curve.break_even,
                    **{name: on_device(alone, one.batch, *speeds) for name, speeds in DEVICES.items()},
                }
            )
    return rows


def on_device(alone: Result | None, batch: int, bandwidth: float, flops: float) -> float | None:
    """The speedup at a batch that a device would have; None without rounds at batch 1."""
    if alone is None or not alone.counts.target_calls:
        return None
    width = DTYPES[alone.setting.dtype].itemsize
    seconds = [
        None if path is None else roofline(decoder_weights(Checkpoint(path).config), width, bandwidth, flops)
        for path in (alone.setting.target, alone.setting.draft if alone.counts.draft_calls else None)
    ]
    return device_speedup(alone, batch, *seconds)


def decoder_weights(config: PreTrainedConfig) -> int:
    """Numbers in the matrices that a forward of the decoder reads."""
    sizes = dimensions(config)
    return sizes.layers.values + sizes.head.values
