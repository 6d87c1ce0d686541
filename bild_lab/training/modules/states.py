"""A small module beside a frozen model, and the states of the model's decoder on rows of a prompt
and an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedConfig, PreTrainedModel

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.device import resolve_device
from bild_lab.engine.models.hf.admission import input_device
from bild_lab.engine.models.hf.layer_control import decoder_layers
from bild_lab.engine.models.hf.model import SpreadModel, require_device_map
from bild_lab.engine.request import Source
from bild_lab.errors import UserError, require_flag
from bild_lab.ranks import launched
from bild_lab.training.modules.predictors import AnsweredPrompt, Predictors


class SmallModule(nn.Module):
    """Weights of its own and the frozen model that it calls.

    The model is not its submodule, so the Trainer moves, trains and saves the small weights alone.
    `forward` takes input_ids [batch n] and contexts [batch contexts], how many tokens each context
    holds; padding is on the right, where no context sees it. It returns the logits of every
    predictor after each context, or an `OwnLoss`. A module that reads_labels gets the labels too,
    as `target_tokens` [batch contexts predictors].
    """

    reads_labels: ClassVar[bool] = False

    def __init__(self, base: PreTrainedModel, weights: nn.Module) -> None:
        super().__init__()
        self.weights = weights.to(input_device(base))
        self._base = (base,)  # a module in a tuple is no submodule

    @property
    def base(self) -> PreTrainedModel:
        return self._base[0]

    def save(self, folder: Path) -> None:
        """Write the weights as decoding reads them."""
        self.weights.save(folder)


class ModuleSpec(Protocol):
    """The settings of a small module to train, before any weights are read: a dataclass of values.

    group: of the configuration, that holds them. result_name: the folder that holds the result in
    outputs/NAME. noun: what the module is called.
    """

    group: ClassVar[str] = "module"
    result_name: ClassVar[str] = "heads"

    @property
    def noun(self) -> str: ...

    @property
    def predictors(self) -> Predictors: ...

    def check(self, config: PreTrainedConfig) -> None:
        """Raise UserError for a model that the module cannot be trained for."""

    def from_answers(self, rows: Sequence[AnsweredPrompt]) -> dict[str, Any]:
        """What `build` takes besides from the answers to learn."""
        return {}

    def build(self, base: PreTrainedModel, origin: Mapping[str, Any], seed: int) -> SmallModule:
        """A fresh module for this frozen model. origin: the path of its weights and their
        fingerprint.
        """

    def words(self, folder: Path) -> list[str]:
        """The words after `python run.py` that choose the policy with the module."""


@dataclass(frozen=True)
class BasePlacement:
    """Where a frozen model is while a small module learns beside it. With neither value each
    process holds all of it.

    device_map: how Accelerate spreads its layers over the devices of one process (`SpreadModel`).
    sharded: each launched process holds a part of every decoder layer, and all of them gather a
    layer to run it (FSDP, Zhao et al., 2023).
    """

    device_map: str | None = None
    sharded: bool = False

    def __post_init__(self) -> None:
        require_device_map(self.device_map, resolve_device("auto"))
        require_flag("model.sharded", self.sharded)
        count = launched().count
        if self.device_map is not None and count > 1:
            raise UserError(
                f"runtime.device_map spreads a model over the devices of one process, got {count}"
                " processes; start one, or train with model.sharded=true in place of"
                " runtime.device_map"
            )
        if self.sharded and count == 1:
            raise UserError(
                "model.sharded gives each process a part of the model; start several: accelerate"
                " launch --multi_gpu --num_processes=N scripts/…"
            )

    def load(
        self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
    ) -> PreTrainedModel:
        """The weights. device: of this process, where tokens go in.

        All processes must call this.
        """
        if self.device_map is not None:
            return SpreadModel(checkpoint, device, dtype, self.device_map).module.requires_grad_(
                False
            )
        if not self.sharded:
            return checkpoint.weights(dtype).requires_grad_(False).eval().to(device)
        ranks, base = launched(), None
        mesh = init_device_mesh(device.type, (ranks.count,))
        # in turn, as each holds all weights in memory until it has cut its part
        for rank in range(ranks.count):
            if rank == ranks.rank:
                base = checkpoint.weights(dtype).requires_grad_(False).eval()
                shard_layers(base, mesh)
                base.to(device)
            ranks.wait()
        return base


def shard_layers(base: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Cut every decoder layer among the mesh's processes. What is around the layers stays whole in
    each.

    Raises UserError for a model whose layers are not in one list.
    """
    layers = decoder_layers(base)
    if layers is None:
        raise UserError(
            f"model.sharded cuts layers, which a {base.config.model_type} does not have in one list"
        )
    # not the decoder too: Transformers knows by its class which states it gives
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)


@dataclass(frozen=True)
class OneRowCheckpoint(Checkpoint):
    """A checkpoint whose prompts are one row of tokens: an encoder–decoder's source, then the
    decoder's start token.

    This way encoder–decoders and decoders train on rows of the same form.
    """

    def source(self, prompt: str, max_tokens: int | None = None) -> Source:
        source = super().source(prompt, max_tokens)
        if source.encoder_ids is None:
            return source
        return Source((*source.encoder_ids[0].tolist(), *source.prompt))


@dataclass(frozen=True)
class DecoderStates:
    """What a decoder made of a batch of rows.

    tokens: the decoder's. hidden: outputs of layers, by number, of which 0 is the embedding. final:
    what the model's own head reads. places: where each context's last token is among the decoder's
    tokens.
    """

    tokens: Int[Tensor, "batch m"]
    hidden: Mapping[int, Float[Tensor, "batch m dim"]]
    final: Float[Tensor, "batch m dim"]
    places: Int[Tensor, "batch contexts"]


def decoder_states(
    base: PreTrainedModel,
    input_ids: Int[Tensor, "batch n"],
    contexts: Int[Tensor, "batch contexts"],
    layers: Sequence[int],
    skipped: int = 0,
) -> DecoderStates:
    """Run the model once, and move what it gives to the tokens' device, as its layers may lie on
    several.

    Raises UserError for a model with several states of a token, as a Gemma 3n's layers have.

    contexts: how many tokens each one holds; the first is the prompt and `skipped` tokens. layers:
    whose outputs are wanted. An encoder–decoder's prompt is a row of `OneRowCheckpoint`.
    """

    inputs: dict[str, Tensor] = {}
    if not base.config.is_encoder_decoder:
        inputs["input_ids"] = rows = input_ids
        places, states_name = contexts - 1, "hidden_states"
    else:
        count, device = input_ids.shape[1], input_ids.device
        # [batch, 1]; the prompt's last token is the decoder's start
        source = contexts[:, :1] - 1 - skipped
        mask = torch.arange(int(source.max()), device=device) < source
        inputs |= {"input_ids": input_ids[:, : mask.shape[1]], "attention_mask": mask.long()}
        row_count = count - int(source.min())
        token_indices = source + torch.arange(row_count, device=device)  # [batch, m]
        inputs["decoder_input_ids"] = rows = input_ids.gather(1, token_indices.clamp(max=count - 1))
        places = (contexts - source - 1).clamp(min=0)  # contexts that fill up have one token
        states_name = "decoder_hidden_states"
    read: list[Tensor] = []

    def keep(_: nn.Module, head_inputs: tuple[Tensor]) -> tuple[Tensor]:
        read.append(head_inputs[0])
        return (head_inputs[0][..., -1:, :],)  # scores of all rows would take much memory

    hook = base.get_output_embeddings().register_forward_pre_hook(keep)
    try:
        # not a forward that Accelerate put in its place: that one moves the states of all layers
        ran = type(base).forward(
            base, **inputs, use_cache=False, output_hidden_states=len(layers) > 0
        )
    finally:
        hook.remove()
    hidden = {layer: ran[states_name][layer].to(rows.device) for layer in layers}
    if any(states.ndim != 3 for states in (*hidden.values(), *read)):
        raise UserError(
            f"a {base.config.model_type} has several states of a token, of which this module would"
            " read one; choose another model, or a module that reads the head's input alone, such as"
            " module=eagle"
        )
    return DecoderStates(rows, hidden, read[0].to(rows.device), places)


def own_matrices(
    base: PreTrainedModel,
) -> tuple[Float[Tensor, "vocab dim"], Float[Tensor, "vocab dim"]]:
    """The embedding and the head, where the model takes its tokens.

    Raises UserError if one of them is in memory or on disk until it runs.
    """
    ends = (base.get_input_embeddings().weight, base.get_output_embeddings().weight)
    if any(weight.is_meta for weight in ends):
        raise UserError(
            "this module reads the model's vocabulary matrices, which found no room on the devices"
            " that runtime.device_map spread it over; take more or larger devices"
        )
    embedding, head = (weight.detach().to(input_device(base)) for weight in ends)
    return embedding, head


def soft_loss(
    logits: Float[Tensor, "*rows vocab"], own_scores: Float[Tensor, "*rows vocab"]
) -> Float[Tensor, "*rows"]:
    """Cross-entropy with the model's own distribution, of which `own_scores` are the logits."""
    return -(own_scores.float().softmax(-1) * logits.float().log_softmax(-1)).sum(-1)
