"""A target too large for one GPU: whole layers on several devices, or a shard of every layer in each process."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from bild_lab.engine.models.checkpoint import Checkpoint, resolve_device
from bild_lab.engine.models.hf import HuggingFaceModel, HuggingFaceSession, input_device
from bild_lab.engine.request import Source
from bild_lab.engine.session import Prefix
from bild_lab.errors import UserError, require_flag
from bild_lab.lab.measure.environment import cpu_name
from bild_lab.lab.torchrun import ALONE, Peers, launched, local_rank

DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
TORCHRUN = "torchrun --nproc_per_node=N run.py runtime.tensor_parallel=true"


@dataclass(frozen=True)
class Placement:
    """Where a target's weights lie; drafters stay whole, on one device of each process.

    device_map: how Accelerate deals layers out to the devices of one process, None: all on one device.
    tensor_parallel: each process that `torchrun` started holds a shard of every layer.
    """

    device_map: str | None = None
    tensor_parallel: bool = False

    def __post_init__(self) -> None:
        require_flag("runtime.tensor_parallel", self.tensor_parallel)
        if self.device_map is not None and self.device_map not in DEVICE_MAPS:
            raise UserError(
                f"runtime.device_map must be null or one of {', '.join(DEVICE_MAPS)}, got {self.device_map!r}"
            )
        if self.device_map is not None and self.tensor_parallel:
            raise UserError("a target is spread by runtime.device_map or by runtime.tensor_parallel; leave one out")
        if self.tensor_parallel and launched().count == 1:
            raise UserError(f"runtime.tensor_parallel needs one process per GPU; start N of them: {TORCHRUN}")

    @property
    def peers(self) -> Peers:
        """The processes that the weights lie in."""
        return launched() if self.tensor_parallel else ALONE

    @property
    def spread(self) -> bool:
        return self.device_map is not None or self.tensor_parallel

    def home(self, device: torch.device) -> torch.device:
        """Where tokens go in and logits come out, and where drafters lie. Raises UserError for a device of choice."""
        if self.spread and device != resolve_device("auto"):
            raise UserError(
                "a target that is spread takes all devices that CUDA_VISIBLE_DEVICES names; "
                f"set runtime.device=auto, got {device}"
            )
        return torch.device("cuda", local_rank()) if self.tensor_parallel and device.type == "cuda" else device

    def setting(self, device: torch.device) -> dict[str, Any]:
        """What a point's setting tells of it; nothing new of a target on one device."""
        told: dict[str, Any] = {"hardware": self.hardware(device)}
        if self.device_map is not None:
            told["device_map"] = self.device_map
        if self.tensor_parallel:
            told["tensor_parallel"] = self.peers.count
        return told

    def hardware(self, device: torch.device) -> str:
        """The processors a timing depends on; decoding one example at a time on a GPU waits for the CPU as well."""
        if device.type != "cuda":
            return _counted([cpu_name()] * self.peers.count)
        devices = range(torch.cuda.device_count()) if self.device_map is not None else [device] * self.peers.count
        return f"{_counted([torch.cuda.get_device_name(each) for each in devices])}, {cpu_name()}"

    def model(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> HuggingFaceModel:
        """The checkpoint as a model that lies so. Raises UserError where it cannot be split among the processes."""
        if self.device_map is not None:
            return SpreadModel(checkpoint, device, dtype, self.device_map)
        if not self.tensor_parallel:
            return HuggingFaceModel(checkpoint, device, dtype)
        if (reason := why_not_sharded(checkpoint.config, self.peers.count)) is not None:
            raise UserError(f"{checkpoint.path} cannot run with runtime.tensor_parallel, as {reason}")
        return ShardedModel(checkpoint, device, dtype, self.peers)


@dataclass
class SpreadModel(HuggingFaceModel):
    """A checkpoint whose layers Accelerate deals out to devices, to main memory and to disk, in this order.

    device_map: one of DEVICE_MAPS, or the device of every part. What lies in memory or on disk visits `device` to run.
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

    @property
    def parts(self) -> dict[str, int]:
        """How many parts, most of them layers, lie on each device, in memory (cpu) and on disk."""
        where = getattr(self.module, "hf_device_map", {"": self.device}).values()  # a GPU is a number there
        return dict(Counter(f"cuda:{each}" if isinstance(each, int) else str(each) for each in where))


@dataclass
class ShardedModel(HuggingFaceModel):
    """A checkpoint of whose layers each process holds a shard, and computes its part of every row."""

    peers: Peers = ALONE

    @cached_property
    def module(self) -> PreTrainedModel:
        return self.checkpoint.weights(
            self.dtype, distributed_config=DistributedConfig(tp_size=self.peers.count)
        ).eval()

    @torch.inference_mode()
    def start(self, source: Source, room: int, prefix: Prefix | None = None) -> HuggingFaceSession:
        return super().start(source, room, None if prefix is None else self._shard_of(prefix))

    def _shard_of(self, prefix: Prefix) -> Prefix:
        """The heads that this process computes; one that was run through the layers has no others."""
        if prefix.keys.shape[1] != key_value_heads(self.checkpoint.config):
            return prefix

        def own(heads: Tensor) -> Tensor:
            return heads.chunk(self.peers.count, dim=1)[self.peers.rank]

        return replace(prefix, keys=own(prefix.keys), values=own(prefix.values))


def why_not_sharded(config: PreTrainedConfig, count: int) -> str | None:
    """Why an architecture cannot be split among so many processes, or None if it can."""
    if not config.base_model_tp_plan:
        return f"Transformers has no plan of how to split a {config.model_type}; use runtime.device_map=auto"
    for heads in (config.num_attention_heads, key_value_heads(config)):
        if heads % count:
            return f"its {heads} attention heads are no multiple of {count} processes; start another number of them"
    return None


def key_value_heads(config: PreTrainedConfig) -> int:
    """Heads that are cached: fewer than the attention's where several share one."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _counted(names: list[str]) -> str:
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in Counter(names).items())
