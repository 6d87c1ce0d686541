"""How a point's drafts were accepted, in a form that other tools read, and the draft length that
this promises most for.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate, chain, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.methods.speculative.draft_model import ModelDrafter
from bild_lab.engine.protocols import Method
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import LoadedModel
from bild_lab.errors import UserError
from bild_lab.lab.point.decoder import Decoder
from bild_lab.lab.schema.examples import MeasuredExample
from bild_lab.lab.schema.result import Result

PROFILE, PROFILE_SCHEMA = "speculation_profile.json", "1.0"
# whether shorter drafts are the beginnings of longer ones
EXTRAPOLATES, MEASURED = "chain_analytic", "measured_per_k"
LONGEST_PREFIX = "longest_prefix"


def speculation_profile(
    result: Result, examples: Sequence[MeasuredExample], decoder: Decoder
) -> dict[str, Any]:
    """How a point's drafts were accepted: the content of `speculation_profile.json`.

    The fields and their meaning are those of schema 1.0 of NVIDIA Model-Optimizer's pull request
    2247, as it stood open in September 2026
    (examples/specdec_bench/specdec_bench/speculation_profile.py): an acceptance length counts the
    tokens that a verification emitted, the target's own among them, marginal rate i is the share of
    verifications that accepted the first i + 1 tokens of their draft, conditional rate i the same
    among those that accepted the first i. All verifications count, also of shorter drafts and of
    none: where a draft ended counts as a rejection. After an accepted
    token that ends the text the target's own is not emitted, so the mean length may be less than 1
    plus all marginal rates. Not known from there, and so ours: what a checkpoint's dictionary holds,
    the names of methods, the verification "tree", and all of `measurement_conditions`.
    """
    lengths = [acceptance_lengths(example) for example in examples]
    histogram = Counter(chain.from_iterable(lengths))
    if not histogram or not result.counts.drafted:
        note = f"policy {result.policy} recorded no verified drafts"
        return {"schema_version": PROFILE_SCHEMA, "measured": False, "note": note}
    longest = len(result.counts.judged_by_position)
    marginal = _marginal_rates(examples, longest)
    mean = sum(length * count for length, count in histogram.items()) / histogram.total()
    method, rule = decoder.method, result.facts.get("acceptance")
    lossless = method.lossless(Sampling(result.setting.temperature))
    verification = _verification(method, rule)
    is_model_drafter = isinstance(getattr(method, "drafter", None), ModelDrafter)
    extrapolates = is_model_drafter and lossless and verification == LONGEST_PREFIX
    target, *drafts = map(_checkpoint_id, decoder.models)
    return {
        "schema_version": PROFILE_SCHEMA,
        "measured": True,
        "method": result.policy,
        "draft_checkpoint": drafts[0] if drafts else None,
        "target_model": target,
        "num_speculative_tokens": longest,
        "block_size": None,
        "max_supported_k": longest,
        "verification_method": verification,
        "conditional_accept_rates": [
            rate / previous_rate if previous_rate else 0.0
            for previous_rate, rate in pairwise([1.0, *marginal])
        ],
        "marginal_accept_rates": marginal,
        "mean_accept_length": mean,
        "mean_accept_length_per_request": fmean(
            fmean(accept_lengths) for accept_lengths in lengths if accept_lengths
        ),
        "accept_length_model": EXTRAPOLATES if extrapolates else MEASURED,
        "accept_length_by_k": {str(longest): mean},
        "acceptance_length_histogram": {
            str(length): histogram[length] for length in sorted(histogram)
        },
        "per_category": _lengths_by_category(examples, lengths) or None,
        "measurement_conditions": _conditions(result, len(examples), rule, lossless),
        "validation": None,
    }


def _checkpoint_id(model: LoadedModel) -> dict[str, str]:
    """What the profile says of a checkpoint: the last two folders of its path, as ids of the hub."""
    return {"id": "/".join(model.checkpoint.path.strip("/").split("/")[-2:])}


def _marginal_rates(examples: Sequence[MeasuredExample], longest: int) -> list[float]:
    """The share of all verifications that accepted each position of a draft."""
    accepted = Counter(
        example_round.accepted
        for example in examples
        for example_round in example.rounds
        if example_round.next_token is not None
    )
    return [
        sum(count for tokens, count in accepted.items() if tokens > position) / accepted.total()
        for position in range(longest)
    ]


def _verification(method: Method, rule: str | None) -> str:
    """Which drafts the method verifies, and how. rule: the name of its acceptance rule."""
    if isinstance(method, DraftThenVerify) and method.drafter.drafts_trees:
        return "tree"
    return "block" if rule == "BlockVerification" else LONGEST_PREFIX


def _lengths_by_category(
    examples: Sequence[MeasuredExample], lengths: Sequence[Sequence[int]]
) -> dict[str, dict[str, float]]:
    """The mean acceptance length of each category, and over how many verifications. lengths: of
    each example.
    """
    by_category: dict[str, list[int]] = defaultdict(list)
    for example, accept_lengths in zip(examples, lengths, strict=True):
        by_category[example.category or ""] += accept_lengths
    return {
        name: {"mean_accept_length": fmean(accept_lengths), "num_steps": len(accept_lengths)}
        for name, accept_lengths in by_category.items()
        if name and accept_lengths
    }


def _conditions(
    result: Result, n_examples: int, rule: str | None, lossless: bool
) -> dict[str, Any]:
    """What the point was measured on and with. rule: the name of its acceptance rule."""
    setting, decoding = result.setting, result.setting["decoding"]
    return {
        **{key: setting.get(key) for key in ("dataset", "split", "dtype", "hardware")},
        "num_samples": n_examples,
        "concurrency": setting.batch,
        "osl": decoding["max_new_tokens"],
        **{key: decoding[key] for key in ("temperature", "top_k", "top_p")},
        "engine": result.engine,
        "knobs": dict(result.knobs),
        "acceptance_rule": rule,
        "lossless": lossless,
        "certificate": None if result.certificate is None else asdict(result.certificate),
    }


def acceptance_lengths(example: MeasuredExample) -> list[int]:
    """How many tokens each verification of a text emitted."""
    lengths = [
        example_round.accepted + 1
        for example_round in example.rounds
        if example_round.next_token is not None
    ]
    unverified = sum(
        example_round.accepted
        for example_round in example.rounds
        if example_round.next_token is None
    )
    # more than the text has where an accepted token ended it
    if lengths and sum(lengths) + unverified > len(example.token_ids):
        lengths[-1] -= 1
    return lengths


def read_profile(folder: Path) -> Mapping[str, Any] | None:
    """The profile in a point's folder; None without a measured one.

    Raises UserError if it cannot be read.
    """
    file = folder / PROFILE
    if not file.is_file():
        return None
    try:
        profile = json.loads(file.read_bytes())
        return profile if profile["measured"] and profile["marginal_accept_rates"] else None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} cannot be read: {error!r}; remove it, or measure with resume=false"
        ) from error


def best_window(profile: Mapping[str, Any], cost_ratio: float) -> tuple[int, float] | None:
    """The draft length that promises most, up to the measured one, and how many times as fast it is
    as that.

    Theorem 3.8's time of a round, with the measured marginal rates in place of powers of α. None
    where shorter drafts are not the beginnings of longer ones.
    """
    if profile["accept_length_model"] != EXTRAPOLATES:
        return None
    tokens = accumulate(profile["marginal_accept_rates"], initial=1.0)
    speeds = [
        expected_tokens / (length * cost_ratio + 1) for length, expected_tokens in enumerate(tokens)
    ]
    best = max(range(len(speeds)), key=speeds.__getitem__)
    return best, speeds[best] / speeds[-1]
