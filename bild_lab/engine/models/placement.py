"""A target too large for one GPU: whole layers on several devices of one process."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from bild_lab.engine.models.admission import input_device
from bild_lab.engine.models.device import resolve_device
from bild_lab.engine.models.hf import HuggingFaceModel
from bild_lab.errors import UserError

DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def require_device_map(device_map: str | None, device: torch.device) -> None:
    """Raise UserError for an unknown map, and for a chosen device of tokens and drafters beside a map."""
    if device_map is None:
        return
    if device_map not in DEVICE_MAPS:
        raise UserError(f"runtime.device_map must be null or one of {', '.join(DEVICE_MAPS)}, got {device_map!r}")
    if device != resolve_device("auto"):
        raise UserError(
            "a target that is spread takes all devices that CUDA_VISIBLE_DEVICES names; "
            f"set runtime.device=auto, got {device}"
        )


@dataclass
class SpreadModel(HuggingFaceModel):
    """A checkpoint whose layers Accelerate distributes over GPUs, main memory and disk, in this order.

    device_map: one of DEVICE_MAPS, or the device of every part. Parts in memory or on disk are copied to `device` to
    run. Its layers cannot be run one by one.
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
            self._refuse("this drafter reads the target's vocabulary matrices")
        return super().vocabulary_weights()

    def require_layers(self, what: str) -> None:
        self._refuse(f"{what} runs some of the target's layers")

    def _refuse(self, what: str) -> NoReturn:
        raise UserError(f"{what}, and {self.checkpoint.path} is spread over devices; leave out runtime.device_map")

    @property
    def parts(self) -> dict[str, int]:
        """How many parts, mostly layers, are on each device, in memory (cpu) and on disk."""
        where = getattr(self.module, "hf_device_map", {"": self.device}).values()  # GPUs are numbers there
        return dict(Counter(f"cuda:{each}" if isinstance(each, int) else str(each) for each in where))
