"""Answers that any engine produced, judged by the target's own scores: greedy ones token by token, sampled ones drawn.

A greedy answer is the target's own if each of its tokens is the target's most likely one after those before it. A token
that is not is a tie or a defect by the certificate (`certificate.py`), and after a tie the judging goes on. Sampled
answers to one prompt are compared with the target's distribution by a chi-square test, which a planted fault must fail.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.models.checkpoint import Prompt
from bild_lab.engine.sampling import Sampling, most_likely
from bild_lab.errors import UserError, require_unicode
from bild_lab.lab.decoding.decoder import Decoder
from bild_lab.lab.measure.certificate import DEFECT, EQUAL, TIE, certify, distribution
from bild_lab.lab.measure.recorder import OneRow

KEYS = ("prompt", "answer")
LEAST_DRAWS = 50  # of a context that is tested
LEAST_EXPECTED = 5  # draws of a bin of the chi-square test; less likely tokens share a bin
MOST_BINS = 10  # of a context: a fault in what is most likely shows in fewer draws
FALSE_ALARMS = 1e-3  # how often a sound engine is called a defect
PLANTED = 0.1  # the fault that the test must see: so large a share of the draws takes the most likely token
SPARE = 16  # tokens that an answer's text may have beyond those of its tokenizer


@dataclass(frozen=True)
class Answer:
    """A line of the file, from 1: what was asked and answered, each as text or as token ids."""

    line: int
    prompt: Prompt
    answer: str | list[int]


@dataclass(frozen=True)
class Finding:
    """What was found of an answer, or of all draws for a prompt; line: of the first.

    ties: before the verdict. position, token, target_token: of the first defect, else of the first tie; a token that
    is None stands for an end. gap, noise: as in `Certificate`, in nats. draws, contexts: sampled answers, and texts
    after which enough of them go on. p_value: of the chi-square test. total_variation: between the first tokens of the
    draws and the target's distribution, over the bins of the test, chance included.
    """

    line: int
    verdict: str
    ties: int = 0
    position: int | None = None
    token: int | None = None
    target_token: int | None = None
    gap: float | None = None
    noise: float | None = None
    draws: int | None = None
    contexts: int | None = None
    p_value: float | None = None
    total_variation: float | None = None


def read_answers(file: Path) -> list[Answer]:
    """The answers of a file with a JSON object a line. Raises UserError, with the line, for anything else."""
    wanted = "each line must be a JSON object with prompt and answer, each text or a list of token ids"
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}; {wanted}") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except ValueError as error:
            raise UserError(f"{file}, line {number}: {wanted}, got no JSON: {error}") from error
        if not isinstance(content, Mapping) or any(not _readable(content.get(key)) for key in KEYS):
            raise UserError(f"{file}, line {number}: {wanted}, got {line[:60]}")
        found.append(Answer(number, content["prompt"], content["answer"]))
    if not found:
        raise UserError(f"{file} holds no answers; {wanted}")
    return found


def _readable(value: Any) -> bool:
    whole = isinstance(value, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in value)
    return isinstance(value, str) or (whole and min(value, default=0) >= 0)


class Wording:
    """The tokens of an answer, one after another, given those so far.

    Of a text they are the target's own as long as they write it, as one text may have several sequences of tokens; else
    those of the tokenizer. White space at its ends does not count.

    Raises UserError for token ids beyond the vocabulary.
    """

    def __init__(self, decoder: Decoder, answer: Answer) -> None:
        self._decoder, self._checkpoint = decoder, decoder.target.checkpoint
        given, size = answer.answer, self._checkpoint.rows
        is_text = isinstance(given, str)
        if is_text:
            require_unicode(f"line {answer.line}", given)
        self.tokens = self._checkpoint.tokenizer.encode(given, add_special_tokens=False) if is_text else given
        if max(self.tokens, default=0) >= size:
            raise UserError(
                f"line {answer.line}: tokens must be from 0 to {size - 1}, got {max(self.tokens)}; is pair.target the "
                "model that answered?"
            )
        self._prefixes = [self._written(self.tokens[:length]) for length in range(len(self.tokens) if is_text else 0)]
        self._text = given.strip() if is_text else None

    def next(self, before: Sequence[int], own: int) -> int | None:
        """The token after these, where the target's is `own`; None at the end."""
        length, tokenizer = len(before), self._checkpoint.tokenizer
        if self._text is None:
            return self.tokens[length] if length < len(self.tokens) else None
        written, longer = self._written(before), self._written([*before, own])
        if written.rstrip() == self._text:
            return None
        if own not in self._checkpoint.end_tokens:
            space = not written and self._decoder.text([*before, own]).isspace()
            goes_on = longer != written and self._text.startswith(longer.rstrip())
            if goes_on or space or own in tokenizer.all_special_ids:  # of which a text says nothing
                return own
        if self.tokens[:length] == list(before) and length < len(self.tokens):
            return self.tokens[length]
        if written in self._prefixes:
            return self.tokens[self._prefixes.index(written)]
        return [*tokenizer.encode(self._text.removeprefix(written), add_special_tokens=False), 0][0]

    def _written(self, tokens: Sequence[int]) -> str:
        """Without a character of which bytes are missing."""
        return self._decoder.text(list(tokens)).lstrip().rstrip("\ufffd")


@torch.inference_mode()
def audit_greedy(decoder: Decoder, answer: Answer, limit: int | None) -> Finding:
    """Judge one greedy answer. decoder: of the target alone. limit: the engine's on new tokens.

    An answer shorter than the limit must have ended where the target does; without a limit it may stop anywhere. The
    noise of the scores is also measured between our engine and the modules of Transformers, if these differ.
    """
    wording, target = Wording(decoder, answer), decoder.target
    most = limit or max(1, 2 * len(wording.tokens) + SPARE)
    request = decoder.request(answer.prompt, most)
    own_row, ends = OneRow(target, request), target.checkpoint.end_tokens
    others = () if target.engine == "hf" or target.bits is not None else (target.transformers,)
    before: list[int] = []
    ties = []
    while True:
        ended = bool(before) and before[-1] in ends
        own = int(most_likely(own_row.after([*request.source.prompt, *before])[None])[0])
        token = wording.next(before, own)
        if token is None and (ended or limit is None or len(before) >= limit):
            break
        over = ended or len(before) >= most
        if token is None:  # it ended
            token = own if own in ends else min(ends, default=own)
        if over or token != own:
            texts = [*before, token], before if over else [*before, own]
            found = certify(target, request, *texts, others=others)
            place = {name: getattr(found, name) for name in ("position", "token", "target_token", "gap", "noise")}
            if found.verdict != TIE:
                return Finding(answer.line, found.verdict, len(ties), **place)
            ties.append(place)
        before.append(token)
    return Finding(answer.line, TIE, len(ties), **ties[0]) if ties else Finding(answer.line, EQUAL)


@torch.inference_mode()
def audit_sampled(decoder: Decoder, answers: Sequence[Answer], sampling: Sampling) -> list[Finding]:
    """Judge the draws of each prompt, given as token ids: one finding a prompt.

    In every context after which 50 draws or more go on, their next tokens are counted against the target's
    distribution, row by row. The statistics of a prompt's contexts are added up, and a prompt is a defect if a sound
    engine would differ as much in less than a thousandth of audits.

    Raises UserError for texts, and where no defect is found in draws too few to see the planted fault.
    """
    groups: dict[str, list[Answer]] = {}
    for one in answers:
        if isinstance(one.answer, str):
            raise UserError(
                f"line {one.line}: sampled answers must be token ids, as a text may have several sequences of tokens"
            )
        groups.setdefault(json.dumps(one.prompt), []).append(one)
    chance, control, findings = torch.Generator().manual_seed(0), [], []
    for group in groups.values():
        texts, own = [tuple(Wording(decoder, one).tokens) for one in group], []
        request = decoder.request(group[0].prompt, max(1, *map(len, texts)))
        row = OneRow(decoder.target, request)
        for before, counts in contexts(texts, decoder.target.checkpoint.end_tokens):
            p = distribution(sampling, row.after([*request.source.prompt, *before])).cpu()
            seen = torch.zeros_like(p).index_put_(
                (torch.tensor(list(counts)),), torch.tensor(list(counts.values())).to(p)
            )
            planted = (1 - PLANTED) * p
            planted[p.argmax()] += PLANTED
            drawn = torch.multinomial(planted, counts.total(), replacement=True, generator=chance)
            own.append(chi_square(seen, p))
            control.append(chi_square(drawn.bincount(minlength=len(p)).to(p), p))
        p_value = chance_of(own)
        verdict = DEFECT if p_value < FALSE_ALARMS / len(groups) else EQUAL
        found = {"draws": len(group), "contexts": len(own), "p_value": p_value}
        findings.append(Finding(group[0].line, verdict, **found, total_variation=own[0][2] if own else None))
    if chance_of(control) >= FALSE_ALARMS and all(one.verdict == EQUAL for one in findings):
        raise UserError(
            f"{len(answers)} draws of {len(groups)} prompts are too few: a fault that takes the most likely token in "
            f"{PLANTED:.0%} of the draws would not be seen; give more draws of each prompt, or a higher temperature"
        )
    return findings


def contexts(texts: Sequence[tuple[int, ...]], ends: frozenset[int]) -> Iterator[tuple[tuple[int, ...], Counter[int]]]:
    """What so many draws begin with that they are tested, shortest first, and how often each token comes next."""
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        before = waiting.pop(0)
        counts = Counter(
            text[len(before)] for text in texts if text[: len(before)] == before and len(text) > len(before)
        )
        if counts.total() >= LEAST_DRAWS:
            yield before, counts
            waiting += [(*before, token) for token in sorted(counts) if token not in ends]


def chi_square(seen: Float[Tensor, " vocab"], p: Float[Tensor, " vocab"]) -> tuple[float, int, float]:
    """Pearson's statistic of these counts against p, the number of bins, and the total variation over them.

    The statistic is infinite where p gives no probability.

    The nine most likely tokens are bins of their own where 5 draws or more are expected, the others one together, with
    the least likely of the former where it expects fewer.
    """
    if bool((seen[p == 0] > 0).any()):
        return float("inf"), 2, float(seen[p == 0].sum() / seen.sum())
    expected, order = (seen.sum() * p).sort(descending=True)
    alone = min(int((expected >= LEAST_EXPECTED).sum()), MOST_BINS - 1)
    if float(expected[alone:].sum()) < LEAST_EXPECTED:
        alone -= 1
    bins = [torch.cat([one[: max(alone, 0)], one[max(alone, 0) :].sum()[None]]) for one in (seen[order], expected)]
    moved = bins[0] - bins[1]
    return float((moved**2 / bins[1]).sum()), len(moved), float(moved.abs().sum() / seen.sum()) / 2


def chance_of(tests: Sequence[tuple[float, int, float]]) -> float:
    """How likely chi-square variables with so many bins together are at least so large; 1 without a degree of freedom.

    tests: what `chi_square` gives.
    """
    degrees, statistic = sum(bins - 1 for _, bins, _ in tests), sum(value for value, *_ in tests)
    halves = (torch.tensor(value / 2, dtype=torch.float64) for value in (degrees, statistic))
    return float(torch.special.gammaincc(*halves)) if degrees else 1.0
