"""A sweep's points as one table, `sweep.csv`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from bild_lab.files import write_atomically

SETTING_COLUMNS = ("target", "draft", "dataset", "split", "n_examples", "dtype", "device")
PLAIN_COLUMNS = (
    "tokens",
    "tokens_per_s",
    "baseline_tokens_per_s",
    "tokens_per_s_ratio",
    "tokens_per_target_call",
    "acceptance_rate",
    "nothing_accepted",
    "drafted",
    "accepted",
    "draft_calls",
    "target_calls",
    "fallbacks",
    "rollbacks",
    "exit_layer_mean",
    "agreement_with_target",
    "peak_memory_mb",
)
COST_COLUMNS = (
    "flops_per_token",
    "bytes_per_token",
    "flops_per_byte",
    "flops_ratio",
    "bytes_ratio",
    "intensity_ratio",
)
PREDICTION_COLUMNS = ("cost_ratio", "window", "theorem", "rounds", "verify", "host", "prefill")
PIPELINE_COLUMNS = (
    "match_rate",
    "latency_units",
    "compute_units",
    "predicted_latency_units",
    "predicted_compute_units",
    "theorem",
    "exit",
    "concurrent",
    "host",
    "prefill",
)


def to_row(result: dict[str, Any]) -> dict[str, Any]:
    """One result, flat: identity, knobs under their own names, then what was measured."""
    quality, speedup = result["quality"], result["speedup"]
    return {
        "point": result["point"],
        "policy": result["policy"],
        **result["knobs"],
        **{key: result["setting"].get(key) for key in SETTING_COLUMNS},
        "engine": result.get("engine"),
        "shared_device": result["environment"].get("shared_device"),
        "quality_metric": quality["metric"],
        "quality": quality["value"],
        "quality_low": quality["low"],
        "quality_high": quality["high"],
        **{
            f"quality_{key}": quality.get(key)
            for key in ("baseline", "difference", "difference_low", "difference_high")
        },
        "latency_s_median": result["latency_s"]["median"],
        "latency_s_p95": result["latency_s"]["p95"],
        "latency_s_mean": result["latency_s"]["mean"],
        **{("speedup" if key == "value" else f"speedup_{key}"): value for key, value in speedup.items()},
        **{key: result.get(key) for key in PLAIN_COLUMNS},
        # BiTA's name of it
        "greedy_speedup": None if result["setting"]["decoding"]["temperature"] else result.get("tokens_per_s_ratio"),
        # the names of tokens per target call in Spec-Bench and in SPEED-Bench
        "mean_accepted_tokens": result["tokens_per_target_call"],
        "acceptance_length": result["tokens_per_target_call"],
        **{f"certificate_{key}": (result.get("certificate") or {}).get(key) for key in ("equal", "ties", "defects")},
        **{key: (result.get("cost") or {}).get(key) for key in COST_COLUMNS},
        **{f"predicted_{key}": (result.get("prediction") or {}).get(key) for key in PREDICTION_COLUMNS},
        **{f"pipeline_{key}": (result.get("pipeline") or {}).get(key) for key in PIPELINE_COLUMNS},
    }


def to_frame(results: list[dict[str, Any]]) -> pd.DataFrame:
    """One row per point; knobs that a policy does not have are empty."""
    knobs = list(dict.fromkeys(knob for result in results for knob in result["knobs"]))
    frame = pd.DataFrame([to_row(result) for result in results])
    fixed = [column for column in frame.columns if column not in knobs]
    return frame[[*fixed[:2], *knobs, *fixed[2:]]]


def write_table(results: list[dict[str, Any]], path: Path) -> None:
    """Write `sweep.csv`, whole or not at all."""
    write_atomically(path, to_frame(results).to_csv(index=False).encode())
