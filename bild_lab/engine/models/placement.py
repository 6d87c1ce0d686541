"""A target too large for one GPU: whole layers on several devices, or a shard of every layer in each process."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NoReturn

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from bild_lab.engine.models.admission import input_device
from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.engine.models.device import resolve_device
from bild_lab.engine.models.hf import HuggingFaceModel
from bild_lab.engine.models.ranks import ONE_PROCESS, Ranks, launched, local_rank
from bild_lab.engine.request import Source
from bild_lab.engine.session import ALONE, Opening, Prefix, Session
from bild_lab.errors import UserError

DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
READS_VOCABULARY = "this drafter reads the target's vocabulary matrices"
TORCHRUN = "torchrun --nproc_per_node=N run.py runtime.tensor_parallel=true"


@dataclass(frozen=True)
class Placement:
    """Where a target's weights are placed. Drafters are not split: each process has them on one device.

    device_map: how Accelerate distributes layers over the devices of one process; None: all on one device.
    tensor_parallel: each process that `torchrun` started holds a shard of every layer.
    """

    device_map: str | None = None
    tensor_parallel: bool = False

    def __post_init__(self) -> None:
        if self.device_map is not None and self.device_map not in DEVICE_MAPS:
            raise UserError(
                f"runtime.device_map must be null or one of {', '.join(DEVICE_MAPS)}, got {self.device_map!r}"
            )
        if self.device_map is not None and self.tensor_parallel:
            raise UserError("a target is spread by runtime.device_map or by runtime.tensor_parallel; leave one out")
        if self.tensor_parallel and launched().count == 1:
            raise UserError(f"runtime.tensor_parallel needs one process per GPU; start N of them: {TORCHRUN}")

    @property
    def ranks(self) -> Ranks:
        """The processes that hold the weights."""
        return launched() if self.tensor_parallel else ONE_PROCESS

    @property
    def spread(self) -> bool:
        return self.device_map is not None or self.tensor_parallel

    def home(self, device: torch.device) -> torch.device:
        """The device of tokens, logits and drafters. Raises UserError for a chosen device if the target is spread."""
        if self.spread and device != resolve_device("auto"):
            raise UserError(
                "a target that is spread takes all devices that CUDA_VISIBLE_DEVICES names; "
                f"set runtime.device=auto, got {device}"
            )
        return torch.device("cuda", local_rank()) if self.tensor_parallel and device.type == "cuda" else device

    def model(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> HuggingFaceModel:
        """The checkpoint as a model with this placement. Raises UserError if it cannot be split among the processes."""
        if self.device_map is not None:
            return SpreadModel(checkpoint, device, dtype, self.device_map)
        if not self.tensor_parallel:
            return HuggingFaceModel(checkpoint, device, dtype)
        if (reason := why_not_sharded(checkpoint.config, self.ranks.count)) is not None:
            raise UserError(f"{checkpoint.path} cannot run with runtime.tensor_parallel, as {reason}")
        return ShardedModel(checkpoint, device, dtype, self.ranks)


class _InParts(HuggingFaceModel):
    """A checkpoint whose layers cannot be run one by one, as they are on several devices."""

    def require_layers(self, what: str) -> None:
        self.refuse(f"{what} runs some of the target's layers")

    def refuse(self, what: str) -> NoReturn:
        raise UserError(
            f"{what}, and {self.checkpoint.path} is spread over devices; "
            "leave out runtime.device_map and runtime.tensor_parallel"
        )


@dataclass
class SpreadModel(_InParts):
    """A checkpoint whose layers Accelerate distributes over GPUs, main memory and disk, in this order.

    device_map: one of DEVICE_MAPS, or the device of every part. Parts in memory or on disk are copied to `device` to
    run.
    """

    device_map: str | dict[str, str | int] = "auto"

    @cached_property
    def module(self) -> PreTrainedModel:
        module = self.checkpoint.weights(self.dtype, device_map=self.device_map).eval()
        entry, wanted = input_device(module), torch.empty(0, device=self.device).device
        if entry != wanted:
            raise UserError(
                f"{self.checkpoint.path} takes its tokens on {entry}, as no part of it found room on {wanted}, where "
                "drafters lie; free that device, or leave it out of CUDA_VISIBLE_DEVICES"
            )
        return module

    def vocabulary_weights(self) -> tuple[Float[Tensor, "vocab dim"], Float[Tensor, "vocab dim"]]:
        """Raises UserError if one of them is on disk or in memory only until it runs."""
        ends = (self.module.get_input_embeddings(), self.module.get_output_embeddings())
        if any(each.weight.is_meta for each in ends):
            self.refuse(READS_VOCABULARY)
        return super().vocabulary_weights()

    @property
    def parts(self) -> dict[str, int]:
        """How many parts, mostly layers, are on each device, in memory (cpu) and on disk."""
        where = getattr(self.module, "hf_device_map", {"": self.device}).values()  # GPUs are numbers there
        return dict(Counter(f"cuda:{each}" if isinstance(each, int) else str(each) for each in where))


@dataclass
class ShardedModel(_InParts):
    """A checkpoint split by tensor parallelism: each process holds a shard of every layer."""

    ranks: Ranks = ONE_PROCESS

    @cached_property
    def module(self) -> PreTrainedModel:
        return self.checkpoint.weights(
            self.dtype, distributed_config=DistributedConfig(tp_size=self.ranks.count)
        ).eval()

    def vocabulary_weights(self) -> tuple[Float[Tensor, "vocab dim"], Float[Tensor, "vocab dim"]]:
        """Raises UserError: each process has a part of them."""
        self.refuse(READS_VOCABULARY)

    @torch.inference_mode()
    def start(self, source: Source, room: int, opening: Opening = ALONE) -> Session:
        own = None if opening.prefix is None else self._shard_of(opening.prefix)
        return super().start(source, room, replace(opening, prefix=own))

    def _shard_of(self, prefix: Prefix) -> Prefix:
        """This process's heads of a prefix. A prefix made by running the sharded layers has only these already."""
        if prefix.keys.shape[1] != key_value_heads(self.checkpoint.config):
            return prefix

        def own(heads: Tensor) -> Tensor:
            return heads.chunk(self.ranks.count, dim=1)[self.ranks.rank]

        return replace(prefix, keys=own(prefix.keys), values=own(prefix.values))


def why_not_sharded(config: PreTrainedConfig, count: int) -> str | None:
    """Why an architecture cannot be split among this many processes, or None if it can."""
    if not config.base_model_tp_plan:
        return f"Transformers has no plan of how to split a {config.model_type}; use runtime.device_map=auto"
    for heads in (config.num_attention_heads, key_value_heads(config)):
        if heads % count:
            return f"its {heads} attention heads are no multiple of {count} processes; start another number of them"
    return None


def key_value_heads(config: PreTrainedConfig) -> int:
    """The number of key-value heads; smaller than the number of attention heads with grouped-query attention."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads
