"""Settings whose mean loss per text is certified: learn then test (Angelopoulos et al., 2110.01052,
§2).

A text's loss is how much less its metric is than that of the target's own text, as a share of the
metric's scale. For log_probability it is 1 - exp(nats a token gained): the share of a token's
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
from bild_lab.lab.metrics.non_inferiority import MOST_STAKED
from bild_lab.lab.metrics.text_metrics import LENGTH, LOG_PROBABILITY, metric_named
from bild_lab.lab.schema.statistics import pareto_front

PerSetting = Float[np.ndarray, " settings"]
TextLosses = Float[np.ndarray, "settings texts"]
# how often each text counts, and what the settings lose then
TextWeights, SettingLosses = Float[np.ndarray, "m texts"], Float[np.ndarray, "m settings"]
DRAWS = 200  # how many a bootstrap makes
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

    weighted: given how often each text counts, the loss of every setting. per_text: the losses of
    single texts; None if the metric is no mean over texts.
    """

    count: int
    weighted: Callable[[TextWeights], SettingLosses]
    per_text: TextLosses | None

    @property
    def mean(self) -> PerSetting:
        return self.weighted(np.ones((1, self.count)))[0]


def mean_losses(per_text: TextLosses) -> Losses:
    """The losses of a metric that is a mean over texts."""

    def weighted(times: TextWeights) -> SettingLosses:
        return times @ per_text.T / times.sum(axis=1, keepdims=True)

    return Losses(per_text.shape[1], weighted, per_text)


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
    """What settings lose against the target alone.

    pool: every distinct text. picks: which of them the target alone has for each example, then
    every setting.
    """
    target_picks, *setting_picks = np.array(picks)
    if metric == LOG_PROBABILITY or metric_named(metric).bounded:
        values = pool.value_of(pool.statistics)[np.array(picks)]
        gains = values[1:] - values[0]
        losses = -np.expm1(gains) if metric == LOG_PROBABILITY else -gains / 100
        return mean_losses(np.maximum(losses, -1))

    def weighted(times: TextWeights) -> SettingLosses:
        target_values = pool.weighted(times, target_picks)
        values = [pool.weighted(times, chosen_texts) for chosen_texts in setting_picks]
        return (target_values[:, None] - np.stack(values, axis=1)) / 100

    return Losses(len(target_picks), weighted, None)


def loss_variance(losses: TextLosses) -> PerSetting:
    """The variance of every setting's losses, drawn towards 1/4 (Waudby-Smith and Ramdas,
    2010.09686, §3.2).
    """
    count = losses.shape[1]
    return (0.25 + count * losses.var(axis=1)) / (count + 1)


def p_values(
    spec: GuaranteeSpec,
    earlier_losses: TextLosses,
    losses: TextLosses,
) -> list[float]:
    """How surprising the losses of each setting, none above 1, would be if its mean were above the
    asked one.

    One over the largest capital of a player who begins with 1 and stakes on one text after the
    other that it loses less than is asked: who can expect no gain if the mean is above (the same
    paper, §4; Ville's inequality). He stakes √(2 ln(what he lacks) / (texts left · σ²)), truncated,
    so that the last text decides (Voracek and Orabona, 2025, STaR-Bets). earlier_losses: losses on
    other texts, for σ². losses: on texts in random order.
    """
    variance, count = loss_variance(earlier_losses), losses.shape[1]
    goal = -math.log(spec.error)  # this and the capital are logarithms
    capital = np.zeros(len(losses))
    largest = capital
    for place in range(count):
        lacks = np.maximum(goal - capital, 0)
        stake = np.sqrt(2 * lacks / ((count - place) * variance))
        stake = np.minimum(stake, MOST_STAKED / (1 - spec.loss))
        capital = capital + np.log1p(stake * (spec.loss - losses[:, place]))
        largest = np.maximum(largest, capital)
    return np.exp(-largest).tolist()


def accepted_prefix(p_values: Sequence[float], error: float) -> list[int]:
    """The places of the tests before the first that fails; a p-value of NaN fails."""
    for place, p_value in enumerate(p_values):
        if not p_value <= error:
            return list(range(place))
    return list(range(len(p_values)))


def order_of_testing(spec: GuaranteeSpec, speeds: PerSetting, select: Losses) -> list[int]:
    """The places of the settings on the front, the surest first."""
    mean = select.mean
    variance = 1.0 if select.per_text is None else loss_variance(select.per_text)
    risk = (mean - spec.loss) / np.sqrt(variance)
    front = pareto_front([(1 / speed, -loss) for speed, loss in zip(speeds, mean, strict=True)])
    return sorted(front, key=lambda place: (risk[place], speeds[place]))


def required_n(losses: Float[np.ndarray, " texts"], spec: GuaranteeSpec) -> int | None:
    """How many texts would certify a setting whose losses have the mean and the variance of these,
    and have to spare.

    ln(1/δ) (8 σ² + g / MOST_STAKED) / g², where g is how far the mean is below what may be lost:
    what stakes by σ² and truncated ones take, the first for half of g, so that chance may take the
    other. None if no number would do.
    """
    gap = spec.loss - losses.mean()
    if not gap > 0:
        return None
    return math.ceil(-math.log(spec.error) * (8 * losses.var() + gap / MOST_STAKED) / gap**2)


def bootstrapped(spec: GuaranteeSpec, speeds: PerSetting, losses: Losses, seed: int) -> list[int]:
    """The settings within a stricter loss, by a bootstrap over the whole choice: no certificate.

    On texts that are drawn anew, the fastest setting within the stricter loss is chosen. It is as
    strict as keeps the asked loss on the texts left out in the asked share of draws.
    """
    count = losses.count
    times = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=DRAWS)
    drawn_losses = losses.weighted(times.astype(float))
    left_out_losses = losses.weighted((times == 0).astype(float))
    fastest_first = np.argsort(-speeds, kind="stable")
    for stricter in np.linspace(spec.loss, -spec.loss, STRICTER + 1):
        within = drawn_losses[:, fastest_first] <= stricter
        fastest_within = fastest_first[within.argmax(axis=1)]
        lost_more = left_out_losses[np.arange(DRAWS), fastest_within] > spec.loss
        if (within.any(axis=1) & lost_more).mean() <= spec.error:
            return np.flatnonzero(losses.mean <= stricter).tolist()
    return []


@dataclass(frozen=True)
class Guarantee:
    """What was found of settings in the order of their tests.

    certified: the places of those that keep the loss. fastest: the fastest of them. mean: losses on
    the tested texts. p_values: None for a bootstrap. required_n: texts with which the first setting
    would pass.
    """

    certified: list[int]
    fastest: int | None
    mean: list[float]
    p_values: list[float] | None
    required_n: int | None


def guarantee(
    spec: GuaranteeSpec,
    speeds: PerSetting,
    earlier_losses: TextLosses | None,
    losses: Losses,
    seed: int,
) -> Guarantee:
    """Test settings in their order. earlier_losses: their losses on other texts, from which the
    order is.
    """
    if losses.per_text is None:
        surprises, texts = None, None
        certified = bootstrapped(spec, speeds, losses, seed)
    else:
        shuffled = np.random.default_rng(seed).permutation(losses.count)
        surprises = p_values(spec, earlier_losses, losses.per_text[:, shuffled])
        certified = accepted_prefix(surprises, spec.error)
        texts = required_n(losses.per_text[0], spec)
    return Guarantee(
        certified=certified,
        fastest=max(certified, key=lambda place: speeds[place], default=None),
        mean=losses.mean.tolist(),
        p_values=surprises,
        required_n=texts,
    )
