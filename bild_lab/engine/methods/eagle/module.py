"""EAGLE's trained part: one decoder layer that continues the target's hidden states (Li et al.,
2024 and 2025).

EAGLE-1 fuses the input of the target's head with the embedding of the next token, and its output
goes through the target's own head. EAGLE-3 fuses the states after three of the target's layers, and
has a norm and a head of its own, which may know only the most frequent tokens.

Files are those of SafeAILab's EAGLE and of vLLM's speculators: a config.json and weights, in
safetensors or pytorch_model.bin. Own ones are written as SafeAILab's, with the model that they were
trained for under `base`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig

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
    write_module,
)
from bild_lab.engine.methods.state_layers import BesideTarget
from bild_lab.engine.models.checkpoint.vocabulary import biased
from bild_lab.engine.models.native.attention import fused_attention
from bild_lab.engine.models.native.stack import rotate
from bild_lab.errors import UserError
from bild_lab.files import FilePath

if TYPE_CHECKING:
    from bild_lab.engine.session import LoadedModel

EAGLE, EAGLE3 = "eagle", "eagle3"
JOINT_NORM, LAYER_NORMS = "joined", "apart"  # one norm over all states, or one for each layer
# the fields of speculators' configuration that say so
STATE_NORMS = {JOINT_NORM: "norm_before_fc", LAYER_NORMS: "fc_norm"}
VARIANTS = (EAGLE, EAGLE3)
TRAIN = (
    "python scripts/train_module.py module={variant} name={variant} model.path=DIR dataset=NAME"
    " dataset.path=DIR and give policy.heads=outputs/{variant}/heads"
)
KIND = FolderKind(
    weights="model.safetensors",
    config="config.json",
    noun="EAGLE",
    remedy=f"make one with: {TRAIN.format(variant=EAGLE)} (of EAGLE-3 module={EAGLE3}), or give a"
    " released one",
)
WEIGHTS = (KIND.weights, "pytorch_model.bin")
LAYERS = {EAGLE: "layers.0.", EAGLE3: "midlayer."}  # how SafeAILab's releases name the layer
RENAMED = {
    "model.": "",
    "layers.0.": "",
    "midlayer.": "",
    "transformer.": "",
    "self_attn.": "",
    "mlp.": "",
}
# where in the layer its own weights are
PLACES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"), "self_attn."),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp."),
    **dict.fromkeys(("post_attention_layernorm", "input_layernorm", "hidden_norm"), ""),
}
# the first follows from d2t, the second from the configuration
IGNORED = ("t2d", "rotary_emb.inv_freq")
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"  # vLLM's name for the target's layers
EXTRA_NORMS = (
    "embedding_layernorm",
    "embed_layernorm",
    "hidden_layernorm",
    "pre_lm_head_layernorm",
)
# what a row's own keys and values are stored with, and all those that it attends to
Store = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class EagleConfig:
    """The shapes of an EAGLE, and the model it was trained for.

    variant: eagle or eagle3.
    layer: its decoder layer; vocab_size is the target's.
    target_size: width of the target's states.
    target_layers: after how many of the target's layers these states are taken (EAGLE-3), 0 for the
        embeddings.
    draft_vocabulary: how many tokens its head knows; None for the target's head.
    bias: of the fusion and of queries, keys and values, in this order.
    normed_residual: the residual sum starts from the normed states.
    state_norm: how the target's states are normed before their fusion, JOINT_NORM or LAYER_NORMS;
        None: they are not.
    feeds_normed: the layer's output is normed before it goes to the head and back into the layer
        (EAGLE-3.1).
    head_norms: queries and keys are normed by head, as in Qwen3.
    embeds: it has an embedding of its own.
    base: the model's path and the fingerprint of its weights, if known.
    """

    variant: str
    layer: LlamaConfig
    target_size: int
    target_layers: tuple[int, ...] = ()
    draft_vocabulary: int | None = None
    bias: tuple[bool, bool] = (False, False)
    normed_residual: bool = False
    state_norm: str | None = None
    feeds_normed: bool = False
    head_norms: bool = False
    embeds: bool = False
    base: Mapping[str, Any] = field(default_factory=dict)

    @property
    def vocabulary(self) -> int:
        """The size of the target's vocabulary."""
        return self.layer.vocab_size


class Eagle(BesideTarget):
    """One Llama layer over pairs of a target's state and the embedding of the token after it.

    Pair i is of the state at position i and token i + 1; it predicts token i + 2. Without a state
    of the target, the layer's own output takes its place: so it drafts.
    """

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config.layer)
        self.config, layer = config, config.layer
        is_eagle3 = config.variant == EAGLE3
        dim = layer.hidden_size
        fusion, attention = config.bias
        states = config.target_size * (len(config.target_layers) if is_eagle3 else 1)
        self.fc = nn.Linear(states if is_eagle3 else states + dim, dim, bias=fusion)
        self.add_matrices(read=2 * dim if is_eagle3 else dim, bias=attention, out_bias=False)
        if config.head_norms:
            self.q_norm = nn.Parameter(torch.ones(layer.head_dim))
            self.k_norm = nn.Parameter(torch.ones(layer.head_dim))
        if is_eagle3:
            self.input_layernorm = nn.Parameter(torch.ones(dim))
            self.hidden_norm = nn.Parameter(torch.ones(dim))
            self.norm = nn.Parameter(torch.ones(dim))
            if config.state_norm == JOINT_NORM:
                self.input_norm = nn.Parameter(torch.ones(states))
            elif config.state_norm == LAYER_NORMS:
                target_layers = config.target_layers
                norms = [nn.Parameter(torch.ones(config.target_size)) for _ in target_layers]
                self.fc_norm = nn.ParameterList(norms)
            self.lm_head = nn.Linear(dim, config.draft_vocabulary, bias=False)
            # id minus own id
            self.register_buffer("d2t", torch.zeros(config.draft_vocabulary, dtype=torch.long))
        if config.embeds:
            self.register_buffer("embed_tokens", torch.zeros(config.vocabulary, dim))

    def save(self, folder: Path) -> None:
        """Write weights and configuration as SafeAILab's code and vLLM read them."""
        config = self.config
        written = {
            **config.layer.to_dict(),
            "architectures": [
                "LlamaForCausalLM" if config.variant == EAGLE else "LlamaForCausalLMEagle3"
            ],
            "rope_theta": config.layer.rope_parameters["rope_theta"],
            "bias": config.bias[0],
            "target_hidden_size": config.target_size,
            "base": dict(config.base),
        }
        if config.variant == EAGLE3:
            written["draft_vocab_size"] = config.draft_vocabulary
            written["norm_before_residual"] = config.normed_residual
            written["norm_output"] = config.feeds_normed
            if config.state_norm is not None:
                written[STATE_NORMS[config.state_norm]] = True
            written["eagle_config"] = {
                "use_aux_hidden_state": True,
                AUX_LAYERS: list(config.target_layers),
            }
        prefix = LAYERS[config.variant]
        weights = {
            _released_name(name, prefix): weight for name, weight in self.state_dict().items()
        }
        write_module(folder, KIND, weights, written)

    def embed(self, tokens: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows dim"]:
        """Tokens as the layer reads them: without the scale that some models give their
        embeddings.
        """
        table = self.embed_tokens if self.config.embeds else self._target[0]
        return table[tokens].to(self.fc.weight.dtype)

    def fused(self, states: Float[Tensor, "*rows states"]) -> Float[Tensor, "*rows dim"]:
        """The target's states as wide as the layer's own output. EAGLE-1 takes them as they are."""
        states = states.to(self.fc.weight.dtype)
        if self.config.variant == EAGLE:
            return states
        if self.config.state_norm == JOINT_NORM:
            states = self.normed(states, self.input_norm)
        elif self.config.state_norm == LAYER_NORMS:
            by_layer = states.chunk(len(self.fc_norm), -1)
            normed = [
                self.normed(layer_states, norm)
                for layer_states, norm in zip(by_layer, self.fc_norm, strict=True)
            ]
            states = torch.cat(normed, -1)
        return self.fc(states)

    def forward(
        self,
        embedded: Float[Tensor, "batch m dim"],
        states: Float[Tensor, "batch m dim"],
        positions: Int[Tensor, "*batch m"],
        store: Store,
        mask: Bool[Tensor, "batch 1 m n"] | None,
    ) -> Float[Tensor, "batch m dim"]:
        """The next states of these pairs.

        states: fused, or outputs of this function.
        store: takes keys and values [batch heads m dim], and gives all that the rows may attend to.
        mask: which of them each row does.
        """
        x, residual = self._joined(embedded, states)
        rotation = self.rotation(x, positions)
        queries, own_keys = self.heads(self.q_proj(x)), self.heads(self.k_proj(x))
        if self.config.head_norms:
            queries = self.normed(queries, self.q_norm)
            own_keys = self.normed(own_keys, self.k_norm)
        own_keys, own_values = rotate(own_keys, *rotation), self.heads(self.v_proj(x))
        keys, values = store(own_keys.transpose(1, 2), own_values.transpose(1, 2))
        queries = rotate(queries, *rotation).transpose(1, 2)
        mixed = fused_attention(queries, keys, values, mask)
        output = self.feed_forward(residual + self.o_proj(mixed.transpose(1, 2).flatten(2)))
        return self.normed(output, self.norm) if self.config.feeds_normed else output

    def head_logits(self, states: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows own"]:
        """Scores of the tokens that the head knows."""
        if self.config.variant == EAGLE:
            head = self._target[1][: self.config.vocabulary]
            return self._scores_of_products(states @ head.to(states.dtype).mT)
        return self.lm_head(states if self.config.feeds_normed else self.normed(states, self.norm))

    def logits(self, states: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows vocab"]:
        """Scores of the target's tokens; those that the head does not know have −inf."""
        head_logits = self.head_logits(states)
        if self.tokens is None:
            return biased(head_logits, self._bias)
        logits = head_logits.new_full(
            (*head_logits.shape[:-1], self.config.vocabulary), float("-inf")
        )
        logits[..., self.tokens] = head_logits
        return biased(logits, self._bias)

    @cached_property
    def tokens(self) -> Int[Tensor, " own"] | None:
        """The target's ids of the tokens that the head knows; None if it knows all of them."""
        if self.config.variant == EAGLE or self.config.draft_vocabulary == self.config.vocabulary:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def _joined(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """What the attention reads, and what its output is added to."""
        if self.config.variant == EAGLE:
            x = self.fc(torch.cat([embedded, states], -1))
            return x, x
        normed = self.normed(states, self.hidden_norm)
        read = torch.cat([self.normed(embedded, self.input_layernorm), normed], -1)
        return read, normed if self.config.normed_residual else states


def released_layers(depth: int) -> tuple[int, int, int]:
    """After how many of a target's layers the released code of EAGLE-3 reads its states."""
    return 2, depth // 2, depth - 3


def spread_layers(depth: int) -> tuple[int, int, int]:
    """After how many of a target's layers EAGLE-3 reads its states: low, middle and high.

    Those of the released code where the model is deep enough, else spread evenly before the last
    layer, whose output Transformers gives normed.
    """
    released = released_layers(depth)
    if released[0] < released[1] < released[2]:
        return released
    low, middle, high = (round(thirds * (depth - 1) / 3) for thirds in (1, 2, 3))
    return low, middle, high


def joined_states(
    variant: str,
    head_input: Float[Tensor, "*rows dim"],
    hidden: Sequence[Float[Tensor, "*rows dim"]],
) -> Float[Tensor, "*rows states"]:
    """What a variant reads of a target's forward."""
    return torch.cat(list(hidden), -1) if variant == EAGLE3 else head_input


def load_eagle(target: LoadedModel, path: FilePath | None, variant: str) -> Eagle:
    """Load the EAGLE in this folder or of this hub id, in the target's precision and on its device.

    Raises UserError if there is none, if it is of another variant, or if it does not fit the
    target.
    """
    if path is None:
        raise UserError(
            f"policy {variant} needs a trained layer; make one with:"
            f" {TRAIN.format(variant=variant)}, or give a released one, as policy.heads=DIR"
        )
    eagle = read_eagle(released_folder(path, KIND, WEIGHTS), target.checkpoint.depth)
    noun, trained_variant = f"the EAGLE {path}", eagle.config.variant
    if trained_variant != variant:
        raise UserError(
            f"{noun} is of the variant {trained_variant}, got policy={variant};"
            f" use policy={trained_variant}"
        )
    return fitted(eagle, target, noun)


def read_eagle(folder: Path, depth: int) -> Eagle:
    """Read an EAGLE on the CPU. depth: how many layers the target has.

    Raises UserError for any other folder.
    """
    tensors = read_tensors(folder, KIND, WEIGHTS)
    weights = _own_names(tensors)
    config = _config(folder, weights, depth)
    with torch.random.fork_rng(devices=[]):  # its first values are drawn, and replaced
        eagle = Eagle(config)
    fill_module(eagle, weights, folder, KIND)
    if config.variant == EAGLE3:
        require_tokens_of(config.vocabulary, eagle.d2t, tensors.get("t2d"), folder, KIND)
    return eagle


def _own_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under our names."""
    named = {}
    for name, value in tensors.items():
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        if any(ignored_name in name for ignored_name in IGNORED) or name.startswith("verifier_"):
            continue
        if name.startswith(EXTRA_NORMS):
            raise UserError(f"an EAGLE with a {name.partition('.')[0]} is not known; {KIND.remedy}")
        name = name.replace("fusion_fc.", "fc.")
        named[name.removesuffix(".weight") if "norm" in name or "embed" in name else name] = value
    return named


def _state_norm(weights: Mapping[str, Tensor]) -> str | None:
    """Which norm of the target's states these weights hold."""
    if "input_norm" in weights:
        return JOINT_NORM
    return LAYER_NORMS if any(name.startswith("fc_norm.") for name in weights) else None


def _released_name(name: str, prefix: str) -> str:
    """A weight's name in SafeAILab's releases. prefix: of the layer's own."""
    block = name.partition(".")[0]
    suffix = ".weight" if name == block or block == "fc_norm" else ""
    suffix = "" if block == "d2t" else suffix
    return f"{prefix if block in PLACES else ''}{PLACES.get(block, '')}{name}{suffix}"


def _config(folder: Path, weights: Mapping[str, Tensor], depth: int) -> EagleConfig:
    """The configuration of either format; what the weights show is taken from them."""
    with described_in(folder, KIND) as path:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        layer = _layer_fields(values, path)
        config = layer_config(layer, 1, path, KIND)
        require_known(_wrong_fields(values, layer, weights), {**layer, **values}, path, KIND)
        is_eagle3 = _is_eagle3(weights)
        target_layers = _target_layers(values, depth) if is_eagle3 else ()
        fused = weights["fc.weight"].shape[1]
        target_size = (
            _state_width(fused, target_layers, values, path)
            if is_eagle3
            else fused - config.hidden_size  # the rest is the embedding's
        )
    return EagleConfig(
        variant=EAGLE3 if is_eagle3 else EAGLE,
        layer=config,
        target_size=target_size,
        target_layers=target_layers,
        draft_vocabulary=_draft_vocabulary(values, weights, config.vocab_size),
        bias=("fc.bias" in weights, "q_proj.bias" in weights),
        normed_residual=bool(values.get("norm_before_residual", False)),
        state_norm=_state_norm(weights),
        feeds_normed=bool(values.get("norm_output", False)),
        head_norms="q_norm" in weights,
        embeds="embed_tokens" in weights,
        base=values.get("base") or {},
    )


def _is_eagle3(weights: Mapping[str, Tensor]) -> bool:
    return "hidden_norm" in weights


def _layer_fields(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The fields of the decoder layer. Raises UserError for those of another drafter, of more
    layers than one, and of a layer with a sliding window.
    """
    drafter = values.get("speculators_model_type")
    if drafter not in (None, *VARIANTS):
        fault = "; use policy=dflash" if drafter == "dflash" else " is not known"
        raise UserError(f"{path} has speculators_model_type {drafter}{fault}; {KIND.remedy}")
    layer = dict(values.get("transformer_layer_config", values))
    if (layers := layer.get("num_hidden_layers", 1)) != 1:
        raise UserError(f"an EAGLE has one layer, got {path} with {layers}; {KIND.remedy}")
    sliding = "sliding_attention" in (layer.get("layer_types") or ())
    require_known({"layer_types": sliding}, layer, path, KIND)
    return layer


def _state_width(
    fused: int, target_layers: Sequence[int], values: Mapping[str, Any], path: Path
) -> int:
    """How wide the states after one of the target's layers are. fused: width of all that EAGLE-3
    fuses. Raises UserError for fields that say something else.
    """
    width = fused / len(target_layers)
    wrong = {
        AUX_LAYERS: not width.is_integer(),
        "target_hidden_size": values.get("target_hidden_size") not in (None, width),
    }
    require_known(wrong, values, path, KIND)
    return int(width)


def _draft_vocabulary(
    values: Mapping[str, Any], weights: Mapping[str, Tensor], vocabulary: int
) -> int | None:
    """How many tokens the drafter's own head knows; None without one."""
    if "lm_head.weight" in weights:
        return weights["lm_head.weight"].shape[0]
    if not _is_eagle3(weights):
        return None
    return values.get("draft_vocab_size") or vocabulary


def _target_layers(values: Mapping[str, Any], depth: int) -> tuple[int, ...]:
    """After how many of a target's layers an EAGLE-3 reads its states.

    vLLM numbers them so. SpecForge and NVIDIA's Model Optimizer number the layers whose outputs they
    are, from 0, which is one less (SGLang's pull request 25454). By default both read the released
    layers, and so these are known in either numbering.
    """
    named = tuple(_named_layers(values) or spread_layers(depth))
    released = released_layers(depth)
    return released if named == tuple(layer - 1 for layer in released) else named


def _named_layers(values: Mapping[str, Any]) -> Any:
    """The target's layers that a configuration names; None if it names none."""
    return values.get(AUX_LAYERS) or (values.get("eagle_config") or {}).get(AUX_LAYERS)


def _wrong_fields(
    values: Mapping[str, Any], layer: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> dict[str, bool]:
    """Which fields have no known form, or say something else than the weights."""
    is_eagle3, named = _is_eagle3(weights), _named_layers(values)
    head = weights.get("lm_head.weight")
    draft_vocabulary = values.get("draft_vocab_size")
    has_other_head = head is not None and draft_vocabulary != head.shape[0]
    wrong_norms = {}
    if is_eagle3:
        for state_norm, flag in STATE_NORMS.items():
            has_norm = _state_norm(weights) == state_norm
            differs = flag in values and bool(values[flag]) != has_norm
            wrong_norms[flag] = not is_switch(values.get(flag)) or differs
    return {
        AUX_LAYERS: named is not None and not are_layers(named),
        "norm_before_residual": not is_switch(values.get("norm_before_residual")),
        "norm_output": not is_switch(values.get("norm_output")),
        **wrong_norms,
        "attention_bias": bool(layer.get("attention_bias")) and "q_proj.bias" not in weights,
        "draft_vocab_size": is_eagle3
        and draft_vocabulary is not None
        and (not is_count(draft_vocabulary) or has_other_head),
        "base": not isinstance(values.get("base") or {}, Mapping),
    }
