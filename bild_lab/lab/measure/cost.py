"""Operations and memory traffic from recorded forwards (BiLD §7.3.1, Figure 8).

FLOPs: 2·m·k·n for every product of [m, k] and [k, n]: with weights, the head for scored rows; in
attention Q·Kᵀ and A·V over the whole rectangle of rows and keys, as kernels compute it; in the
encoder's forward also the cross-attention keys and values of all decoder layers. Each forward
counts the layers that it runs, and of these the parts.

Bytes moved (the paper's memory operations), if all values have one width: every weight matrix once
per forward, the head only if rows were scored, one row of the embedding per token; the input and
output of every product with weights (query, key and value are one, gate and up too), with which
keys and values enter the cache; attention as one fused kernel.

Not counted: biases, norms, activation functions, residual sums, softmax, positions, masks, copies
within the cache, and the choice of tokens. With a sliding window a row counts at most as many keys
as the window has, each read once; kernels that mask keys outside, and compiled steps of padded
shapes, compute and read more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from transformers import PreTrainedConfig

from bild_lab.engine.models.native import llama, t5
from bild_lab.engine.trace import Forward
from bild_lab.errors import UserError


@dataclass(frozen=True)
class Cost:
    """Operations and memory traffic of one or more forwards."""

    flops: int = 0
    bytes_moved: int = 0

    @property
    def intensity(self) -> float | None:
        """Arithmetic intensity in FLOPs per byte; None if nothing ran."""
        return self.flops / self.bytes_moved if self.bytes_moved else None

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes_moved + other.bytes_moved)


class Work(NamedTuple):
    """What a part of a forward takes. values: how many numbers it moves."""

    flops: int
    values: int


@dataclass(frozen=True)
class Matrices:
    """A group of weight matrices. values: the number of weights. ends: input and output activations
    per row.
    """

    values: int
    ends: int

    def work(self, rows: int) -> Work:
        return Work(2 * rows * self.values, self.values + rows * self.ends)

    def without(self, matrices: Matrices) -> Matrices:
        """The group without these, which are part of it."""
        return Matrices(self.values - matrices.values, self.ends - matrices.ends)


@dataclass(frozen=True)
class Dimensions:
    """Everything that a model's cost depends on."""

    dim: int
    query_width: int  # of all heads together
    cache_width: int  # keys and values of one token in one layer
    layers: Matrices  # of all decoder layers
    feed_forward: Matrices  # of their feed-forward blocks alone
    filling: Matrices  # the key and value matrices of one layer
    # the most keys that a row attends to, each with the number of decoder layers for which this
    # holds
    windows: tuple[tuple[float, int], ...]
    head: Matrices
    cross_layers: int = 0  # decoder layers that attend to the source
    encoder: Matrices = Matrices(0, 0)  # of all encoder layers
    encoder_layers: int = 0
    memory: Matrices = Matrices(0, 0)  # the cross-attention keys and values of all decoder layers

    @property
    def weights(self) -> int:
        """Numbers in all weight matrices except the embedding."""
        return self.layers.values + self.head.values + self.encoder.values + self.memory.values

    def share_with(self, vocabulary: int) -> float:
        """The part of a forward's weights that it reads where its head has so many tokens."""
        unread = self.head.values - self.dim * vocabulary
        return 1 - unread / (self.layers.values + self.head.values)

    def work(self, forward: Forward) -> Work:
        """What a whole forward takes."""
        terms = self._encoder_work(forward) if forward.encoder else self._decoder_work(forward)
        embedded = 0 if forward.first_layer else forward.rows * self.dim
        flops = sum(term.flops for term in terms)
        return Work(flops, embedded + sum(term.values for term in terms))

    def _encoder_work(self, forward: Forward) -> list[Work]:
        rows = forward.rows
        attention = self._attention_work(self.encoder_layers, rows, rows, rows)
        return [self.encoder.work(rows), attention, self.memory.work(rows)]

    def _decoder_work(self, forward: Forward) -> list[Work]:
        rows, source, keys = forward.rows, forward.source, forward.cached + forward.rows
        attention_terms = [self.layers.without(self.feed_forward).work(rows)]
        for window, layers in self.windows:
            keys_of_all_rows = min(keys, window + rows - 1)
            attention_terms.append(
                self._attention_work(layers, rows, min(keys, window), keys_of_all_rows)
            )
        attention_terms.append(self._attention_work(self.cross_layers, rows, source, source))
        depth = sum(layers for _, layers in self.windows)
        ran = depth if forward.layers is None else forward.layers
        # layers with different windows count as their average
        attention_layers = ran - forward.skipped_attention
        feed_forward_layers = ran - forward.skipped_feed_forward
        terms = [_share(term, attention_layers, depth) for term in attention_terms]
        terms.append(_share(self.feed_forward.work(rows), feed_forward_layers, depth))
        terms += [self.filling.work(rows)] * forward.filled_layers
        if forward.scored:
            terms.append(self._head_of(forward).work(forward.scored))
        return terms

    def _head_of(self, forward: Forward) -> Matrices:
        """The head, with as many tokens as the forward scores."""
        tokens = forward.vocabulary
        return self.head if tokens is None else Matrices(self.dim * tokens, self.dim + tokens)

    def _attention_work(self, layers: int, rows: int, seen: int, read: int) -> Work:
        """Attention of these rows. seen: keys that each row attends to. read: keys that all rows
        together read.
        """
        flops = 4 * rows * seen * self.query_width
        values = 2 * rows * self.query_width + read * self.cache_width
        return Work(layers * flops, layers * values)


def _share(work: Work, layers: int, depth: int) -> Work:
    """The work of so many layers, given that of all."""
    return Work(work.flops * layers // depth, work.values * layers // depth)


def has_cost_model(config: PreTrainedConfig) -> bool:
    """Whether the cost of this architecture is known."""
    return config.model_type in _FAMILIES


def dimensions(config: PreTrainedConfig) -> Dimensions:
    """The dimensions of a model. Raises UserError for an architecture whose cost is not known."""
    if not has_cost_model(config):
        raise UserError(
            f"FLOPs and bytes are known for {', '.join(_FAMILIES)}, got {config.model_type}; "
            "ask for no cost of this model"
        )
    return _FAMILIES[config.model_type](config)


def total_cost(forwards: Iterable[Forward], bytes_per_value: int) -> Cost:
    """The cost of all forwards, of any models. Raises UserError for an unknown architecture."""
    sizes: dict[int, Dimensions] = {}  # keyed by the id of a configuration, as each is one model
    spent = Cost()
    for forward in forwards:
        if id(forward.config) not in sizes:
            sizes[id(forward.config)] = dimensions(forward.config)
        flops, values = sizes[id(forward.config)].work(forward)
        spent += Cost(flops, bytes_per_value * values)
    return spent


def _matrices(count: int, *shapes: tuple[int, int]) -> Matrices:
    """`count` times the matrices of these shapes, each [inputs, outputs]."""
    return Matrices(count * sum(k * n for k, n in shapes), count * sum(k + n for k, n in shapes))


def _t5_dimensions(config: PreTrainedConfig) -> Dimensions:
    dim, layers = config.d_model, config.num_decoder_layers
    width, hidden = config.num_heads * config.d_kv, config.d_ff
    self_attention = [(dim, 3 * width), (width, dim)]
    cross = [(dim, width), (width, dim)]
    feed_forward = [(dim, 2 * hidden if config.is_gated_act else hidden), (hidden, dim)]
    return Dimensions(
        dim=dim,
        query_width=width,
        cache_width=2 * width,
        layers=_matrices(layers, *self_attention, *cross, *feed_forward),
        feed_forward=_matrices(layers, *feed_forward),
        filling=_matrices(1, (dim, 2 * width)),
        windows=((math.inf, layers),),
        head=_matrices(1, (dim, config.vocab_size)),
        cross_layers=layers,
        encoder=_matrices(config.num_layers, *self_attention, *feed_forward),
        encoder_layers=config.num_layers,
        memory=_matrices(1, (dim, layers * 2 * width)),
    )


def _llama_dimensions(config: PreTrainedConfig) -> Dimensions:
    dim, hidden, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    head_dim = llama.head_width(config)
    queries = config.num_attention_heads * head_dim
    cached = 2 * config.num_key_value_heads * head_dim
    return Dimensions(
        dim=dim,
        query_width=queries,
        cache_width=cached,
        layers=_matrices(
            layers, (dim, queries + cached), (queries, dim), (dim, 2 * hidden), (hidden, dim)
        ),
        feed_forward=_matrices(layers, (dim, 2 * hidden), (hidden, dim)),
        filling=_matrices(1, (dim, cached)),
        windows=_windows(config),
        head=_matrices(1, (dim, config.vocab_size)),
    )


def _windows(config: PreTrainedConfig) -> tuple[tuple[float, int], ...]:
    seen = {llama.FULL: math.inf, llama.SLIDING: llama.sliding_window(config) or math.inf}
    return tuple(Counter(seen[kind] for kind in llama.layer_kinds(config)).items())


_FAMILIES = dict.fromkeys(t5.MODEL_TYPES, _t5_dimensions) | dict.fromkeys(
    llama.MODEL_TYPES, _llama_dimensions
)
