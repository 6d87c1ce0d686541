"""What a text costs, fitted to timed texts.

Seconds are those of a text's start, of its source tokens, of the target's forwards, their rows and
their rows times context, of the drafter's forwards, and of the policy's rounds. Forwards of one row
have a price of their own, as their kernels read weights and do little else. No price is negative.
Forwards through some layers count as the share of the layers that ran, those of a drafter with a
draft vocabulary as the share of its weights. A round's price holds host, acceptance rule and the
drafter's start, so each policy has its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.optimize import nnls

from bild_lab.engine.trace import Trace
from bild_lab.lab.measure.cost import dimensions

Features = Mapping[str, float]
OUTLIER = 4  # times the median deviation


@dataclass(frozen=True)
class TimedText:
    """A text that was decoded live. system: which point decoded it, the same for all of its
    texts.
    """

    system: str
    features: Features
    seconds: float


@dataclass(frozen=True)
class CostModel:
    """Seconds of each thing that a text has.

    error, worst: of speedups that the model predicts for points it was not fitted to, relative;
    None if it was fitted to fewer than three.
    """

    prices_s: Mapping[str, float]
    error: float | None = None
    worst: float | None = None

    def seconds(self, features: Features) -> float:
        """The seconds of one text, or of several whose features were added up.

        A thing without a price costs nothing.
        """
        return sum(self.prices_s.get(name, 0.0) * count for name, count in features.items())


def features_of(
    policy: str, trace: Trace, models: Mapping[int, str], depth: int
) -> dict[str, float]:
    """What a text's seconds depend on. policy: whose rounds they are.

    models: a name of each model, by the id of its configuration. depth: layers of the target's
    decoder, of which a part may have run.
    """
    counted: Counter[str] = Counter({"texts": 1, f"rounds of {policy}": len(trace.rounds)})
    for forward in trace.forwards:
        model = models[id(forward.config)]
        if forward.encoder:
            counted["source tokens"] += forward.rows
            continue
        share = 1.0 if forward.layers is None else forward.layers / depth
        # a block is half a layer
        share -= (forward.skipped_attention + forward.skipped_feed_forward) / (2 * depth)
        if model == "target":  # one of a drafter has one row, or two
            if forward.rows == 1:
                counted["target forwards of one row"] += share
            else:
                counted["target forwards"] += share
                counted["target rows"] += share * forward.rows
            counted["target rows x context"] += (
                share * forward.rows * (forward.cached + forward.source)
            )
        else:
            if (vocabulary_size := forward.vocabulary) is not None:
                share *= dimensions(forward.config).share_with(vocabulary_size)
            counted[f"{model} forwards"] += share
        if forward.layers is not None:
            counted[f"{model} part forwards"] += 1
    return dict(counted)


def fit_cost_model(texts: Sequence[TimedText], baseline: str) -> CostModel:
    """Prices by non-negative least squares, and their error by leaving out one point after the
    other.

    baseline: the system that speedups are relative to; it is never left out. Seconds are weighted
    by their own size, and texts far from the first fit, which something else disturbed, are left
    out.
    """
    systems = [
        system for system in dict.fromkeys(text.system for text in texts) if system != baseline
    ]
    errors = []
    for system in systems if len(systems) > 2 else []:
        error = _left_out_error(texts, system, baseline)
        if error is not None:
            errors.append(error)
    if not errors:
        return CostModel(_prices(texts))
    return CostModel(_prices(texts), float(np.median(errors)), max(errors))


def _left_out_error(texts: Sequence[TimedText], system: str, baseline: str) -> float | None:
    """The relative error of a system's speedup as predicted from the other systems' texts.

    None for the only point of its policy: its rounds would have no price.
    """
    known = [text for text in texts if text.system != system]
    left_out = [text for text in texts if text.system == system]
    baseline_texts = [text for text in texts if text.system == baseline]
    priced = {name for text in known for name in text.features}
    if any(name not in priced for text in left_out for name in text.features):
        return None
    model = CostModel(_prices(known))
    measured = mean_s(baseline_texts) / mean_s(left_out)
    predicted = predicted_mean_s(model, baseline_texts) / predicted_mean_s(model, left_out)
    return abs(float(predicted / measured) - 1)


def mean_s(texts: Sequence[TimedText]) -> float:
    return np.mean([text.seconds for text in texts])


def predicted_mean_s(model: CostModel, texts: Sequence[TimedText]) -> float:
    return np.mean([model.seconds(text.features) for text in texts])


def _prices(texts: Sequence[TimedText]) -> dict[str, float]:
    names = sorted({name for text in texts for name in text.features})
    table = np.array([[text.features.get(name, 0.0) for name in names] for text in texts])
    seconds = np.array([text.seconds for text in texts])
    undisturbed = np.ones(len(texts), dtype=bool)
    for _ in range(2):
        prices = _solved(table[undisturbed], seconds[undisturbed])
        deviation = np.abs(table @ prices / seconds - 1)
        undisturbed = deviation <= OUTLIER * max(float(np.median(deviation)), 1e-9)
    return dict(zip(names, _solved(table[undisturbed], seconds[undisturbed]).tolist(), strict=True))


def _solved(
    table: Float[np.ndarray, "texts features"], seconds: Float[np.ndarray, " texts"]
) -> np.ndarray:
    """Least squares of relative deviations, with columns of one size."""
    weighted = table / seconds[:, None]
    sizes = np.maximum(np.abs(weighted).max(axis=0), 1e-12)
    return nnls(weighted / sizes, np.ones(len(seconds)))[0] / sizes
