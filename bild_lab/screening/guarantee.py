"""Settings whose mean loss per text is certified: learn then test (Angelopoulos et al., 2110.01052,
§2).

A text's loss is how much less its metric is than that of the target's own text, as a share of the
metric's scale. Of log_probability it is 1 - exp(nats a token gained): the share of a token's
probability that is lost. No text loses more than 1, and a gain of more than 1 counts as 1.

The settings on the front of one split are tested on the texts of another, the surest first, until
one fails (fixed sequence testing; as Pareto testing, Laufer-Goldshtein et al., 2210.07913). Order
and stakes depend on the first split alone. So all that pass keep their loss with the asked
probability, and any of them may be chosen. A metric that is no mean over texts, such as BLEU, has
no such test: a bootstrap says how strict a choice must be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from bild_lab.errors import UserError, require_number
from bild_lab.lab.metrics.bootstrap import MetricSums
from bild_lab.lab.metrics.text_metrics import LENGTH, LOG_PROBABILITY, metric_named
from bild_lab.lab.schema.statistics import pareto_front

MOST_STAKED = 0.9  # of the capital that a lost text may cost
DRAWS = 200  # of a bootstrap
STRICTER = 40  # losses below the asked one, down to its negative, that a bootstrap tries


@dataclass
class GuaranteeSpec:
    """What to certify: `screen.guarantee`.

    loss: the most that a text may lose on average, a share of the metric's scale; None: certify
    nothing. probability: of a draw of texts with which what is certified is true.
    """

    loss: float | None = None
    probability: float = 0.95

    def __post_init__(self) -> None:
        require_number("screen.guarantee.probability", self.probability, 0.5, 0.9999)
        if self.loss is not None:
            require_number(
                "screen.guarantee.loss",
                self.loss,
                0,
                0.99,
                above=True,
                remedy="0.02 is 2 points of 100",
            )

    @property
    def error(self) -> float:
        """How likely a guarantee may be wrong."""
        return 1 - self.probability


@dataclass(frozen=True)
class Losses:
    """What several settings lose on the same texts.

    of: given how often each text counts, the loss of every setting. each: of single texts; None if
    the metric is no mean over texts.
    """

    count: int
    of: Callable[[Float[np.ndarray, "m texts"]], Float[np.ndarray, "m settings"]]
    each: Float[np.ndarray, "settings texts"] | None

    @property
    def mean(self) -> Float[np.ndarray, " settings"]:
        return self.of(np.ones((1, self.count)))[0]


def require_losses(metric: str, turns: int) -> None:
    """Raise UserError for a metric without better and worse, and texts that hang together. turns:
    of a conversation.
    """
    if metric == LENGTH:
        raise UserError(
            f"screen.guarantee needs a metric of quality, got {metric}; set dataset.metric=chrf"
        )
    if turns > 1:
        raise UserError(
            f"screen.guarantee needs texts drawn one by one, got {turns} turns a text; set"
            " dataset.turns=1"
        )


def losses_of(metric: str, pool: MetricSums, picks: Sequence[Sequence[int]]) -> Losses:
    """pool: every distinct text. picks: which of them the target alone has for each example, then
    every setting.
    """
    alone, *others = np.array(picks)
    if metric == LOG_PROBABILITY or metric_named(metric).bounded:
        values = pool.value_of(pool.statistics)[np.array(picks)]
        gained = values[1:] - values[0]
        each = np.maximum(-np.expm1(gained) if metric == LOG_PROBABILITY else -gained / 100, -1)
        return Losses(
            len(alone), lambda times: times @ each.T / times.sum(axis=1, keepdims=True), each
        )

    def of(times: Float[np.ndarray, "m texts"]) -> Float[np.ndarray, "m settings"]:
        own = [pool.weighted(times, one) for one in others]
        return (pool.weighted(times, alone)[:, None] - np.stack(own, axis=1)) / 100

    return Losses(len(alone), of, None)


def spread_of(losses: Float[np.ndarray, "settings n"]) -> Float[np.ndarray, " settings"]:
    """The variance of every setting's losses, drawn towards 1/4 (Waudby-Smith and Ramdas,
    2010.09686, §3.2).
    """
    count = losses.shape[1]
    return (0.25 + count * losses.var(axis=1)) / (count + 1)


def p_values(
    asked: GuaranteeSpec,
    others: Float[np.ndarray, "settings m"],
    each: Float[np.ndarray, "settings n"],
) -> list[float]:
    """How surprising the losses of each setting, none above 1, would be if its mean were above the
    asked one.

    One over the largest capital of a player who begins with 1 and stakes on one text after the
    other that it loses less than is asked: who can expect no gain if the mean is above (the same
    paper, §4; Ville's inequality). He stakes √(2 ln(what he lacks) / (texts left · σ²)), truncated,
    so that the last text decides (Voracek and Orabona, 2025, STaR-Bets). others: losses of other
    texts, for σ². each: of texts in random order.
    """
    spread, count, goal = spread_of(others), each.shape[1], -math.log(asked.error)
    capital = np.zeros(len(each))  # all are logarithms
    largest = capital
    for place in range(count):
        lacks = np.maximum(goal - capital, 0)
        stake = np.minimum(
            np.sqrt(2 * lacks / ((count - place) * spread)), MOST_STAKED / (1 - asked.loss)
        )
        capital = capital + np.log1p(stake * (asked.loss - each[:, place]))
        largest = np.maximum(largest, capital)
    return np.exp(-largest).tolist()


def passing(p_values: Sequence[float], error: float) -> list[int]:
    """The places of those before the first that fails."""
    return list(range(next((at for at, one in enumerate(p_values) if one > error), len(p_values))))


def sequence(
    asked: GuaranteeSpec, speeds: Float[np.ndarray, " settings"], select: Losses
) -> list[int]:
    """The places of the settings on the front, the surest first."""
    mean, spread = select.mean, 1.0 if select.each is None else spread_of(select.each)
    risk = (mean - asked.loss) / np.sqrt(spread)
    front = pareto_front([(1 / speed, -loss) for speed, loss in zip(speeds, mean, strict=True)])
    return sorted(front, key=lambda at: (risk[at], speeds[at]))


def enough(losses: Float[np.ndarray, " texts"], asked: GuaranteeSpec) -> int | None:
    """Texts that would certify a setting whose losses have the mean and the variance of these, and
    have to spare.

    ln(1/δ) (8 σ² + g / MOST_STAKED) / g², where g is how far the mean is below what may be lost:
    what stakes by σ² and truncated ones take, the first for half of g, so that chance may take the
    other. None if no number would do.
    """
    gap = asked.loss - losses.mean()
    needed = -math.log(asked.error) * (8 * losses.var() + gap / MOST_STAKED)
    return math.ceil(needed / gap**2) if gap > 0 else None


def bootstrapped(
    asked: GuaranteeSpec, speeds: Float[np.ndarray, " settings"], losses: Losses, seed: int
) -> list[int]:
    """The settings within a stricter loss, by a bootstrap over the whole choice: no certificate.

    Of texts that are drawn anew, the fastest setting within the stricter loss is chosen. It is as
    strict as keeps the asked loss on the texts left out in the asked share of draws.
    """
    count = losses.count
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=DRAWS)
    seen, left_out = losses.of(drawn.astype(float)), losses.of((drawn == 0).astype(float))
    fastest_first = np.argsort(-speeds, kind="stable")
    for stricter in np.linspace(asked.loss, -asked.loss, STRICTER + 1):
        within = seen[:, fastest_first] <= stricter
        chosen = fastest_first[within.argmax(axis=1)]
        if (
            within.any(axis=1) & (left_out[np.arange(DRAWS), chosen] > asked.loss)
        ).mean() <= asked.error:
            return np.flatnonzero(losses.mean <= stricter).tolist()
    return []


@dataclass(frozen=True)
class Guarantee:
    """What was found of settings in the order of their tests.

    kept: their places, of those that keep the loss. chosen: the fastest of them. mean: losses on
    the tested texts.
    p_values: None for a bootstrap. enough: texts with which the first setting would pass.
    """

    kept: list[int]
    chosen: int | None
    mean: list[float]
    p_values: list[float] | None
    enough: int | None


def guarantee(
    asked: GuaranteeSpec,
    speeds: Float[np.ndarray, " settings"],
    others: Float[np.ndarray, "settings m"] | None,
    losses: Losses,
    seed: int,
) -> Guarantee:
    """Of settings in the order of their tests. others: their losses on other texts, from which the
    order is.
    """
    if losses.each is None:
        kept, surprises = bootstrapped(asked, speeds, losses, seed), None
    else:
        shuffled = np.random.default_rng(seed).permutation(losses.count)
        surprises = p_values(asked, others, losses.each[:, shuffled])
        kept = passing(surprises, asked.error)
    return Guarantee(
        kept=kept,
        chosen=max(kept, key=lambda at: speeds[at], default=None),
        mean=losses.mean.tolist(),
        p_values=surprises,
        enough=None if losses.each is None else enough(losses.each[0], asked),
    )
