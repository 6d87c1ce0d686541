"""Any Hugging Face checkpoint, causal or encoder–decoder, as a model that can roll back."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from bild_lab.engine.draft import Tree, as_tree
from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.engine.request import Source
from bild_lab.engine.session import Prefix, Scores, rows_of
from bild_lab.engine.trace import Forward, forward_log
from bild_lab.errors import UserError
from bild_lab.lab.torchrun import ALONE, Peers


@dataclass
class HuggingFaceModel:
    """A checkpoint on a device. The weights load at the first use of `module`.

    Everything that only needs the checkpoint's small files (vocabulary, end tokens, prompts)
    works before that, so that a wrong pair fails before gigabytes are read.
    """

    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    engine: ClassVar[str] = "hf"
    peers: ClassVar[Peers] = ALONE  # the processes that hold its weights

    @cached_property
    def module(self) -> PreTrainedModel:
        return self.checkpoint.weights(self.dtype).to(self.device).eval()

    def load(self) -> None:
        """Read the weights now rather than at the first decoding."""
        _ = self.module

    def synchronize(self) -> None:
        """Wait until the device has done what it was asked, in all processes that hold a part of the model."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.peers.wait()

    @property
    def encoder_decoder(self) -> bool:
        return self.checkpoint.encoder_decoder

    @torch.inference_mode()
    def start(self, source: Source, room: int, prefix: Prefix | None = None) -> HuggingFaceSession:
        return HuggingFaceSession(self.module, source, prefix)

    @torch.inference_mode()
    def prompt_cache(self, embeddings: Float[Tensor, "p dim"]) -> Prefix:
        """Keys and values of a shallow prompt: its rows see those before them, and none has a rotation."""
        cache, count = DynamicCache(), embeddings.shape[0]
        among = torch.ones(count, count, dtype=torch.bool, device=embeddings.device).tril()
        self.module.base_model(
            inputs_embeds=embeddings[None],
            attention_mask=additive(among, embeddings.dtype)[None, None],
            position_ids=torch.zeros(1, count, dtype=torch.long, device=embeddings.device),
            past_key_values=cache,
            use_cache=True,
        )
        parts = ([getattr(layer, name).to(embeddings.device) for layer in cache.layers] for name in ("keys", "values"))
        keys, values = (torch.cat(part) for part in parts)
        return Prefix(keys, values)

    def source(self, prompt: str, max_tokens: int | None = None) -> Source:
        """The prompt as token ids, with the special tokens of the checkpoint's tokenizer."""
        return self.checkpoint.source(prompt, max_tokens).to(self.device)


class HuggingFaceSession:
    """One sequence over a `DynamicCache`.

    A decoder-only prompt is not run at the start: it goes in with the first rows, in one forward,
    as `generate` does. A prefix fills the first slots of the cache, which only probe rows see.
    """

    def __init__(self, module: PreTrainedModel, source: Source, prefix: Prefix | None = None) -> None:
        self._module = module
        self._device = input_device(module)
        self._log = forward_log()
        self._source = 0 if source.encoder_ids is None else source.encoder_ids.shape[1]
        self._prefix = prefix
        self._reserved = 0 if prefix is None else prefix.length
        self._cached = self._reserved  # slots of the cache that are filled
        self._rows = 0  # rows of the last extend
        self._pending = list(source.prompt[:-1])  # prompt tokens not fed yet
        self._fixed: dict[str, Any] = {}
        self._cache = DynamicCache() if prefix is None else PrefixedCache()
        if source.encoder_ids is None:
            self._past = self._cache
            self._ids_name = "input_ids"
        else:
            self._past = EncoderDecoderCache(self._cache, DynamicCache())
            self._ids_name = "decoder_input_ids"
            if self._log is not None:
                self._log.append(Forward(module.config, self._source, source=self._source, encoder=True))
            self._fixed["encoder_outputs"] = module.get_encoder()(input_ids=source.encoder_ids, return_dict=True)
        for layer in range(0 if self._reserved == 0 else prefix.keys.shape[0]):
            self._cache.update(prefix.keys[None, layer], prefix.values[None, layer], layer)
        self._keeps_logits = "logits_to_keep" in inspect.signature(module.forward).parameters

    @property
    def length(self) -> int:
        return self._cached - self._reserved + len(self._pending)

    @torch.inference_mode()
    def extend(
        self,
        tokens: Sequence[int] | Int[Tensor, " m"],
        parents: Tree | Int[Tensor, " m"] | None = None,
        scored: int | None = None,
    ) -> Scores:
        rows = rows_of(tokens, self._device)
        self._rows = len(rows)
        fed, fed_parents = self._with_pending(rows, parents)
        if fed_parents is None and self._reserved:  # where a prefix is hidden, a chain needs its mask too
            fed_parents = torch.arange(-1, len(fed) - 1, device=fed.device)
        tree = nullcontext({}) if fed_parents is None else self._tree(as_tree(fed_parents), fed)
        with tree as tree_inputs, head_input(self._module) as final:
            out = self._module(
                **self._tokens(fed),
                **self._fixed,
                **tree_inputs,
                **({"logits_to_keep": scored or self._rows} if self._keeps_logits else {}),
                past_key_values=self._past,
                use_cache=True,
            )
        if self._log is not None:
            self._log.append(Forward(self._module.config, len(fed), self._cached, out.logits.shape[1], self._source))
        self._cached += len(fed)
        self._pending = []
        logits = out.logits[0, -(scored or self._rows) :]
        return Scores(logits=logits, final=final[0][0, -logits.shape[0] :].to(logits.device) if final else None)

    def keep(self, path: Sequence[int]) -> None:
        base = self._cached - self._rows
        if list(path) != list(range(len(path))):
            rows = torch.tensor([*range(base), *(base + row for row in path)], device=self._device)
            for layer in self._cache.layers:
                rows = rows.to(layer.keys.device)  # layers of a spread model lie on several
                layer.keys = layer.keys.index_select(-2, rows)
                layer.values = layer.values.index_select(-2, rows)
            self._cached = len(rows)
        self._crop(base + len(path))
        self._rows = len(path)

    def rollback(self, length: int) -> None:
        self._crop(self._reserved + length)

    def _crop(self, slots: int) -> None:
        dropped = self._cached - slots
        if dropped > 0:
            self._cache.crop(-dropped)
            self._cached = slots

    def _tokens(self, fed: Int[Tensor, " m"]) -> dict[str, Tensor]:
        """Token ids, or, where some lie beyond the vocabulary, embeddings."""
        if self._prefix is None or self._prefix.masks is None:
            return {self._ids_name: fed[None]}
        look_up = self._module.get_input_embeddings()
        return {"inputs_embeds": self._prefix.embed(fed, look_up.num_embeddings, look_up)[None]}

    def _with_pending(self, rows: Tensor, parents: Tree | Tensor | None) -> tuple[Tensor, Tree | Tensor | None]:
        """The rows behind the prompt that has not been fed yet."""
        count = len(self._pending)
        if count == 0:
            return rows, parents
        fed = torch.cat([rows.new_tensor(self._pending), rows])
        if parents is None:
            return fed, None
        chain = torch.arange(-1, count - 1, device=rows.device)
        return fed, torch.cat([chain, as_tree(parents).parents + count])  # a root (-1) follows the last pending row

    @contextmanager
    def _tree(self, tree: Tree, fed: Int[Tensor, " m"]) -> Iterator[dict[str, Tensor]]:
        """Inputs that let every row see the text and its own ancestors, at its logical position."""
        module, cached = self._module, self._cached
        positions = cached - self._reserved + tree.depths  # [m]
        visible = torch.ones(len(fed), cached + len(fed), dtype=torch.bool, device=fed.device)
        visible[:, cached:] = tree.ancestors
        if self._reserved:
            probe = self._prefix.probe(fed, module.get_input_embeddings().num_embeddings)
            visible[:, : self._reserved] = False if probe is None else probe[:, None]
        mask = additive(visible, module.dtype)
        if not module.config.is_encoder_decoder:
            yield {"attention_mask": mask[None, None], "position_ids": positions[None]}
            return
        keys = torch.cat([torch.arange(cached, device=fed.device), positions])
        with t5_positions(module, positions, keys):
            yield {"decoder_attention_mask": mask[None, None]}


class PrefixedCache(DynamicCache):
    """A cache with slots that were filled before the layers ran: they go where their layer turns out to lie."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *rest: Any, **options: Any) -> Any:
        if layer_idx < len(self.layers) and (layer := self.layers[layer_idx]).is_initialized:
            layer.keys, layer.values = layer.keys.to(key_states.device), layer.values.to(value_states.device)
        return super().update(key_states, value_states, layer_idx, *rest, **options)


def input_device(module: PreTrainedModel) -> torch.device:
    """Where a model takes tokens and gives logits. Of a spread one, weights may lie elsewhere, or on disk."""
    hook = getattr(module, "_hf_hook", None)  # of Accelerate
    return module.device if hook is None else torch.empty(0, device=hook.execution_device).device


def additive(visible: Bool[Tensor, "m n"], dtype: torch.dtype) -> Float[Tensor, "m n"]:
    """The mask as what is added to scores: a boolean 4-D mask is silently wrong with eager attention."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)


@contextmanager
def head_input(module: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Collects what the head reads in the forwards inside, [1, m, dim] each; nothing where a model has no head."""
    read: list[Tensor] = []
    head = module.get_output_embeddings()
    hook = None if head is None else head.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    try:
        yield read
    finally:
        if hook is not None:
            hook.remove()


@contextmanager
def t5_positions(module: PreTrainedModel, queries: Int[Tensor, " m"], keys: Int[Tensor, " k"]) -> Iterator[None]:
    """Let a T5 decoder compute its position bias from these positions instead of the cache's length.

    Raises UserError for other encoder–decoders, whose positions cannot be set.
    """
    blocks = getattr(module.get_decoder(), "block", None)
    if blocks is None:
        raise UserError(
            f"tree drafts need a T5, mT5 or decoder-only target, got {module.config.model_type}; use a chain drafter"
        )
    attention = blocks[0].layer[0].SelfAttention
    attention.compute_bias = partial(_bias_at, attention, queries, keys)
    try:
        yield
    finally:
        del attention.compute_bias  # the class's own method again


def _bias_at(
    attention: torch.nn.Module,
    queries: Int[Tensor, " m"],
    keys: Int[Tensor, " k"],
    *_: Any,
    device: torch.device | None = None,
    **__: Any,
) -> Float[Tensor, "1 heads m k"]:
    buckets = attention._relative_position_bucket(
        (keys[None, :] - queries[:, None]).to(device=device),  # the layer's, which may not be where tokens go in
        bidirectional=False,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    return attention.relative_attention_bias(buckets).permute(2, 0, 1)[None]
