"""Medusa's released heads on the hub of the rehearsals, in the layout of their repositories.

`config.json` names two heads, `medusa_lm_head.pt` has five in bfloat16: 1.48 GB for Vicuna-7B.
"""

from __future__ import annotations

import io
import json

import torch

from bild_lab.papers.runs.paper_runs import hub
from tests.papers.rehearsal_hub import scaled_configuration

OWNER = "FasterDecoding/medusa-"
HEADS = 5


def released_heads() -> dict[str, dict[str, bytes]]:
    """The repository of each Vicuna's heads, which are random and as wide as its tiny checkpoint."""
    return {
        name: repository(f"lmsys/{name.removeprefix(OWNER)}")
        for name in hub()["models"]
        if name.startswith(OWNER)
    }


def repository(base: str) -> dict[str, bytes]:
    """The files of the heads of a model."""
    sizes, generator = scaled_configuration(base), torch.Generator().manual_seed(3)
    dim, vocabulary = sizes.hidden_size, sizes.vocab_size
    shapes = {
        name: shape
        for head in range(HEADS)
        for name, shape in {
            f"{head}.0.linear.weight": (dim, dim),
            f"{head}.0.linear.bias": (dim,),
            f"{head}.1.weight": (vocabulary, dim),
        }.items()
    }
    tensors = {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()
    }
    pickled = io.BytesIO()
    torch.save(tensors, pickled)
    config = {
        "base_model_name_or_path": base,
        "medusa_num_heads": 2,
        "medusa_num_layers": 1,
        "transformers_version": "4.31.0",
    }
    return {"medusa_lm_head.pt": pickled.getvalue(), "config.json": json.dumps(config).encode()}
