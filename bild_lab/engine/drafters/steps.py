"""Drafts whole steps, and steps aside while the target rewrites one that it did not accept."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from bild_lab.engine.draft import Draft, Verdict, empty_draft
from bild_lab.engine.drafters.model import ModelDrafter
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Request
from bild_lab.engine.session import LoadedModel, Model, Scores, Session
from bild_lab.errors import UserError

LINE, SENTENCE = ("\n",), ("\n", ".", "!", "?", "。", "！", "？")
ENDS = {"line": LINE, "sentence": SENTENCE}


class StepDrafter(Drafter):
    """The draft model writes until a step ends: a line, or a sentence, which also ends with a line.

    A step ends with a token whose text, without trailing spaces, ends with such a mark (a token such as "Dr." does), at
    `window` tokens, or with the text. If the target rejects a step, it writes that step alone, token by token.

    step: line or sentence. Raises UserError for an encoder–decoder.
    """

    drafts_trees = False

    def __init__(self, target: LoadedModel, draft: Model, window: int, step: str) -> None:
        if step not in ENDS:
            raise UserError(f"policy.step must be one of {', '.join(ENDS)}, got {step!r}")
        if target.checkpoint.encoder_decoder:
            raise UserError(
                "policy step_cascade is for decoder-only pairs, whose texts have steps, got an encoder–decoder; "
                "use policy=bild"
            )
        self._model, self._inner, self._window = draft, ModelDrafter(draft, window), window
        self._inner.stop_on_eos = True  # at every token, for the end of the step
        self._ends = step_ends(target.checkpoint.tokenizer, ENDS[step])

    def begin(self, request: Request, target: Session) -> None:
        limits = request.limits
        until = replace(request, limits=replace(limits, end_tokens=limits.end_tokens | self._ends))
        self._inner = self._inner.start(until, target)
        self._left = 0  # tokens of a step that the target still writes, at most

    def propose(self, tokens: list[int]) -> Draft:
        if tokens[-1] in self._ends:
            self._left = 0
        self._inner.rollback(len(tokens) - 1)  # in each round: it would keep the rejected step while the target writes
        return empty_draft(self._model.device) if self._left else self._inner.propose(tokens)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """A rejected step is the target's, from the token that it emits in this round on."""
        self._left = self._window - 1 if len(draft) and not verdict.path else max(0, self._left - 1)

    def rollback(self, length: int) -> None:
        self._inner.rollback(length)


@lru_cache(maxsize=4)
def step_ends(tokenizer: PreTrainedTokenizerBase, marks: tuple[str, ...]) -> frozenset[int]:
    """The tokens whose text ends with one of these marks, or contains a new line."""
    ids = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
    texts = tokenizer.batch_decode([[one] for one in ids])
    return frozenset(
        one for one, text in zip(ids, texts, strict=True) if "\n" in text or text.rstrip(" ").endswith(marks)
    )
