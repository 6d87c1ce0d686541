"""A model whose sessions serve what it has scored before, and run it where a text is new."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import greenlet
import torch
from jaxtyping import Int
from torch import Tensor

from bild_lab.engine.models.native.layers import KERNEL_ROWS
from bild_lab.engine.models.processed_session import processed
from bild_lab.engine.record.store import Store
from bild_lab.engine.record.text import HEAD_INPUT, LOGITS, Node, RecordedText
from bild_lab.engine.request import Source
from bild_lab.engine.sampling import precise
from bild_lab.engine.session import (
    EVERYTHING,
    Chain,
    DraftedChain,
    Growth,
    LoadedModel,
    Prefix,
    Rows,
    Scores,
    Session,
    Want,
    as_rows,
)
from bild_lab.engine.trace import Forward
from bild_lab.errors import UserError

NO_STATES = "a record holds what a model scores, and this method reads states inside it; measure it with run.py instead"


class RecordedModel:
    """A loaded model behind the same protocol, with a memory of every row that it has scored.

    A record is exact for methods that decide by scores and draw no random numbers. store: where rows are kept on disk;
    None: in memory alone. memory_bytes: of saved rows that stay in memory too. All else, such as the checkpoint, is the
    model's own.
    """

    def __init__(self, model: LoadedModel, store: Store | None = None, memory_bytes: float = 0) -> None:
        self.model, self.store = model, store
        self.config, self.depth = model.checkpoint.config, model.depth  # once: Transformers copies a configuration
        self._memory_bytes, self._held = memory_bytes, 0
        self._texts: dict[str, RecordedText] = {}
        self._used: dict[Any, set[str]] = {}  # by the loops of texts that decode at once, the texts that they ask

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @torch.inference_mode()
    def start(
        self,
        source: Source,
        room: int,
        forwards: list[Forward] | None = None,
        target: Session | None = None,
        prefix: Prefix | None = None,
    ) -> Session:
        name = text_name(source, prefix)
        self._used.setdefault(greenlet.getcurrent(), set()).add(name)
        plain = replace(source, processors=None)  # rows are kept as the model gives them
        if name not in self._texts:
            blocks = [] if self.store is None else self.store.read(name)
            self._texts[name] = RecordedText(
                len(source.prompt) - 1,
                self.model.device,
                lambda: self.model.start(plain, room, None, None, prefix),
                blocks,
            )
        session = RecordedSession(self, self._texts[name], plain, [] if forwards is None else forwards, prefix)
        return processed(session, source)

    def save(self) -> None:
        """Save the new rows of the texts that the caller asked for: in a batch, those of its own example.

        Two loops must not ask for one text at a time. Texts stay in memory until they are more than `memory_bytes`;
        then they are read again.
        """
        for name in self._used.pop(greenlet.getcurrent(), ()):
            text = self._texts[name]
            text.close()
            if text.new and self.store is not None:
                self.store.append(name, text.saved, text.new, text.forwards)
                self._held += text.forget_new()
        if self.store is not None and self._held > self._memory_bytes:
            used = set().union(*self._used.values())
            self._texts = {name: text for name, text in self._texts.items() if name in used}
            self._held = 0

    def forwards(self, sources: Iterable[Source]) -> dict[str, int]:
        """How many forwards were run for the saved rows of these sources, by kind."""
        return {} if self.store is None else self.store.forwards([text_name(source) for source in sources])


def text_name(source: Source, prefix: Prefix | None = None) -> str:
    """A hash of the prompt, and of the keys and values before it."""
    digest = hashlib.sha256(str(source.prompt).encode())
    for part in (source.encoder_ids, *((prefix.keys, prefix.values, prefix.masks) if prefix is not None else ())):
        if part is not None:
            digest.update(part.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:24]


class RecordedSession:
    """A session over a recorded text: the same rows, counts and forwards as those of the model's own."""

    def __init__(
        self, model: RecordedModel, text: RecordedText, source: Source, forwards: list[Forward], prefix: Prefix | None
    ) -> None:
        self._text, self.forwards, self._device = text, forwards, model.device
        self._rows: list[Node] = []  # cached behind the prompt, in order
        self._base = 0  # of the last extend, or the tree, the first row
        self._drafted: list[int] = []  # tokens behind the cached ones that ran through some layers
        self._start = self._pending = len(source.prompt) - 1
        self._counted = Counted(model, source, forwards, 0 if prefix is None else prefix.length)

    @property
    def length(self) -> int:
        return self._start + len(self._rows)

    def extend(self, rows: Rows | Sequence[int] | Int[Tensor, " m"], want: Want = EVERYTHING) -> Scores:
        rows = as_rows(rows)
        if rows.states is not None or want.hidden or want.fill or want.prompt:
            raise UserError(NO_STATES)
        tokens = rows.tokens.tolist() if isinstance(rows.tokens, Tensor) else list(rows.tokens)
        if rows.position is not None or want.layers is not None:
            return self._draft_rows(tokens, rows, want)
        cached, above, earlier = self._rows, None, 0
        if rows.tree is not None:
            parents = rows.tree.parents.tolist()
            earlier = len(parents) - len(tokens)
        self._base = len(cached) - earlier
        trunk = cached[self._base - 1] if self._base else self._text.root
        if rows.tree is not None:
            ran = [trunk, *cached[self._base :]]
            above = [ran[one + 1] if one < earlier else one - earlier for one in parents[earlier:]]
        nodes = self._text.rows(trunk, tokens, above, want.head_input)
        wanted = nodes if want.logits is None else nodes[len(nodes) - want.logits :]
        self._counted.text(self.length, tokens, len(wanted), rows.tree is None)
        cached += nodes
        head = self._stacked(wanted, HEAD_INPUT) if want.head_input else None
        return Scores(self._stacked(wanted, LOGITS) if wanted else None, head)

    def until_saturated(self, token: int, bar: float) -> None:
        """A record has no states inside the model."""

    def draft(self, rows: Sequence[int], chain: Chain) -> DraftedChain | None:
        """A greedy chain, from each node's likeliest token and its probability, which are computed once."""
        blind = chain.threshold is None and self._device.type != "cpu"  # drafts behind an end token too
        if chain.temperature or blind or not chain.plain or chain.position is not None:
            return None
        feed, nodes, confidences, fallback = list(rows), [], [], False
        while len(nodes) < chain.steps and not (nodes and feed[0] in chain.end_tokens):
            node = self._next(feed)
            token, confidence = node.choice
            if chain.threshold is not None:
                confidences.append(confidence)
                if fallback := confidence < chain.threshold:
                    break
            nodes.append(node)
            feed = [token]
        own = self._stacked(nodes, LOGITS) if chain.keeps_probs and nodes else None
        return DraftedChain(
            tokens=[node.choice[0] for node in nodes],
            forwards=len(nodes) + fallback,
            fallback=fallback,
            confidences=confidences,
            probs=None,
            own_probs=None if own is None else precise(own).softmax(-1),
        )

    def _next(self, tokens: list[int]) -> Node:
        """Run the text's next rows. Returns the last one."""
        nodes = self._text.rows(self._rows[-1] if self._rows else self._text.root, tokens, None, False)
        self._counted.text(self.length, tokens, 1, True)
        self._rows += nodes
        return nodes[-1]

    def grow(self, rows: Sequence[int], growth: Growth) -> None:
        """Level by level."""

    def keep(self, path: Sequence[int]) -> None:
        self._rows[self._base :] = [self._rows[self._base + row] for row in path]

    def rollback(self, length: int) -> None:
        del self._rows[max(0, length - self._start) :]
        self._drafted.clear()
        self._counted.started = None

    def prefill(self) -> None:
        self._counted.prefill()

    def adopt(self, row: int, layers: Sequence[int]) -> None:
        raise UserError(NO_STATES)

    def _draft_rows(self, tokens: list[int], rows: Rows, want: Want) -> Scores:
        """Rows of a view, which run through some layers behind the text and are never kept."""
        if rows.position is None or rows.tree is not None or want.layers is None or want.head_input:
            raise UserError(NO_STATES)
        layers, ahead = tuple(want.layers), rows.position - self.length
        self._drafted[ahead:] = tokens
        # the first layers read nothing but tokens; others read rows that the whole model ran up to the text's end
        skipped = want.skipped
        first = not skipped and layers == tuple(range(len(layers)))
        name = f"layers {','.join(map(str, layers))}"
        for block, left_out in (("attention", skipped.attention), ("feed-forward", skipped.feed_forward)):
            name += f" without {block} {','.join(map(str, sorted(left_out)))}" if left_out else ""
        kinds = [name if first else f"{name} {place} ahead" for place in range(len(self._drafted))]
        trunk = self._rows[-1] if self._rows else self._text.root
        nodes = self._text.drafted(trunk, self._drafted, Want(layers=layers, skipped=skipped), kinds)
        count = len(tokens) if want.logits is None else want.logits
        self._counted.drafted(self.length, ahead, tokens, first, Want(layers=layers, skipped=skipped), count)
        chosen = list(zip(nodes, kinds, strict=True))[len(nodes) - count :]
        return Scores(torch.cat([node.rows[kind] for node, kind in chosen]).to(self._device))

    def _stacked(self, nodes: Sequence[Node], kind: str) -> Tensor:
        found = nodes[0].rows[kind] if len(nodes) == 1 else torch.cat([node.rows[kind] for node in nodes])
        return found if self._device.type == "cpu" else found.to(self._device)


class Counted:
    """The forwards that a session of the model itself would have run, for their costs.

    started: the drafted tokens that ran through the first layers, and how many those are (BiLD §4.4).
    """

    def __init__(self, model: RecordedModel, source: Source, forwards: list[Forward], reserved: int) -> None:
        self._config, self._depth, self._forwards, self._reserved = (
            model.checkpoint.config,
            model.depth,
            forwards,
            reserved,
        )
        self._source = 0 if source.encoder_ids is None else source.encoder_ids.shape[1]
        self._pending = len(source.prompt) - 1
        self._longest_joined = KERNEL_ROWS if model.engine == "kernels" else None
        self.started: tuple[list[int], int] | None = None
        if self._source:
            self._add(self._source, -reserved, 0, encoder=True)

    def prefill(self) -> None:
        if self._pending:
            self._add(self._pending, 0, 1)
            self._pending = 0

    def text(self, cached: int, tokens: list[int], scored: int, chain: bool) -> None:
        """Rows of the text. Those that ran through the first layers as a draft run through the others only."""
        if self._longest_joined is not None and self._pending > self._longest_joined:
            self.prefill()
        waiting, self._pending = self._pending, 0
        count, start = waiting + len(tokens), cached - waiting
        started, self.started = self.started, None
        same = shared(started[0], tokens) if started is not None and chain and not waiting else 0
        if not same:
            self._add(count, start, scored)
            return
        first = started[1]
        if same < count:
            self._add(count - same, start + same, 0, layers=first)
        self._add(count, start, scored, layers=self._depth - first, first_layer=first)

    def drafted(self, cached: int, ahead: int, tokens: list[int], first: bool, part: Want, scored: int) -> None:
        """Drafted rows. first: whether these are the first layers, whole. part: what they run through."""
        self.prefill()
        self._add(
            len(tokens),
            cached + ahead,
            scored,
            layers=(layers := len(part.layers)),
            skipped_attention=len(part.skipped.attention),
            skipped_feed_forward=len(part.skipped.feed_forward),
        )
        if not first:
            return
        before = self.started
        if ahead == 0:
            self.started = (tokens, layers)
        elif before is None or before[1] != layers or len(before[0]) < ahead:
            self.started = None
        else:
            self.started = ([*before[0][:ahead], *tokens], layers)

    def _add(self, rows: int, cached: int, scored: int, **others: Any) -> None:
        self._forwards.append(Forward(self._config, rows, self._reserved + cached, scored, self._source, **others))


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(one), len(other)))
