"""Texts that no score or speed is worth anything of: empty, looping, or cut by the length limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bild_lab.engine.request import Request
from bild_lab.lab.measure.summary import answered_indices
from bild_lab.lab.measure.timing import Timed, TimedTexts
from bild_lab.lab.point.decoder import BASELINE, METHOD

LOOP_TOKENS = 32  # so many at the end of a text repeat earlier ones, at least, if it is in a loop


def text_faults(
    timed: TimedTexts, texts: Mapping[str, Sequence[str]], requests: Sequence[Request]
) -> dict[str, float]:
    """Fields of a Result: the shares of the texts that are empty and that end in a loop, the
    method's and the baseline's, and of the baseline's that the length limit cut. Without a baseline
    they are of the method alone.
    """
    answered = answered_indices(timed)
    shares = {
        "empty": _empty_share([texts[METHOD][index] for index in answered]),
        "looping": _looping_share([timed[METHOD][index] for index in answered]),
    }
    if BASELINE not in timed:
        return shares
    n_cut = 0
    for text, request in zip(timed[BASELINE], requests, strict=True):
        tokens = [*request.source.prompt, *text.token_ids]
        if request.limits.room(tokens) <= 0 and not request.limits.ended(tokens):
            n_cut += 1
    return {
        **shares,
        "baseline_empty": _empty_share(texts[BASELINE]),
        "baseline_looping": _looping_share(timed[BASELINE]),
        "baseline_cut": n_cut / len(requests),
    }


def _empty_share(texts: Sequence[str]) -> float:
    return sum(not text.strip() for text in texts) / max(len(texts), 1)


def _looping_share(texts: Sequence[Timed]) -> float:
    return sum(ends_in_loop(text.token_ids) for text in texts) / max(len(texts), 1)


def ends_in_loop(token_ids: Sequence[int]) -> bool:
    """Whether a text says one block of tokens over and over at its end, or before its end token: at
    least three times, and so that at least `LOOP_TOKENS` tokens repeat earlier ones.
    """
    return _repeats(token_ids) or _repeats(token_ids[:-1])


def _repeats(token_ids: Sequence[int]) -> bool:
    for period in range(1, len(token_ids) // 3 + 1):
        if token_ids[-1] != token_ids[-1 - period]:
            continue  # as most do: a text of 32,000 tokens would take a second
        n_repeated = max(LOOP_TOKENS, 2 * period)
        if len(token_ids) < n_repeated + period:
            return False
        if token_ids[-n_repeated:] == token_ids[-n_repeated - period : -period]:
            return True
    return False
