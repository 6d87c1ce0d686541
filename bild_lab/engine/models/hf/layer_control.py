"""What a forward of a Transformers decoder does besides the usual: some layers only, or the rows of
a tree.

Every decoder layer is wrapped once. A `Plan`, one per thread, says which layers run in the next
forward, what the first of them reads, and which hidden states to keep. The others pass their input
on unchanged.

It builds its masks, one for each kind of layer, by functions of a row's and a key's position in the
cache. In a tree two rows may have the same position. While a plan has `branches`, these functions
are called with positions in the text instead, so that windows and chunks are counted along a row's
own branch, and a row sees its own ancestors only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from bild_lab.engine.models.placed_rows import PlacedRows
from bild_lab.engine.session import NOTHING, Skipped

# what layers call their blocks
ATTENTION = ("self_attn", "attn", "attention", "self_attention", "SelfAttention")
FEED_FORWARD = ("mlp", "feed_forward", "ffn", "block_sparse_moe")
BY_BRANCH = ("eager", "sdpa")  # kinds of attention that take a mask of any shape


def along_branches(rows: PlacedRows, mask_function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A model's mask function (batch, head, row's slot, key's slot) along the branches of a tree of
    rows. Keys of a prefix have negative positions, and are in no window.
    """
    start = rows.slots.start

    def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        position = rows.key_positions[key]
        near = mask_function(batch, head, rows.positions[row - start], position) | (position < 0)
        return near & rows.visible[row - start, key]

    return visible


@dataclass
class Plan:
    """What one forward does, in the thread that runs it.

    start: the first cache slot that the rows fill.
    layers: indices of the layers to run; None: all.
    states: [m, dim], the input of the first of them; None: the output of the layer before.
    hidden: after how many layers to collect hidden states, 0 for the embeddings.
    distances: [m, k], each key's position minus the row's, for T5's position bias; None: those of a
        chain.
    branches: of a tree in a decoder-only model; None: a chain.
    fill: stop each layer once its keys and values are stored.
    stop: end the forward after the last of the layers, before the head.
    skipped: blocks that add nothing, in a module with wrapped blocks.
    outputs: the collected hidden states.
    """

    start: int
    layers: Sequence[int] | None = None
    states: Tensor | None = None
    hidden: tuple[int, ...] = ()
    fill: bool = False
    stop: bool = False
    distances: Tensor | None = None
    branches: PlacedRows | None = None
    skipped: Skipped = NOTHING
    outputs: dict[int, Tensor] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        """Whether the forward is the usual one."""
        return self.layers is None and self.states is None and not self.hidden and not self.stop

    def runs(self, index: int) -> bool:
        return self.layers is None or index in self.layers

    def reads_states(self, index: int) -> bool:
        """Whether `states` replace the input of this layer: of the first that runs, or where none
        runs, of the first of all, as all pass them on.
        """
        return self.states is not None and index == (self.layers[0] if self.layers else 0)

    def ends_after(self, index: int, is_last: bool) -> bool:
        """Whether the forward ends after this layer: nothing is left to run or to collect.

        is_last: whether it is the module's last.
        """
        ran_last = is_last if self.layers is None else not self.layers or index == self.layers[-1]
        return self.stop and ran_last and index + 1 >= max(self.hidden, default=0)


_plan: ContextVar[Plan | None] = ContextVar("plan", default=None)


class ForwardEnded(Exception):
    """Raised to end a forward once all requested outputs are there."""


class KeysStored(Exception):
    """Raised to end a layer once it has stored its keys and values."""


@contextmanager
def following(plan: Plan) -> Iterator[None]:
    """Forwards inside the block follow this plan.

    A forward that ends early (`stop`) raises nothing.
    """
    token = _plan.set(plan)
    try:
        yield
    except ForwardEnded:
        pass
    finally:
        _plan.reset(token)


def current_plan() -> Plan | None:
    """The plan of the forward that runs in this thread."""
    return _plan.get()


def decoder_layers(module: PreTrainedModel) -> nn.ModuleList | None:
    """The decoder layers of a causal or encoder–decoder model; None if no module list has the
    configured length.
    """
    config = module.config
    decoder = module.get_decoder() if config.is_encoder_decoder else module.base_model
    text = config.get_text_config(decoder=True)
    depths = {
        getattr(text, name, None)
        for name in ("num_hidden_layers", "num_decoder_layers", "decoder_layers")
    }
    children = list(decoder.children())
    grandchildren = itertools.chain.from_iterable(child.children() for child in children)
    for candidate in (*children, *grandchildren):
        if isinstance(candidate, nn.ModuleList) and len(candidate) in depths:
            return candidate
    return None


def wrap_layers(module: PreTrainedModel) -> None:
    """Wrap every decoder layer so that it follows the plan.

    A module that is already wrapped is left unchanged.
    """
    for name in BY_BRANCH:
        make_mask = ALL_MASK_ATTENTION_FUNCTIONS[name]
        if not hasattr(make_mask, "_follows_branches"):
            ALL_MASK_ATTENTION_FUNCTIONS[name] = _following_branches(make_mask)
    layers = decoder_layers(module)
    if layers is None:
        return
    attention = _relative_attention(layers[0])
    if attention is not None and not isinstance(attention.compute_bias, _BiasByPlan):
        attention.compute_bias = _BiasByPlan(attention, attention.compute_bias)
    for index, layer in enumerate(layers):
        if not isinstance(layer.forward, _FollowingPlan):
            is_last = index + 1 == len(layers)
            layer.forward = _FollowingPlan(layer, layer.forward, index, is_last)


def blocks_of(layer: nn.Module) -> tuple[list[nn.Module], list[nn.Module]] | None:
    """A layer's attention and its feed-forward; None where they cannot be told apart.

    Of a T5 block these are the parts with the residual sum around them; attention to the source is
    one of them.
    """
    if _relative_attention(layer) is not None:
        return list(layer.layer[:-1]), [layer.layer[-1]]
    attention = [getattr(layer, name) for name in ATTENTION if hasattr(layer, name)]
    feed_forward = [getattr(layer, name) for name in FEED_FORWARD if hasattr(layer, name)]
    has_one_of_each = len(attention) == len(feed_forward) == 1
    return (attention, feed_forward) if has_one_of_each else None


def wrap_blocks(module: PreTrainedModel) -> bool:
    """Wrap attention and feed-forward of every layer so that they follow the plan; whether they
    could be told apart.
    """
    layers = decoder_layers(module)
    layer_blocks = None if layers is None else [blocks_of(layer) for layer in layers]
    if layer_blocks is None or None in layer_blocks:
        return False
    for index, (layer, (attention, feed_forward)) in enumerate(
        zip(layers, layer_blocks, strict=True)
    ):
        for block in (*attention, *feed_forward):
            if not isinstance(block.forward, _Skipping):
                is_attention = block in attention
                block.forward = _Skipping(layer, block.forward, index, is_attention)
    return True


def _following_branches(make: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(make)
    def mask(
        *args: Any, mask_function: Callable[..., Tensor] = causal_mask_function, **options: Any
    ) -> Any:
        plan = _plan.get()
        if plan is None or plan.branches is None:
            return make(*args, mask_function=mask_function, **options)
        return make(
            *args,
            mask_function=along_branches(plan.branches, mask_function),
            **{**options, "allow_is_causal_skip": False},
        )

    mask._follows_branches = True
    return mask


@dataclass(eq=False)
class _InPlaceOf:
    """Stands in a module in place of one of its methods, which it may run.

    It is an object, not a closure, so that a copy of the module runs the copy's own weights. owner:
    the module, or for a block its layer. run: the method.
    """

    owner: nn.Module
    run: Callable[..., Any]


@dataclass(eq=False)
class _Skipping(_InPlaceOf):
    """A block that adds nothing if it is left out.

    It answers in the form that it last answered in. index: of its layer.
    """

    index: int
    is_attention: bool
    # how many values its last answer had, if that was a tuple; T5's parts return the residual
    # stream itself
    width: int | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan = _plan.get()
        skipped = NOTHING if plan is None else plan.skipped
        left_out = skipped.attention if self.is_attention else skipped.feed_forward
        if self.index not in left_out:
            result = self.run(*args, **kwargs)
            self.width = tuple_width(result)
            return result
        states = args[0] if args else kwargs["hidden_states"]
        attention = _relative_attention(self.owner)
        if attention is None:
            return as_tuple(torch.zeros_like(states), self.width)
        if self.width is None:
            return states
        bias = kwargs.get("position_bias")
        if "key_value_states" not in kwargs:
            bias = _position_bias(attention, states, bias)
        return states, bias, None


@dataclass(eq=False)
class _FollowingPlan(_InPlaceOf):
    """A layer that follows the plan. index: of it. width: of the tuple that it last answered with."""

    index: int
    is_last: bool
    width: int | None = None

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        index, plan = self.index, _plan.get()
        if plan is None or plan.idle:
            return self._run_layer(hidden_states, *args, **kwargs)
        if plan.reads_states(index):
            hidden_states = plan.states[None].to(hidden_states)
        if index == 0 and 0 in plan.hidden:
            plan.outputs[0] = hidden_states[0]
        if plan.runs(index) and not plan.fill:
            result = self._run_layer(hidden_states, *args, **kwargs)
            hidden_states = result[0] if isinstance(result, tuple) else result
        else:
            if plan.runs(index):
                with suppress(KeysStored):
                    self.run(hidden_states, *args, **kwargs)
            result = _passed_on(self.owner, hidden_states, self.width, args, kwargs)
        if index + 1 in plan.hidden:
            plan.outputs[index + 1] = hidden_states[0]
        if plan.ends_after(index, self.is_last):
            raise ForwardEnded
        return result

    def _run_layer(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = self.run(hidden_states, *args, **kwargs)
        self.width = tuple_width(result)
        return result


def sets_positions(module: PreTrainedModel) -> bool:
    """Whether an encoder–decoder's rows can be given any position, as in T5: one bias by position
    for all layers.
    """
    layers = decoder_layers(module)
    if layers is None:
        return False
    attentions = [_relative_attention(layer) for layer in layers]
    return (
        None not in attentions
        and [attention.has_relative_attention_bias for attention in attentions].count(True) == 1
    )


def _relative_attention(layer: nn.Module) -> nn.Module | None:
    """The self-attention of a T5 block (the first block's computes the bias for all); None for
    other architectures.
    """
    parts = getattr(layer, "layer", None)
    return getattr(parts[0], "SelfAttention", None) if isinstance(parts, nn.ModuleList) else None


@dataclass(eq=False)
class _BiasByPlan(_InPlaceOf):
    """T5's position bias, by the plan's distances where it has them. owner: the attention."""

    def __call__(
        self, *args: Any, device: torch.device | None = None, **kwargs: Any
    ) -> Float[Tensor, "1 heads m k"]:
        plan, attention = _plan.get(), self.owner
        if plan is None or plan.distances is None:
            return self.run(*args, device=device, **kwargs)
        buckets = attention._relative_position_bucket(
            # the layer's device, which may differ from the input device
            plan.distances.to(device=device),
            bidirectional=False,
            num_buckets=attention.relative_attention_num_buckets,
            max_distance=attention.relative_attention_max_distance,
        )
        return attention.relative_attention_bias(buckets).permute(2, 0, 1)[None]


def tuple_width(answer: Any) -> int | None:
    """How many values an answer has; None for one that is no tuple."""
    return len(answer) if isinstance(answer, tuple) else None


def as_tuple(states: Tensor, width: int | None) -> Any:
    """The states, first of a tuple of so many values; None: the states themselves."""
    return states if width is None else (states, *[None] * (width - 1))


def _passed_on(
    layer: nn.Module,
    hidden_states: Tensor,
    width: int | None,
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """The output of a skipped layer: its input, and in T5 also the position biases.

    width: as in `as_tuple`, of what the layer answers with when it runs.
    """
    attention = _relative_attention(layer)
    if attention is None:
        return as_tuple(hidden_states, width)
    bias = _position_bias(
        attention, hidden_states, args[1] if len(args) > 1 else kwargs.get("position_bias")
    )
    return hidden_states, bias, args[4] if len(args) > 4 else None


def _position_bias(
    attention: nn.Module, hidden_states: Tensor, bias: Tensor | None
) -> Tensor | None:
    """T5's position bias, which the first block computes for all."""
    if bias is None and attention.has_relative_attention_bias:
        start, count = _plan.get().start, hidden_states.shape[1]
        bias = attention.compute_bias(
            count, start + count, device=hidden_states.device, past_seen_tokens=start
        )
    return bias


def logits_equal(logits: Tensor, expected: Tensor) -> bool:
    """Whether two computations of the same logits agree up to rounding in their precision."""
    scale = float(logits.abs().max()) or 1.0
    return float((logits - expected).abs().max()) <= 64 * torch.finfo(logits.dtype).eps * scale
