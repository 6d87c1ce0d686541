"""DFlash: a block of masks beside the target's states, filled in one forward (Chen et al., 2026).

Keys and values of the text are made of the target's states; the last committed token and the masks
after it are rows of the drafter's own, which attend to the text and to each other. Files are those
of vLLM's speculators: a config.json of `speculators_model_type` dflash and model.safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig

from bild_lab.engine.draft import Draft, Verdict, empty_draft
from bild_lab.engine.methods.drafter_fields import (
    are_layers,
    fitted,
    is_count,
    is_switch,
    layer_config,
    require_known,
    require_tokens_of,
)
from bild_lab.engine.methods.module_folder import (
    FolderKind,
    described_in,
    fill_module,
    read_tensors,
    released_folder,
)
from bild_lab.engine.methods.state_layers import BesideTarget, StateLayer, states_of_text
from bild_lab.engine.models.checkpoint.vocabulary import biased
from bild_lab.engine.models.native.attention import KeyValueCache, fused_attention
from bild_lab.engine.models.native.layers import SPARE_ROWS
from bild_lab.engine.models.native.stack import rotate
from bild_lab.engine.models.placed_rows import PlacedRows
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Request
from bild_lab.engine.session import OutputSpec, Scores, Session, on_device
from bild_lab.engine.trace import Forward
from bild_lab.errors import UserError, require_whole
from bild_lab.files import FilePath

if TYPE_CHECKING:
    from bild_lab.engine.session import LoadedModel

DFLASH = "dflash"
KIND = FolderKind(
    weights="model.safetensors",
    config="config.json",
    noun="DFlash drafter of vLLM's speculators",
    remedy="give a released one, a folder or a hub id, as policy.heads=DIR",
)
SLIDING, FULL = "sliding_attention", "full_attention"
IGNORED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight", "embed_tokens.weight")


@dataclass(frozen=True)
class DFlashConfig:
    """The shapes of a drafter, and the model it was trained for.

    layers: its decoder layers; vocab_size and hidden_size are the target's.
    target_layers: after how many of the target's layers the states are taken that it reads, 0 for
        the embeddings.
    block: rows of a block, the last committed token's and the masks'.
    mask_token: the id of a mask.
    draft_vocabulary: how many tokens its head knows; None for the target's head.
    first_row: which row of a block predicts the next token, 1: each mask its own place, 0: each row
        the place after it.
    windows: for each layer to how many tokens before the block it attends, None for all.
    causal: in layers with a window rows of a block see no later rows.
    bias: of the attention.
    """

    layers: LlamaConfig
    target_layers: tuple[int, ...]
    block: int
    mask_token: int
    draft_vocabulary: int | None
    first_row: int
    windows: tuple[int | None, ...]
    causal: bool
    bias: bool = False
    base: Mapping[str, Any] = field(default_factory=dict)

    @property
    def target_size(self) -> int:
        return self.layers.hidden_size

    @property
    def vocabulary(self) -> int:
        return self.layers.vocab_size


class DFlashLayer(StateLayer):
    """A decoder layer of Qwen3 whose rows attend to the text by its states."""

    def __init__(self, layers: LlamaConfig, bias: bool) -> None:
        super().__init__(layers)
        self.add_matrices(read=layers.hidden_size, bias=bias, out_bias=bias)
        self.q_norm = nn.Parameter(torch.ones(layers.head_dim))
        self.k_norm = nn.Parameter(torch.ones(layers.head_dim))
        self.input_layernorm = nn.Parameter(torch.ones(layers.hidden_size))


class DFlash(BesideTarget):
    """The drafter's weights."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config.layers)
        self.config, layers = config, config.layers
        dim = layers.hidden_size
        self.fc = nn.Linear(len(config.target_layers) * dim, dim, bias=False)
        self.hidden_norm = nn.Parameter(torch.ones(dim))
        self.layers = nn.ModuleList(
            DFlashLayer(layers, config.bias) for _ in range(layers.num_hidden_layers)
        )
        self.norm = nn.Parameter(torch.ones(dim))
        if config.draft_vocabulary is not None:
            self.lm_head = nn.Linear(dim, config.draft_vocabulary, bias=False)
            # id minus own id
            self.register_buffer("d2t", torch.zeros(config.draft_vocabulary, dtype=torch.long))

    def context(self, states: Float[Tensor, "n states"]) -> Float[Tensor, "n dim"]:
        """What keys and values of the text are made of, from the target's states of each token."""
        return self.normed(self.fc(states.to(self.fc.weight.dtype)), self.hidden_norm)

    def forward(
        self,
        context: Float[Tensor, "n dim"],
        block: Int[Tensor, " m"],
        cache: KeyValueCache,
        cached: int,
    ) -> Float[Tensor, "m dim"]:
        """The last states of a block's rows, before the norm of the head.

        context: of the text's tokens after the first `cached` ones, all before the block. Their
        keys and values are put into the cache, and the block's after them.
        """
        embedding = self._target[0]
        x = embedding[block].to(self.fc.weight.dtype)
        start = cached + context.shape[0]  # the place of the block's first row
        stop = start + block.shape[0]
        positions = torch.arange(cached, stop, device=x.device)
        placed = PlacedRows(slice(cached, stop), stop, positions)
        cos, sin = (table[0] for table in self.rotation(x[None], positions))
        rows = slice(start - cached, None)  # the block's, of the new keys and values
        for index, layer in enumerate(self.layers):
            read = self.normed(x, layer.input_layernorm)
            queries = self.normed(self.heads(layer.q_proj(read)), layer.q_norm)
            queries = rotate(queries, cos[rows], sin[rows])
            text_and_block = torch.cat([context, read])
            keys = self.normed(self.heads(layer.k_proj(text_and_block)), layer.k_norm)
            values = self.heads(layer.v_proj(text_and_block))
            cache.write(index, placed, rotate(keys, cos, sin), values)
            mixed = fused_attention(
                queries.transpose(0, 1)[None],
                cache.keys[index, None, :, :stop],
                cache.values[index, None, :, :stop],
                self._visible(index, start, stop, x.device),
            )
            x = layer.feed_forward(x + layer.o_proj(mixed[0].transpose(0, 1).flatten(1)))
        return x

    def most_likely(self, states: Float[Tensor, "m dim"]) -> Int[Tensor, " m"]:
        """The target's id of the most likely token after each row's states."""
        normed = self.normed(states, self.norm)
        if self.config.draft_vocabulary is not None:
            own_tokens = self.lm_head(normed).argmax(-1)
            return own_tokens + self.d2t[own_tokens]
        head = self._target[1][: self.config.vocabulary].to(normed.dtype)
        scores = self._scores_of_products(normed @ head.mT)
        return biased(scores, self._bias).argmax(-1)

    def _visible(
        self, layer: int, start: int, stop: int, device: torch.device
    ) -> Bool[Tensor, "m stop"] | None:
        """Which places each row of the block attends to; None for all of them."""
        window = self.config.windows[layer]
        if window is None:
            return None
        places = torch.arange(stop, device=device)
        rows = places[start:, None]
        reached = rows if self.config.causal else places[-1]
        return (places >= start - window) & (places <= reached).expand(stop - start, stop)


class DFlashDrafter(Drafter):
    """A chain of the most likely token at each place of a block.

    The first round of a text drafts nothing: the states of the prompt come out of its verification.
    No token depends on a random number, so q is one-hot, and speculative sampling is lossless.
    heads: the trained drafter. window: how many tokens are drafted at most, of those that a block
    holds; None: all. Raises UserError for a target whose layers give no states.
    """

    def __init__(self, target: LoadedModel, heads: DFlash, window: int | None = None) -> None:
        target.require_layers("DFlash")
        config = heads.config
        drafted = config.block - config.first_row
        if window is not None:
            require_whole("policy.window", window, 1, None, "null drafts a whole block")
        self._target, self._heads = target, heads
        self._window = window or drafted
        self.required_outputs = OutputSpec(hidden=config.target_layers, prompt=True)

    def begin(self, request: Request, target: Session) -> None:
        self._heads.attach_to(self._target)
        self._request, self._forwards = request, target.forwards
        layers, weight = self._heads.config.layers, self._heads.fc.weight
        room = request.max_length + SPARE_ROWS
        shape = (layers.num_hidden_layers, layers.num_key_value_heads, room, layers.head_dim)
        self._cache = KeyValueCache(shape, weight.dtype, weight.device)
        self._cached = 0  # tokens whose keys and values are there
        self._received: list[Tensor] = []  # states of the tokens after these

    @torch.inference_mode()
    def propose(self, tokens: list[int]) -> Draft:
        config, device = self._heads.config, self._target.device
        count = min(self._window, self._request.limits.room(tokens))
        if not self._received:
            return empty_draft(device)
        states = torch.cat(self._received)
        self._received = []
        context = self._heads.context(states)
        block = on_device([tokens[-1], *[config.mask_token] * (config.block - 1)], device)
        start = self._cached + context.shape[0]
        if start + config.block > self._cache.capacity:
            self._cache = self._cache.grown(2 * (start + config.block))
        outputs = self._heads(context, block, self._cache, self._cached)
        drafted = outputs[config.first_row :][:count]
        self._forwards.append(
            Forward(config.layers, rows=config.block, cached=start, scored=drafted.shape[0])
        )
        self._cached = start
        return Draft(self._heads.most_likely(drafted), calls=1)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        states = torch.cat(list(scores.hidden), -1)
        self._received.append(states_of_text(states, draft, verdict))


def load_dflash(target: LoadedModel, path: FilePath | None) -> DFlash:
    """Load the drafter in this folder or of this hub id, in the target's precision and on its
    device.

    Raises UserError if there is none, if it is another drafter, or if it does not fit the target.
    """
    if path is None:
        raise UserError(f"policy {DFLASH} needs a trained drafter; {KIND.remedy}")
    dflash = read_dflash(released_folder(path, KIND, (KIND.weights,)))
    return fitted(dflash, target, f"the DFlash drafter {path}")


def read_dflash(folder: Path) -> DFlash:
    """Read a drafter on the CPU. Raises UserError for any other folder."""
    weights = {}
    tensors = read_tensors(folder, KIND, (KIND.weights,))
    for name, value in tensors.items():
        if name not in IGNORED:
            short = name.replace("self_attn.", "").replace("mlp.", "")
            weights[short.removesuffix(".weight") if "norm" in short else short] = value
    config = _config(folder, weights)
    if config.draft_vocabulary is None:  # a copy of the target's
        weights.pop("lm_head.weight", None)
        weights.pop("d2t", None)
    with torch.random.fork_rng(devices=[]):  # its first values are drawn, and replaced
        dflash = DFlash(config)
    fill_module(dflash, weights, folder, KIND)
    if config.draft_vocabulary is not None:
        require_tokens_of(config.vocabulary, dflash.d2t, tensors.get("t2d"), folder, KIND)
    return dflash


def _config(folder: Path, weights: Mapping[str, Tensor]) -> DFlashConfig:
    with described_in(folder, KIND) as path:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if (kind := values.get("speculators_model_type")) != DFLASH:
            raise UserError(
                f"{path} has speculators_model_type {kind}, not {DFLASH}; {KIND.remedy}"
            )
        layer = values["transformer_layer_config"]
        count = layer.get("num_hidden_layers")
        require_known({"num_hidden_layers": not is_count(count)}, layer, path, KIND)
        layers = layer_config(layer, count, path, KIND)
        types = layer.get("layer_types") or [FULL] * count
        wrong = _wrong_fields(values, layers, weights) | _wrong_layers(layer, types, weights)
        require_known(wrong, {**layer, **values}, path, KIND)
        draft_vocabulary = values["draft_vocab_size"]
        sliding = [kind == SLIDING for kind in types]
        return DFlashConfig(
            layers=layers,
            target_layers=tuple(values["aux_hidden_state_layer_ids"]),
            block=values["block_size"],
            mask_token=values["mask_token_id"],
            draft_vocabulary=None if draft_vocabulary == layers.vocab_size else draft_vocabulary,
            first_row=0 if values.get("sample_from_anchor") else 1,
            windows=tuple(layer["sliding_window"] if slides else None for slides in sliding),
            causal=not values.get("sliding_window_non_causal", False),
            bias="layers.0.q_proj.bias" in weights,
            base=values.get("base") or {},
        )


def _wrong_fields(
    values: Mapping[str, Any], layers: LlamaConfig, weights: Mapping[str, Tensor]
) -> dict[str, bool]:
    """Which fields of a drafter have no known form, or say something else than the weights."""
    mask_token, draft_vocabulary = values.get("mask_token_id"), values.get("draft_vocab_size")
    head = weights.get("lm_head.weight")
    has_other_head = head is not None and draft_vocabulary != head.shape[0]
    first_row = 0 if values.get("sample_from_anchor") else 1
    target_size = values.get("target_hidden_size") or layers.hidden_size
    return {
        "mask_token_id": not is_count(mask_token, 0) or mask_token >= layers.vocab_size,
        "aux_hidden_state_layer_ids": not are_layers(values.get("aux_hidden_state_layer_ids")),
        "target_hidden_size": target_size != layers.hidden_size,
        "block_size": not is_count(values.get("block_size"), 1 + first_row),
        "draft_vocab_size": not is_count(draft_vocabulary) or has_other_head,
        "sample_from_anchor": not is_switch(values.get("sample_from_anchor")),
        # of Domino's: each row predicts the place after it, and a head of its own corrects it
        "projector_type": values.get("projector_type") not in (None, DFLASH),
        "shift_label": values.get("shift_label") not in (None, False),
        "aux_hidden_state_scales": values.get("aux_hidden_state_scales") is not None,
        "sliding_window_non_causal": not is_switch(values.get("sliding_window_non_causal")),
        "base": not isinstance(values.get("base") or {}, Mapping),
    }


def _wrong_layers(
    layer: Mapping[str, Any], types: Sequence[str], weights: Mapping[str, Tensor]
) -> dict[str, bool]:
    """Which fields of the layers have no known form, or say something else than the weights. types:
    of each layer's attention.
    """
    unknown = [kind for kind in types if kind not in (SLIDING, FULL)]
    biased_layers = "layers.0.q_proj.bias" in weights
    return {
        "layer_types": bool(unknown) or len(types) != layer["num_hidden_layers"],
        "sliding_window": SLIDING in types and not is_count(layer.get("sliding_window")),
        "attention_bias": bool(layer.get("attention_bias")) != biased_layers,
    }
