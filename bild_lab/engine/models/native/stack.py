"""The layers of a decoder or an encoder: their weights, and how rows run through them by PyTorch.

T5 and the Llama family differ in what their layers have, not in how these run. `cpu/forward.h` does
the same in C++.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import RLock
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, cat
from torch.nn.functional import gelu, linear, relu, silu

from bild_lab.engine.draft_vocabulary import DraftVocabulary
from bild_lab.engine.models.checkpoint.weights import OnDemand
from bild_lab.engine.models.native.attention import KeyValueCache, normalize
from bild_lab.engine.models.placed_rows import PlacedRows
from bild_lab.engine.session import NOTHING, Skipped

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # in the order of `cpu/vectors.h`
    "relu": relu,
    "silu": silu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "gelu": gelu,
}
# held where tables that depend on the position alone grow: the texts of other threads read them
GROWING = RLock()


# a matrix, [out, in]: numbers; or several that lie one after the other, packed as in a GGUF file
# (`PackedTensor`), for the kernels, or rounded, for PyTorch's (`QuantizedMatrix`) or Triton's
# (`BlockMatrix`)
StoredMatrix = Tensor | tuple[Any, ...]


@dataclass(frozen=True)
class Weight:
    """A linear layer, and a bias. gated: the first half of the outputs gates the other half."""

    matrix: StoredMatrix
    bias: Float[Tensor, " out"] | None = None
    gated: bool = False

    def __call__(self, x: Float[Tensor, "m in"]) -> Float[Tensor, "m out"]:
        return product(x, self.matrix, self.bias)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer's weights. Query, key and value are one matrix, so are gate and up.

    head_norm: of each query and key head.
    out_norm, feed_out_norm: of what a block adds to the residual stream.
    cross_norm, cross_query, cross_out: of attention to a source.
    window: how many positions back a row sees, 0 for all.
    kind: which of the stack's views its rows have.
    """

    norm: Float[Tensor, " dim"]
    qkv: Weight
    out: Weight
    feed_norm: Float[Tensor, " dim"]
    inner: Weight
    outer: Weight
    head_norm: Float[Tensor, "heads_and_kv_heads head_dim"] | None = None
    out_norm: Float[Tensor, " dim"] | None = None
    feed_out_norm: Float[Tensor, " dim"] | None = None
    cross_norm: Float[Tensor, " dim"] | None = None
    cross_query: Weight | None = None
    cross_out: Weight | None = None
    window: int = 0
    kind: int = 0

    @property
    def weights(self) -> dict[str, Weight]:
        """Its matrices, by their names here."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Weight)}

    def with_matrices(self, matrices: Mapping[str, StoredMatrix]) -> Layer:
        """The layer with these matrices in place of its own."""
        weights = self.weights
        return replace(
            self,
            **{name: replace(weights[name], matrix=matrix) for name, matrix in matrices.items()},
        )


class AttentionView(NamedTuple):
    """How rows attend in layers of one kind: their rotation, and a mask as in
    `attention.attend`.
    """

    cos: Float[Tensor, "m 1 head_dim"] | None = None
    sin: Float[Tensor, "m 1 head_dim"] | None = None
    mask: Tensor | None = None


@dataclass(kw_only=True, eq=False)
class Stack:
    """Runs rows through any range of layers. There is no batch axis: one sequence, [m, dim].

    hidden: inner width of the feed-forward.
    activation: one of ACTIVATIONS.
    scale: of attention scores.
    final_scale: of what the head reads.
    head_bias: added to the head's scores.
    distance_bias: added to a score by the query's position minus the key's, the last for all
        beyond.
    bidirectional: an encoder, whose rows see all others; its distance_bias begins with the key that
        is farthest ahead.
    """

    layers: Sequence[Layer]
    embedding: Float[Tensor, "vocab dim"]
    read_head: Callable[[], Float[Tensor, "vocab dim"]]
    final_norm: Float[Tensor, " dim"]
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    activation: str
    epsilon: float
    scale: float = 1.0
    final_scale: float = 1.0
    embedding_scale: float = 1.0
    head_bias: Float[Tensor, " vocab"] | None = None
    distance_bias: Float[Tensor, "heads distances"] | None = None
    bidirectional: bool = False

    @property
    def head(self) -> StoredMatrix:
        """The matrix to the vocabulary; read anew without preloaded layers."""
        return self.read_head()

    def scores(
        self, states: Float[Tensor, "m dim"], vocabulary: DraftVocabulary | None = None
    ) -> Float[Tensor, "m vocab"]:
        """The head's scores of its input. vocabulary: the other tokens get −inf; None: of all."""
        if vocabulary is None:
            return product(states, self.head, self.head_bias)
        if vocabulary.covers_most_of(self.embedding.shape[0]):
            return vocabulary.masked(product(states, self.head))
        draft_scores = linear(
            states,
            vocabulary.cached_for(
                self, lambda: numbers_of(self.head, states.dtype)[vocabulary.tokens]
            ),
        )
        return vocabulary.widened(draft_scores, self.embedding.shape[0], float("-inf"))

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Layers, heads and width of the cache."""
        return len(self.layers), self.kv_heads, self.head_dim

    def embed(self, tokens: Int[Tensor, " m"]) -> Float[Tensor, "m dim"]:
        x = self.embedding[tokens]
        return x if self.embedding_scale == 1.0 else x * self.embedding_scale

    def run(
        self,
        x: Float[Tensor, "m dim"],
        rows: PlacedRows,
        cache: KeyValueCache,
        memory: Any = None,
        *,
        layers: Sequence[int],
        hidden: list[Tensor] | None = None,
        skipped: Skipped = NOTHING,
    ) -> Float[Tensor, "m dim"]:
        """Run rows through these layers, storing their keys and values.

        memory: of the source, for layers that attend to one. `hidden` collects each layer's output.
        """
        views = self.views(rows, layers)
        for index in layers:
            layer = self.layers[index]
            if index not in skipped.attention:
                view = views[layer.kind]
                queries, keys, values = self.project(x, layer, view)
                cache.write(index, rows, keys, values)
                mixed = cache.attend(index, rows, queries, view.mask, self.scale)
                x = self._add(x, layer.out(mixed), layer.out_norm)
                if layer.cross_query is not None:
                    queries = layer.cross_query(normalize(x, layer.cross_norm, self.epsilon))
                    queries = queries.view(rows.count, self.heads, self.head_dim)
                    x = x + layer.cross_out(memory.attend(index, queries))
            if index not in skipped.feed_forward:
                x = self.feed_forward(x, layer)
            if hidden is not None:
                hidden.append(x)
        return x

    def fill(
        self,
        x: Float[Tensor, "m dim"],
        rows: PlacedRows,
        cache: KeyValueCache,
        layers: Sequence[int],
    ) -> None:
        """Store only the keys and values of these layers, with x, [m, dim], as the input of each
        layer.
        """
        views = self.views(rows, layers, masked=False)
        query_width = self.heads * self.head_dim
        for index in layers:
            layer = self.layers[index]
            normed = normalize(x, layer.norm, self.epsilon)
            matrix, bias = layer.qkv.matrix, layer.qkv.bias
            if isinstance(matrix, Tensor):
                own_bias = None if bias is None else bias[query_width:]
                keys_values = linear(normed, matrix[query_width:], own_bias)
            else:
                keys_values = layer.qkv(normed)[:, query_width:]
            keys, values = keys_values.view(rows.count, 2, self.kv_heads, self.head_dim).unbind(1)
            keys = self._turned(keys, layer, views[layer.kind], first_head=self.heads)
            cache.write(index, rows, keys, values)

    def final(self, x: Float[Tensor, "m dim"]) -> Float[Tensor, "m dim"]:
        """The head's input: the last layer's output after the final norm, scaled in T5 v1.0."""
        x = normalize(x, self.final_norm, self.epsilon)
        return x if self.final_scale == 1.0 else x * self.final_scale

    def project(
        self, x: Float[Tensor, "m dim"], layer: Layer, view: AttentionView
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [m, heads, head_dim] each."""
        qkv = layer.qkv(normalize(x, layer.norm, self.epsilon)).view(x.shape[0], -1, self.head_dim)
        both = self.heads + self.kv_heads
        turned = qkv if view.cos is None else self._turned(qkv[:, :both], layer, view)
        return turned[:, : self.heads], turned[:, self.heads : both], qkv[:, both:]

    def feed_forward(self, x: Float[Tensor, "m dim"], layer: Layer) -> Float[Tensor, "m dim"]:
        """The residual stream after a layer's feed-forward."""
        inner = layer.inner(normalize(x, layer.feed_norm, self.epsilon))
        activate = ACTIVATIONS[self.activation]
        if layer.inner.gated:
            gate, up = inner.chunk(2, -1)
            return self._add(x, layer.outer(activate(gate) * up), layer.feed_out_norm)
        return self._add(x, layer.outer(activate(inner)), layer.feed_out_norm)

    @abstractmethod
    def views(
        self, rows: PlacedRows, layers: Sequence[int], masked: bool = True
    ) -> dict[int, AttentionView]:
        """For each kind among these layers, how the rows attend. masked: with masks; else rotations
        alone.
        """

    @property
    def tables(self) -> list[Tensor]:
        """What compiled steps read and `reach` replaces."""
        return []

    def reach(self, positions: int) -> None:
        """Compute what depends on the position alone, for at least this many positions, unless it
        exists.
        """

    def _turned(
        self,
        x: Float[Tensor, "m heads head_dim"],
        layer: Layer,
        view: AttentionView,
        first_head: int = 0,
    ) -> Float[Tensor, "m heads head_dim"]:
        """Queries and keys with norm and rotation, if they have any. first_head: the number of the
        first of these heads.
        """
        if view.cos is None:
            return x
        if layer.head_norm is not None:
            x = normalize(x, layer.head_norm[first_head:], self.epsilon)
        return rotate(x, view.cos, view.sin)

    def _add(
        self,
        x: Float[Tensor, "m dim"],
        block: Float[Tensor, "m dim"],
        norm: Float[Tensor, " dim"] | None,
    ) -> Float[Tensor, "m dim"]:
        """The residual sum."""
        return x + (block if norm is None else normalize(block, norm, self.epsilon))


def numbers_of(matrix: StoredMatrix, dtype: torch.dtype) -> Float[Tensor, "out in"]:
    """A matrix, unpacked."""
    matrices = matrix if isinstance(matrix, tuple) else (matrix,)
    numbers = [
        stored if isinstance(stored, Tensor) else stored.numbers(dtype) for stored in matrices
    ]
    return numbers[0] if len(numbers) == 1 else cat(numbers)


def product(
    x: Float[Tensor, "m in"],
    matrix: StoredMatrix,
    bias: Float[Tensor, " out"] | None = None,
) -> Float[Tensor, "m out"]:
    """A linear layer's outputs."""
    if isinstance(matrix, Tensor):  # the hot path
        return linear(x, matrix, bias)
    if any(is_rounded(stored) for stored in matrix):
        out = cat([product_of(x, stored) for stored in matrix], -1)
        return out if bias is None else out + bias
    return linear(x, numbers_of(matrix, x.dtype), bias)


def product_of(x: Float[Tensor, "m in"], stored: Any) -> Float[Tensor, "m out"]:
    """The outputs of one of the matrices that lie one after the other in a `Weight`."""
    if is_rounded(stored):
        return stored.product(x)
    return linear(x, numbers_of(stored, x.dtype))


def is_rounded(stored: Any) -> bool:
    """Whether this matrix of a `Weight` has a product of its own, as `QuantizedMatrix` and
    `BlockMatrix` do.
    """
    return hasattr(stored, "product")


def layers_of(count: int, make: Callable[[int], Layer], preload: bool) -> Sequence[Layer]:
    """The layers. preload: read all now; else each is read from the weights whenever it is asked
    for.
    """
    return [make(index) for index in range(count)] if preload else OnDemand(count, make)


def reader(make: Callable[[], Tensor], preload: bool) -> Callable[[], Tensor]:
    """What gives a weight. preload: read it now, once; else it is read anew at each call."""
    if not preload:
        return make
    weight = make()
    return lambda: weight


def rotate(
    x: Float[Tensor, "m heads dim"], cos: Float[Tensor, "m 1 dim"], sin: Float[Tensor, "m 1 dim"]
) -> Float[Tensor, "m heads dim"]:
    """Rotary position embedding.

    Rolling by half the width swaps the halves; `signed_sines` have the sign that this needs.
    """
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def signed_sines(sin: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
    """Sines as `rotate` takes them: negative in the first half."""
    half = sin.shape[-1] // 2
    return torch.cat([-sin[..., :half], sin[..., half:]], -1)
