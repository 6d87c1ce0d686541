"""Token-level intersection: the drafter proposes only tokens that both vocabularies have (arXiv
2502.05202, §4).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.draft import ROOT, Tree
from bild_lab.engine.models.processed_session import SessionOver
from bild_lab.engine.request import Source
from bild_lab.engine.session import (
    ALL_LOGITS,
    ChainResult,
    Drafted,
    DraftSpec,
    GrownTree,
    OutputSpec,
    Rows,
    RowsOrTokens,
    Scores,
    Session,
    TreeSpec,
    as_rows,
    on_device,
)
from bild_lab.engine.vocabularies.overlap import VocabularyOverlap
from bild_lab.errors import UserError


class IntersectionSession(SessionOver):
    """A session that takes the target's tokens and scores them, over a session of the draft model.

    A token that both vocabularies have is one row of the draft model. Any other is committed by the
    target, and takes as many rows as the draft model needs to write it. The scores of all tokens
    that are not shared are -inf, so the distribution is the draft model's own, renormalized over
    the shared ones.

    source, draft_source: the prompt in both vocabularies. positions: how many tokens the draft
    model reads.
    """

    def __init__(
        self,
        session: Session,
        overlap: VocabularyOverlap,
        source: Source,
        draft_source: Source,
        positions: int | None,
    ) -> None:
        super().__init__(session)
        self._overlap, self._positions = overlap, positions
        self._prompt_rows = len(source.prompt) - 1
        self._draft_prompt_rows = len(draft_source.prompt) - 1
        self._last_of_prompt = draft_source.prompt[-1]
        # after the prompt, where each token's rows end in the draft model's text
        self._ends: list[int] = []
        # the rows of each token of the last extend, or of the tree, and the place of the first token
        self._spans: list[list[int]] = []
        self._base = 0
        pairs = sorted(overlap.shared.items())
        self._shared = tuple(
            torch.tensor(side, device=draft_source.device) for side in zip(*pairs, strict=True)
        )

    @property
    def length(self) -> int:
        return self._prompt_rows + len(self._ends)

    @torch.inference_mode()
    def extend(self, rows: RowsOrTokens, output_spec: OutputSpec = ALL_LOGITS) -> Scores:
        rows = as_rows(rows)
        wants_scores_alone = output_spec == OutputSpec(logits=output_spec.logits)
        is_text = rows.position is None and rows.states is None
        if not (is_text and wants_scores_alone):
            raise UserError(
                f"{self._overlap.draft.path} has another vocabulary than the target and drafts by"
                " its scores alone; choose a draft model with the target's tokenizer"
            )
        # 1. the draft model's rows for each token, after those of the tree's earlier rows
        tokens = rows.token_list
        self._base = len(self._ends) - rows.earlier
        draft_tokens = [
            self._draft_tokens_of(token, len(self._ends) + place)
            for place, token in enumerate(tokens)
        ]
        self._spans = self._spans[: rows.earlier]
        row_count = sum(map(len, self._spans))
        for token_rows in draft_tokens:
            self._spans.append(list(range(row_count, row_count + len(token_rows))))
            row_count += len(token_rows)
        # 2. the draft model's forward, as far back as the first row that is scored
        fed_tokens = list(itertools.chain.from_iterable(draft_tokens))
        self._require_positions(len(fed_tokens))
        logit_count = len(tokens) if output_spec.logits is None else output_spec.logits
        scored_spans = self._spans[len(self._spans) - logit_count :]
        scored_rows = [span[-1] - row_count for span in scored_spans]  # from the end
        draft_rows = Rows(fed_tokens, None if rows.tree is None else self._draft_tree(rows.tree))
        draft_spec = OutputSpec(logits=-scored_rows[0] if scored_rows else 0)
        logits = self._session.extend(draft_rows, draft_spec).logits
        # 3. where each token's rows end
        end = self._ends[-1] if self._ends else self._draft_prompt_rows
        for token_rows in draft_tokens:
            end += len(token_rows)
            self._ends.append(end)
        # 4. the scores of the rows that were asked for
        if logits.shape[0] != logit_count:
            last_rows = [logits.shape[0] + row for row in scored_rows]
            logits = logits[on_device(last_rows, logits.device)]
        return Scores(self._in_target_columns(logits))

    def _in_target_columns(
        self, logits: Float[Tensor, "n draft_vocab"]
    ) -> Float[Tensor, "n vocab"]:
        """The scores of the shared tokens, where the target has them; −inf for all others."""
        target_columns, draft_columns = self._shared
        translated = logits.new_full((logits.shape[0], self._overlap.width), float("-inf"))
        return translated.index_copy_(1, target_columns, logits.index_select(1, draft_columns))

    def keep(self, path: Sequence[int]) -> None:
        self._session.keep([row for place in path for row in self._spans[place]])
        length_before = self._ends[self._base - 1] if self._base else self._draft_prompt_rows
        lengths = itertools.accumulate(
            (len(self._spans[place]) for place in path), initial=length_before
        )
        self._ends[self._base :] = list(lengths)[1:]

    def rollback(self, length: int) -> None:
        kept_count = max(0, length - self._prompt_rows)
        if kept_count < len(self._ends):
            del self._ends[kept_count:]
            self._session.rollback(self._ends[-1] if self._ends else self._draft_prompt_rows)

    def _draft_tokens_of(self, token: int, place: int) -> list[int]:
        """The draft model's tokens for a target token, the place-th after the prompt."""
        return self._overlap.draft_tokens(token) if place else [self._last_of_prompt]

    def _draft_tree(self, tree: Tree) -> Tree:
        """The tree of the draft model's rows: those of one token are a chain."""
        parents: list[int] = []
        for parent, span in zip(tree.parents.tolist(), self._spans, strict=True):
            parents += [ROOT if parent == ROOT else self._spans[parent][-1], *span[:-1]]
        return Tree(on_device(parents, tree.parents.device))

    def fits(self, rows: Sequence[int], drafted: int) -> bool:
        """Whether the draft model has positions for these tokens and so many drafted ones."""
        left = self._left_behind(rows)
        return left is None or drafted <= left

    def room(self, rows: Sequence[int]) -> int | None:
        """How many tokens have positions after these, whatever tokens they are; negative where
        these have none themselves, None for any number.
        """
        left = self._left_behind(rows)
        return None if left is None else left // self._overlap.most_draft_tokens

    def _left_behind(self, rows: Sequence[int]) -> int | None:
        """How many of the draft model's positions are left after these tokens."""
        if self._positions is None:
            return None
        places = enumerate(rows, start=len(self._ends))
        more = sum(len(self._draft_tokens_of(token, place)) for place, token in places)
        return self._positions - self._session.length - more

    def _require_positions(self, more: int) -> None:
        if self._positions is not None and self._session.length + more > self._positions:
            raise UserError(
                f"{self._overlap.draft.path} reads at most {self._positions} tokens, and in its"
                " vocabulary the text has more; lower decoding.max_new_tokens or"
                " dataset.max_source_tokens"
            )


class WithinPositions(SessionOver):
    """A session that drafts one forward at a time, and nothing where the positions of the draft
    model end.

    session: the translated one, or one over it. translated: whose positions count.
    """

    def __init__(self, session: Session, translated: IntersectionSession) -> None:
        super().__init__(session)
        self._translated = translated

    def extend(self, rows: RowsOrTokens, output_spec: OutputSpec = ALL_LOGITS) -> Scores:
        return self._session.extend(rows, output_spec)

    def room(self, rows: Sequence[int]) -> int | None:
        """`IntersectionSession.room`, for a drafter that feeds tokens of another one."""
        return self._translated.room(rows)

    def draft(self, rows: Sequence[int], spec: DraftSpec) -> Drafted | None:
        is_tree = isinstance(spec, TreeSpec)
        if self._translated.fits(rows, spec.depth * spec.width if is_tree else spec.steps):
            return None
        return GrownTree() if is_tree else ChainResult()
