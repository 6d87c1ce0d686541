"""Sample results shaped like those of a real sweep, for the tests of the report."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, replace
from typing import Any

from bild_lab.lab.schema.examples import MeasuredExample, MeasuredRound
from bild_lab.lab.schema.numbers import LOG_PROBABILITY_NAME, Counts
from bild_lab.lab.schema.result import SCHEMA, Failure, FailureCause, Result

SETTING = {
    **{
        "target": "t5-large",
        "draft": "t5-tiny",
        "dataset": "multi30k",
        "split": "test",
        "n_examples": 100,
    },
    **{
        "metric": "bleu",
        "dtype": "bfloat16",
        "device": "cpu",
        "hardware": "AMD EPYC 7B13",
        "threads": 2,
        "engine": "hf",
    },
    "decoding": {"max_new_tokens": 128, "temperature": 0.0, "top_k": None, "top_p": None},
    **{"seed": 0, "repeats": 3, "warmup": 3, "baseline": "vanilla"},
}
ENVIRONMENT = {
    **{"bild_lab": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0", "python": "3.11.7"},
    **{"cpu": "AMD EPYC 7B13", "cores": 2, "gpu": None, "os": "Linux 6.1", "git": "abc1234"},
    **{"load_average": 0.4, "started": "2026-11-21T06:00:00Z"},
}
BASELINE_MEAN_S = 0.110
BASELINE_QUALITY = 41.0
# fallback, rollback, speedup, difference in BLEU, acceptance rate, agreement
BILD = [
    (0.3, 0.69, 1.46, 0.0, 0.71, 1.00),
    (0.3, 1.0, 1.55, 0.05, 0.75, 0.93),
    (0.3, 2.0, 1.68, -0.42, 0.82, 0.74),
    (0.3, 5.0, 1.83, -1.31, 0.91, 0.49),
    (0.5, 0.69, 1.43, 0.0, 0.78, 1.00),
    (0.5, 1.0, 1.53, 0.21, 0.81, 0.95),
    (0.5, 2.0, 1.61, -0.12, 0.87, 0.83),
    (0.5, 5.0, 1.70, -0.74, 0.94, 0.66),
    (0.9, 0.69, 0.97, 0.0, 0.94, 1.00),
    (0.9, 1.0, 0.99, 0.02, 0.95, 0.99),
    (0.9, 2.0, 1.01, 0.10, 0.97, 0.97),
    (0.9, 5.0, 1.02, -0.03, 0.99, 0.95),
]
SPECULATIVE = [(2, 1.21, 0.83), (4, 1.38, 0.74), (6, 1.34, 0.66), (10, 1.12, 0.52)]


def sample_result(
    policy: str, knobs: dict, speedup: float | None, difference: float = 0.0, **changes: Any
) -> Result:
    """Make one result.

    `changes` replaces whole entries, as `result.json` has them, or single counts; `setting` only
    the given keys of the setting.
    """
    setting = {**SETTING, **changes.pop("setting", {})}
    mean = BASELINE_MEAN_S if speedup is None else BASELINE_MEAN_S / speedup
    point = hashlib.sha256(
        json.dumps([policy, knobs, setting], sort_keys=True).encode()
    ).hexdigest()[:12]
    counts = {"tokens_per_target_call": 1.0, "target_calls": 1650}
    counts |= {each.name: changes.pop(each.name) for each in fields(Counts) if each.name in changes}
    content = {
        "schema": SCHEMA,
        "point": point,
        "name": "first",
        "policy": policy,
        "knobs": knobs,
        "composition": f"{policy}({', '.join(f'{key}={value}' for key, value in knobs.items())})",
        "setting": setting,
        "same_as_baseline": policy == setting["baseline"],
        "facts": {"pair": "first", "aligned": False, "acceptance": None, "trained": {}},
        "quality": _quality(BASELINE_QUALITY + difference, BASELINE_QUALITY),
        "latency_s": _latency(mean),
        "baseline_latency_s": _latency(BASELINE_MEAN_S),
        "speedup": _speedup(speedup),
        "tokens_per_s": 16.5 / mean,
        "tokens": 1650,
        "counts": counts,
        "agreement_with_target": 1.0,
        "stages_s": {"prefill": 0.9, "draft": 0.0, "verify": mean * 100 - 1.2, "host": 0.3},
        "cost": _cost(1.0, 1.0),
        "seconds": _seconds(mean),
        "peak_memory_mb": 512.0,
        "environment": ENVIRONMENT,
    }
    return Result.from_json({**content, **changes})


def with_quality(result: Result, **changes: Any) -> Result:
    """The result with other fields of its quality."""
    return replace(result, quality=replace(result.quality, **changes))


def sample_log_probability(speedup: float, difference: float) -> Result:
    """Make a result whose metric is the log-probability, in nats a token."""
    return with_quality(
        sample_result("bild", {"rollback": speedup}, speedup, agreement_with_target=0.3),
        metric=LOG_PROBABILITY_NAME,
        value=-0.2315 + difference,
        baseline=-0.2315,
        difference=difference,
        difference_low=difference - 0.002,
        difference_high=difference + 0.001,
    )


def with_speedup(result: Result, **changes: Any) -> Result:
    """The result with other fields of its speedup."""
    return replace(result, speedup=replace(result.speedup, **changes))


def sample_example(example: str = "one", **changes: Any) -> MeasuredExample:
    """Make one example; `changes` replaces whole fields, the rounds as `examples.jsonl` has
    them.
    """
    rounds = [
        MeasuredRound.from_json({"next_token": 0, **one}) for one in changes.pop("rounds", ())
    ]
    own = {
        "id": example,
        "prediction": "the same words",
        "token_ids": [1],
        "latency_s": [1.0],
        "rounds": rounds,
    }
    return MeasuredExample(**{**own, **changes})


def sample_baseline(**changes: Any) -> Result:
    """Make the result of the baseline itself."""
    return sample_result("vanilla", {}, 1.0, quality=_quality(BASELINE_QUALITY, None), **changes)


def sample_replayed(difference: float = -0.2, file: str = "theirs.jsonl", **changes: Any) -> Result:
    """Make the result of texts that were replayed from a file, without a clock."""
    untimed = (
        "latency_s",
        "baseline_latency_s",
        "tokens_per_s",
        "stages_s",
        "cost",
        "peak_memory_mb",
    )
    untimed += ("engine", "precision", "tokens_per_target_call", "target_calls")
    verdicts = {"equal": 97, "ties": 2, "defects": 1}
    known = {**dict.fromkeys(untimed), "agreement_with_target": 0.97, "certificate": verdicts}
    return sample_result("answers", {"file": file}, None, difference, **{**known, **changes})


def sample_drafted(
    policy: str, knobs: dict, speedup: float, difference: float, rates: tuple, **changes: Any
) -> Result:
    """Make a result of a policy that drafts, from its acceptance rate and its agreement."""
    acceptance, agreement = rates
    drafted = 1500
    calls = int(1650 / (1 + 3.2 * acceptance))
    total = 100 * BASELINE_MEAN_S / speedup
    drafting = 0.38 * total
    own = {
        "acceptance_rate": acceptance,
        "nothing_accepted": 0.25 * (1 - acceptance),
        "drafted": drafted,
        "accepted": round(drafted * acceptance),
        "target_calls": calls,
        "draft_calls": drafted + 90,
        "tokens_per_target_call": 1650 / calls,
        "agreement_with_target": agreement,
        "acceptance_by_position": [
            round(acceptance + 0.06 - 0.03 * i, 3) for i in range(int(knobs.get("window", 6)))
        ],
        "stages_s": {
            "prefill": 0.9,
            "draft": drafting,
            "verify": total - drafting - 1.2,
            "host": 0.3,
        },
        "prediction": sample_prediction(policy, knobs, speedup),
        "cost": _cost(1.4, 0.6),
    }
    return sample_result(policy, knobs, speedup, difference, **{**own, **changes})


def sample_sweep(**changes: Any) -> list[Result]:
    """Make a sweep over several policies in one setting: 20 points with their baseline."""
    peer = {"stages_s": None, "target_calls": None, "tokens_per_target_call": None}
    results = [
        sample_baseline(**changes),
        sample_result("hf_generate", {}, 0.96, **peer, **changes),
        sample_result("hf_assisted", {"window": 5}, 1.17, **peer, **changes),
        sample_result("hf_prompt_lookup", {"window": 10}, 0.91, **peer, **changes),
    ]
    for window, speedup, acceptance in SPECULATIVE:
        knobs = {"window": window, "lenience": 1.0}
        results.append(
            sample_drafted("speculative", knobs, speedup, 0.0, (acceptance, 1.0), **changes)
        )
    for fallback, rollback, speedup, difference, acceptance, agreement in BILD:
        knobs = {"fallback": fallback, "rollback": rollback, "window": 10, "verify_tail": True}
        own = {"fallbacks": round(300 * fallback), "rollbacks": round(200 / rollback), **changes}
        results.append(
            sample_drafted("bild", knobs, speedup, difference, (acceptance, agreement), **own)
        )
    return results


def sample_failure(
    message: str = "rollback threshold must be > 0 nats, got -1; use .inf to switch it off",
) -> Failure:
    """Make the record of a failed point."""
    return Failure(
        "f00df00df00d",
        "bild",
        {"fallback": 0.5, "rollback": -1.0},
        FailureCause("UserError", message),
    )


def _quality(value: float, baseline: float | None) -> dict:
    difference = None if baseline is None else round(value - baseline, 6)
    same = difference == 0
    p_value = None if baseline is None else 1.0 if same else 0.3
    if baseline is not None and not -0.5 <= difference <= 0.45:  # the interval leaves out 0
        p_value = 0.004
    return {
        "metric": "BLEU",
        "value": value,
        "low": value - 2.3,
        "high": value + 2.5,
        "signature": "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.5.1",
        "baseline": baseline,
        "difference": difference,
        "difference_low": None if difference is None else difference - (0.0 if same else 0.45),
        "difference_high": None if difference is None else difference + (0.0 if same else 0.5),
        "p_value": p_value,
    }


def sample_tested_quality(difference: float, p_value: float, margin: float = 5.0) -> dict:
    """Make a quality that was tested for being no worse than the baseline's by a margin."""
    tested = {"margin": margin, "lower_bound": -4.2, "p_value": p_value, "test": "bootstrap"}
    return {**_quality(BASELINE_QUALITY + difference, BASELINE_QUALITY), "non_inferiority": tested}


def _latency(mean: float) -> dict:
    return {
        "median": mean * 0.93,
        "p50": mean * 0.93,
        "p95": mean * 1.7,
        "mean": mean,
        "total": mean * 100,
    }


def _speedup(value: float | None) -> dict:
    if value is None:
        return {"value": None, "low": None, "high": None, "median": None}
    return {"value": value, "low": value - 0.05, "high": value + 0.05, "median": value + 0.02}


def _seconds(mean: float) -> dict:
    parts = {
        "load": 0.4,
        "warmup": 0.6,
        "decode": 300 * (mean + BASELINE_MEAN_S),
        "trace": 100 * mean,
    }
    parts = {**parts, "metrics": 0.9, "write": 0.01}
    return {**parts, "total": sum(parts.values())}


def _cost(flops_ratio: float, bytes_ratio: float) -> dict:
    ratios = {
        "flops_ratio": flops_ratio,
        "bytes_ratio": bytes_ratio,
        "intensity_ratio": flops_ratio / bytes_ratio,
    }
    per_token = {"flops_per_token": 5.4e7 * flops_ratio, "bytes_per_token": 5.6e7 * bytes_ratio}
    return {**per_token, "flops_per_byte": 0.96 * flops_ratio / bytes_ratio, **ratios}


def sample_prediction(policy: str, knobs: dict, speedup: float) -> dict:
    """Make what theory predicts, as `result.json` has it."""
    fixed = policy == "speculative"
    names = ("rounds", "host", "prefill")
    return {
        "window": int(knobs["window"]) if fixed else None,
        "cost_ratio": 0.17,
        "theorem": 1.31 * speedup if fixed else None,
        **{name: factor * speedup for name, factor in zip(names, (1.24, 1.06, 1.0), strict=True)},
    }
