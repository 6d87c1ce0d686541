"""How passes run: one text's alone, or those of several texts as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import linear

from bild_lab.engine.models.cached_session import Pass
from bild_lab.engine.models.native import t5
from bild_lab.engine.models.native.cache import KeyValueCache
from bild_lab.engine.models.native.cpu import PackedDecoder, TextRows
from bild_lab.engine.models.native.side_by_side import CachesTogether, SourcesTogether, side_by_side
from bild_lab.engine.session import Scores

if TYPE_CHECKING:
    from bild_lab.engine.models.native.layers import NativeLayers

Work = tuple["NativeLayers", Pass]


def run_alone(layers: NativeLayers, work: Pass) -> Scores:
    """A pass by PyTorch."""
    decoder, rows = layers.decoder, layers.placed(work)
    x = layers.embed(work) if work.states is None else work.states
    chosen = range(layers.depth) if work.layers is None else work.layers
    if work.fill:
        decoder.fill(x, rows, layers.cache, chosen)
        return Scores(None)
    states: list[Tensor] | None = [x] if work.hidden else None
    if len(chosen):
        x = decoder.run(x, rows, layers.cache, *layers.memory, layers=chosen, hidden=states, skipped=work.skipped)
    hidden = layers.hidden_of(work, states)
    if not work.read:
        return Scores(None, hidden=hidden)
    head_input = decoder.final(x[-work.read :])
    logits = linear(head_input[-work.logits :], decoder.head) if work.logits else None
    return Scores(logits, head_input, hidden)


def run_rows(works: Sequence[Work]) -> list[Scores]:
    """Passes of several texts through the same layers, by PyTorch: matrix products over all rows at once."""
    if len(works) == 1:
        return [run_alone(*works[0])]
    (first, one), decoder = works[0], works[0][0].decoder
    pool, places = first.cache.pool, [layers.cache.place for layers, _ in works]
    rows = side_by_side([layers.placed(work) for layers, work in works], places, first.device)
    caches = CachesTogether(pool)
    x = torch.cat([layers.embed(work) if work.states is None else work.states for layers, work in works])
    chosen = range(first.depth) if one.layers is None else one.layers
    if one.fill:
        decoder.fill(x, rows, caches, chosen)
        return [Scores(None)] * len(works)
    memory = ()
    if first.memory:
        memory = (SourcesTogether(pool, rows.packing, [layers.source for layers, _ in works]),)
    states: list[Tensor] | None = [x] if one.hidden else None
    if len(chosen):
        x = decoder.run(x, rows, caches, *memory, layers=chosen, hidden=states, skipped=one.skipped)
    counts = [work.count for _, work in works]
    heads = torch.cat(
        [part[part.shape[0] - work.read :] for part, (_, work) in zip(x.split(counts), works, strict=True)]
    )
    final = decoder.final(heads) if heads.shape[0] else None
    logits = None if final is None else linear(final, decoder.head)
    parts = [None] * len(works) if states is None else zip(*(state.split(counts) for state in states), strict=True)
    return _shared_out(works, logits, final, parts)


def run_packed(works: Sequence[Work]) -> list[Scores]:
    """Passes of one or several texts through the same layers, by the CPU kernels.

    Logits and hidden states are float32 whatever the precision of the weights.
    """
    first, one = works[0]
    texts = []
    for layers, work in works:
        texts.append(layers.behind(work.start, work.count, work.read, work.tree))
        layers.place(first.packed, work.start + work.count)
    tokens = joined([work.tokens for _, work in works])
    states = None if one.states is None else joined([work.states for _, work in works])
    found = first.packed.run(
        tokens,
        texts,
        states=states,
        masks=first.masks,
        reads=any(work.head_input for _, work in works),
        layers=one.layers,
        hidden=bool(one.hidden),
        fill=one.fill,
        skipped=one.skipped,
    )
    parts: Any = [None] * len(works)
    if one.hidden:
        before = joined([layers.embed(work) for layers, work in works]) if states is None else states
        every = [before.float(), *found.hidden]
        parts = zip(*(state.split([work.count for _, work in works]) for state in every), strict=True)
    head = None if found.head_input is None else found.head_input.to(first.cache.keys.dtype)
    return _shared_out(works, found.logits, head, parts)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """These rows behind one another."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _shared_out(
    works: Sequence[Work], logits: Tensor | None, head_input: Tensor | None, states: Iterable[Any]
) -> list[Scores]:
    """What each text gets of a pass. logits, head_input: of all read rows. states: of each text, after each layer."""
    scores, first = [], 0
    for (layers, work), own in zip(works, states, strict=True):
        hidden, last = layers.hidden_of(work, own), first + work.read
        read = None if head_input is None else head_input[first:last]
        scores.append(Scores(logits[last - work.logits : last] if work.logits else None, read, hidden))
        first = last
    return scores


def run_program(
    program: Callable[..., list[Any]], works: Sequence[tuple[NativeLayers, int, Sequence[int], Any]]
) -> list[Any]:
    """Chains or trees of one or several texts, by a program of the CPU kernels."""
    texts = [layers.behind(start, len(tokens)) for layers, start, tokens, _ in works]
    return program([tokens for _, _, tokens, _ in works], texts, [ask for *_, ask in works])


def encoded(decoder: t5.T5Decoder, encoder: PackedDecoder, sources: Sequence[Int[Tensor, " s"]]) -> list[t5.Memory]:
    """The cross-attention keys and values of one or several sources, by the CPU kernels."""
    _, heads, dim = decoder.cache_shape
    texts = []
    for tokens in sources:
        rows = KeyValueCache((encoder.depth, heads, len(tokens), dim), decoder.embedding.dtype, tokens.device)
        texts.append(TextRows(len(tokens), 0, rows, scored=len(tokens)))
    found = encoder.run(joined(sources), texts).logits
    return [decoder.memory(each) for each in found.split([len(tokens) for tokens in sources])]
