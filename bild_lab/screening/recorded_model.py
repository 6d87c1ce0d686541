"""A model whose sessions serve what it has scored before, and run it where a text is new."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import greenlet
import torch
from jaxtyping import Int
from torch import Tensor

from bild_lab.engine.draft import Tree
from bild_lab.engine.models.cached_session import (
    CachedSession,
    ForwardPass,
    Layers,
    are_first_layers,
)
from bild_lab.engine.models.processed_session import processed
from bild_lab.engine.request import Source
from bild_lab.engine.sampling import precise
from bild_lab.engine.session import (
    ALL_LOGITS,
    DEFAULT_OPTIONS,
    ChainProgress,
    ChainResult,
    DraftSpec,
    LoadedModel,
    OutputSpec,
    Prefix,
    Rows,
    Scores,
    Session,
    SessionOptions,
    TreeSpec,
    as_rows,
)
from bild_lab.errors import UserError
from bild_lab.screening.record_store import RecordedRow, RecordStore
from bild_lab.screening.recorded_text import HEAD_INPUT, LOGITS, STATE, RecordedNode, RecordedText

NO_STATES = (
    "a record holds what a model scores, and this method reads states inside it; measure it with"
    " run.py instead"
)


class RecordedModel:
    """A loaded model in the same protocol, with a memory of every row that it has scored.

    A record is exact for methods that decide by scores and draw no random numbers. store: where
    rows are kept on disk; None: in memory alone. memory_bytes: of rows in memory; what a text has
    beyond its share of them goes to the disk before its end. Each loop of a batch has texts of its
    own. All else, such as the checkpoint, is the model's own.
    """

    def __init__(
        self, model: LoadedModel, store: RecordStore | None = None, memory_bytes: float = inf
    ) -> None:
        self.model, self.store = model, store
        # once: Transformers copies a configuration
        self.config, self.depth = model.checkpoint.config, model.depth
        self._memory_bytes = memory_bytes
        # the texts that are asked, by the loops that decode at once
        self._texts: dict[Any, dict[str, RecordedText]] = {}
        # of the rows that were dropped, by text and kind
        self._dropped_forwards: dict[str, Counter[str]] = {}
        # what else was asked of a prompt, by its text: the texts behind a prefix
        self._behind_prefix: dict[str, set[str]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @torch.inference_mode()
    def start(
        self, source: Source, room: int, session_options: SessionOptions = DEFAULT_OPTIONS
    ) -> Session:
        prefix = session_options.prefix
        name = text_name(source, prefix)
        if prefix is not None:
            self._behind_prefix.setdefault(text_name(source), set()).add(name)
        plain = replace(source, processors=None)  # rows are kept as the model gives them
        texts = self._texts.setdefault(greenlet.getcurrent(), {})
        if name not in texts:
            blocks = [] if self.store is None else self.store.read(name)
            # the kernels sum every row alike
            depth = self.depth if self.model.engine == "kernels" else None
            texts[name] = RecordedText(
                len(source.prompt) - 1,
                self.model.device,
                lambda: self.model.start(plain, room, SessionOptions(prefix=prefix)),
                blocks,
                depth,
            )
        layers = RecordedLayers(
            self, name, texts[name], plain, 0 if prefix is None else prefix.length
        )
        return processed(RecordedSession(layers, source.prompt, session_options.forwards), source)

    def save(self) -> None:
        """Save the new rows of the texts that the caller asked for: in a batch, those of its own
        example. New rows that the store does not take are dropped.

        What is on disk leaves the memory, and is read again when it is asked for.
        """
        if self.store is None:
            for text in self._texts.get(greenlet.getcurrent(), {}).values():
                text.close()
            return
        for name, text in self._texts.pop(greenlet.getcurrent(), {}).items():
            if text.new:
                self._save_new(name, text, text.new_rows() if self._takes(name, text) else [])
            text.clear()

    def keep_within_memory(self, name: str, text: RecordedText) -> None:
        """Take the rows of this text out of memory if they are more than its share.

        New rows go to the disk. Of those that the store does not take, states stay in memory, as
        they are short, and scores are dropped: the model runs again.
        """
        texts_in_use = sum(map(len, self._texts.values()))
        if self.store is None or text.memory_bytes <= self._memory_bytes / texts_in_use:
            return
        rows = text.new_rows()
        if rows and self._save_new(name, text, rows):
            text.release(self.store.read_newest(name))
        else:
            text.release([row if is_short(row) else None for row in rows])

    def _save_new(self, name: str, text: RecordedText, rows: Sequence[RecordedRow]) -> bool:
        """Save a text's new rows, given as they are saved, or count what they took if the store does
        not take them.
        """
        if rows and self._takes(name, text):
            self.store.append(name, rows, text.forwards)
            text.block_count += 1
            return True
        self._dropped_forwards.setdefault(name, Counter()).update(text.forwards)
        return False

    def _takes(self, name: str, text: RecordedText) -> bool:
        """Whether the store takes this text's new rows.

        A full one takes the rest of what it has a part of. Rows of a text that another loop has
        saved meanwhile have other places.
        """
        begun = text.block_count > 0
        return self.store.block_count(name) == text.block_count and (begun or not self.store.full)

    def forwards(self, sources: Iterable[Source]) -> dict[str, int]:
        """How many forwards were run for the rows of these sources, saved or dropped, by kind. Those
        of sources with one prompt count once.
        """
        if self.store is None:
            return {}
        names = list(set().union(*map(self._names_of, sources)))
        dropped = (self._dropped_forwards.get(name, Counter()) for name in names)
        return sum(dropped, Counter(self.store.forwards(names)))

    def has_dropped(self, source: Source) -> bool:
        """Whether rows of this source were recorded, and not saved."""
        return not self._names_of(source).isdisjoint(self._dropped_forwards)

    def _names_of(self, source: Source) -> set[str]:
        """The texts that this prompt has here: alone, and behind the prefixes that it was asked with."""
        alone = text_name(source)
        return {alone, *self._behind_prefix.get(alone, ())}


def is_short(row: RecordedRow) -> bool:
    """Whether the row is a state, not scores of a vocabulary."""
    return row.kind.startswith(STATE) or row.kind == HEAD_INPUT


def text_name(source: Source, prefix: Prefix | None = None) -> str:
    """A hash of the prompt, and of the keys and values before it."""
    digest = hashlib.sha256(str(source.prompt).encode())
    for tensor in (
        source.encoder_ids,
        *((prefix.keys, prefix.values, prefix.masks) if prefix is not None else ()),
    ):
        if tensor is not None:
            digest.update(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:24]


class RecordedSession(CachedSession):
    """A session over a recorded text: the same rows, counts and forwards as those of the model's
    own.
    """

    layers: RecordedLayers

    def extend(
        self, rows: Rows | Sequence[int] | Int[Tensor, " m"], output_spec: OutputSpec = ALL_LOGITS
    ) -> Scores:
        rows = as_rows(rows)
        inner = (
            rows.states is not None
            or output_spec.hidden
            or output_spec.fill
            or (output_spec.prompt and output_spec.head_input)
        )
        drafted = rows.position is not None
        if (
            inner
            or drafted != (output_spec.layers is not None)
            or (drafted and (rows.tree is not None or output_spec.head_input))
        ):
            raise UserError(NO_STATES)
        self.layers.cached = self._cached
        return super().extend(rows, output_spec)

    def commit_row(self, row: int, layers: Sequence[int]) -> None:
        raise UserError(NO_STATES)


class RecordedLayers(Layers):
    """What a session runs in place of a model's layers: the nodes of a recorded text, by the slots
    of a cache.

    Rows of the prompt have no nodes, and their scores are not asked for. Hidden states, which a
    session passes on from the first layers to the others, are empty here. cached: how many slots
    hold rows of the prefix and of the text.
    """

    def __init__(
        self,
        model: RecordedModel,
        name: str,
        text: RecordedText,
        source: Source,
        reserved: int,
    ) -> None:
        self.config, self.depth, self.device = model.config, model.depth, model.device
        # the model's own sessions say so
        self.supports_draft_vocab = (
            model.model.engine in ("kernels", "native") and not model.model.compiled
        )
        self.reserved = reserved
        self.source = 0 if source.encoder_ids is None else source.encoder_ids.shape[1]
        self.cached = reserved
        self._model, self._name, self._text = model, name, text
        self._first = reserved + len(source.prompt) - 1  # the first slot after the prompt
        self._nodes: list[RecordedNode] = []  # the nodes of the slots from there on
        self._drafted: list[int] = []  # tokens after the cached ones that ran through some layers

    def run(self, work: ForwardPass) -> Scores:
        tokens = work.tokens.tolist()
        hidden = (torch.empty(work.count, 0, device=self.device),) * len(work.hidden)
        if work.layers is not None and work.states is None:
            logits = self._run_part(tokens, work) if work.logits else None
            self._model.keep_within_memory(self._name, self._text)
            return Scores(logits, hidden=hidden)
        nodes = self._run_text(work.start, tokens, work.tree, work.head_input > 0)
        logits = self._stacked(nodes[-work.logits :], LOGITS) if nodes and work.logits else None
        head = (
            self._stacked(nodes[-work.head_input :], HEAD_INPUT)
            if nodes and work.head_input
            else None
        )
        self._model.keep_within_memory(self._name, self._text)
        return Scores(logits, head, hidden)

    def draft(self, start: int, tokens: Sequence[int], spec: DraftSpec) -> ChainResult | None:
        """A greedy chain, from each node's most likely token and its probability, which are
        computed once.
        """
        if (
            isinstance(spec, TreeSpec)
            or spec.temperature
            or not spec.stop_on_eos
            or spec.position is not None
            or spec.vocabulary
        ):
            return None
        feed, nodes, confidences = list(tokens), [], []
        progress = ChainProgress(spec)
        while not progress.ended:
            node = self._run_text(start, feed, None, False)[-1]
            start += len(feed)
            token, confidence = node.choice
            if spec.threshold is not None:
                confidences.append(confidence)
            if progress.add(token, confidence):
                nodes.append(node)
            feed = [token]
        drafted = [node.choice[0] for node in nodes]
        logits = self._stacked(nodes, LOGITS) if spec.keeps_probs and nodes else None
        self._model.keep_within_memory(self._name, self._text)
        return ChainResult(
            tokens=drafted,
            forwards=progress.forwards,
            fallback=progress.fallback,
            confidences=confidences,
            probs=None,
            unscaled_probs=None if logits is None else precise(logits).softmax(-1),
        )

    def gather(self, start: int, rows: Sequence[int], layers: Sequence[int] | None = None) -> None:
        first_node = start - self._first
        self._nodes[first_node:] = [self._nodes[first_node + row] for row in rows]

    def _node(self, slot: int) -> RecordedNode:
        return self._text.root if slot < self._first else self._nodes[slot - self._first]

    def _run_text(
        self, start: int, tokens: Sequence[int], tree: Tree | None, head: bool
    ) -> list[RecordedNode]:
        """The nodes of these rows of the text, without those of the prompt. tree: as in `ForwardPass`."""
        parents = None if tree is None else tree.parents.tolist()
        earlier = 0 if parents is None else len(parents) - len(tokens)
        trunk = self._node(start - earlier - 1)
        prompt = max(0, self._first - start)  # how many of these rows are the prompt's
        text_parents = None
        if parents is not None:
            places = [parent - earlier for parent in parents[earlier + prompt :]]
            text_parents = [
                place - prompt if place >= prompt else self._node(start + place) for place in places
            ]
        nodes = self._text.rows(trunk, tokens[prompt:], text_parents, head)
        self._nodes[max(0, start - self._first) :] = nodes
        return nodes

    def _run_part(self, tokens: Sequence[int], work: ForwardPass) -> Tensor:
        """Logits of rows of a view, which run through some layers after the text and are never
        kept.
        """
        cached = max(self.cached, self._first)
        self._drafted[work.start - cached :] = tokens
        # the first layers read nothing but tokens; others read rows that the whole model ran up to
        # the text's end
        layers, skipped = tuple(work.layers), work.skipped
        name = f"layers {','.join(map(str, layers))}"
        for block, left_out in (
            ("attention", skipped.attention),
            ("feed-forward", skipped.feed_forward),
        ):
            name += f" without {block} {','.join(map(str, sorted(left_out)))}" if left_out else ""
        reads_tokens_only = are_first_layers(layers, skipped)
        kinds = [
            name if reads_tokens_only else f"{name} {place} ahead"
            for place in range(len(self._drafted))
        ]
        output_spec = OutputSpec(layers=layers, skipped=skipped)
        nodes = self._text.drafted(self._node(cached - 1), self._drafted, output_spec, kinds)
        scored_nodes = list(zip(nodes, kinds, strict=True))[-work.logits :]
        return torch.cat([node.rows[kind] for node, kind in scored_nodes]).to(self.device)

    def _stacked(self, nodes: Sequence[RecordedNode], kind: str) -> Tensor:
        rows = (
            nodes[0].rows[kind]
            if len(nodes) == 1
            else torch.cat([node.rows[kind] for node in nodes])
        )
        return rows if self.device.type == "cpu" else rows.to(self.device)
