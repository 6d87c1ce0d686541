"""Models made of a function: the next token's logits given all tokens before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bild_lab.engine.models.cached_session import CachedSession
from bild_lab.engine.models.hf.module_layers import ModuleLayers
from bild_lab.engine.request import Source
from bild_lab.engine.session import (
    ALL_LOGITS,
    DEFAULT_OPTIONS,
    DraftSpec,
    OutputSpec,
    Rows,
    Scores,
    SessionOptions,
    as_rows,
)
from bild_lab.engine.trace import Forward

NextLogits = Callable[[list[int]], Tensor]


@dataclass
class StubModel:
    """A model without weights. `fed` counts the rows it was asked to run."""

    next_logits: NextLogits
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    engine: str = "stub"
    fed: list[int] = field(default_factory=list)
    depth: int = 1

    def start(self, source: Source, room: int, *_: object) -> StubSession:
        return StubSession(self, list(source.prompt[:-1]))


class StubSession:
    """Keeps plain token lists; a row's context is the cache and its ancestors."""

    def __init__(self, model: StubModel, tokens: list[int]) -> None:
        self._model, self._tokens = model, tokens
        self._rows: list[int] = []
        self.forwards: list[Forward] = []

    @property
    def length(self) -> int:
        return len(self._tokens)

    def extend(
        self, rows: Rows | Sequence[int] | Tensor, output_spec: OutputSpec = ALL_LOGITS
    ) -> Scores:
        rows = as_rows(rows)
        new = rows.token_list
        self._model.fed.extend(new)
        above = list(range(-1, len(new) - 1)) if rows.tree is None else rows.tree.parents.tolist()
        self._rows = [*self._rows[len(self._rows) - rows.earlier :], *new]
        text = self._tokens[: len(self._tokens) - rows.earlier]
        contexts: list[list[int]] = []
        for token, parent in zip(self._rows, above, strict=True):
            contexts.append([*(text if parent < 0 else contexts[parent]), token])
        self._tokens = [*text, *self._rows]
        wanted = contexts[-(output_spec.logits or len(new)) :]
        return Scores(logits=torch.stack([self._model.next_logits(context) for context in wanted]))

    def draft(self, rows: Sequence[int], spec: DraftSpec) -> None:
        """There is no program."""

    def keep(self, path: Sequence[int]) -> None:
        base = len(self._tokens) - len(self._rows)
        self._tokens = [*self._tokens[:base], *(self._rows[row] for row in path)]

    def rollback(self, length: int) -> None:
        self._tokens = self._tokens[:length]


# for drafters that do not look at the target
SESSION = StubSession(StubModel(lambda tokens: torch.zeros(1)), [])


@dataclass
class ModuleModel:
    """A Hugging Face module behind the session protocol, without a checkpoint.

    `fed` counts decoder rows.
    """

    module: PreTrainedModel
    engine: str = "hf"
    fed: list[int] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.module.device

    def start(
        self, source: Source, room: int, session_options: SessionOptions = DEFAULT_OPTIONS
    ) -> CountingSession:
        return CountingSession(self, source, session_options.forwards)


class CountingSession(CachedSession):
    """A session that notes how many rows each forward ran."""

    def __init__(self, model: ModuleModel, source: Source, forwards: list[Forward] | None) -> None:
        super().__init__(ModuleLayers(model.module, source), source.prompt, forwards)
        self._model = model

    def extend(
        self, rows: Rows | Sequence[int] | Tensor, output_spec: OutputSpec = ALL_LOGITS
    ) -> Scores:
        self._model.fed.append(len(self._pending) + len(as_rows(rows).tokens))
        return super().extend(rows, output_spec)


def uncached(module: PreTrainedModel, source: Source) -> NextLogits:
    """The next token's logits by one forward over everything, with no KV cache: the oracle of
    sessions.

    Algorithms ask again and again for the same texts, so each answer is kept.
    """

    @cache
    @torch.inference_mode()
    def next_logits(tokens: tuple[int, ...]) -> Tensor:
        ids = torch.tensor([tokens])
        if source.encoder_ids is None:
            return module(input_ids=ids, use_cache=False).logits[0, -1]
        return module(input_ids=source.encoder_ids, decoder_input_ids=ids, use_cache=False).logits[
            0, -1
        ]

    return lambda tokens: next_logits(tuple(tokens))
