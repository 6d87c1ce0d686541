"""Facts of a point that decide nothing in it, but tell a figure where it belongs; no name or path has to tell them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bild_lab.engine.adapters import bita, layer_heads, medusa
from bild_lab.engine.ppd.pipeline import SHARED
from bild_lab.lab.config import PairSpec

PATH_KNOBS = ("adapter", "heads", "table")  # the knobs that name a file or a folder
CONFIGS = sorted({one.KIND.config for one in (bita, layer_heads, medusa)})


def facts_of(pair: PairSpec, policy: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a point with this pair and this policy, whose interpolations are resolved.

    pair: its name. aligned: whether its draft model was aligned with the target. acceptance: the class of the
    acceptance rule, None for a policy without one. trained: by knob, what the folder it names says of its small module.
    """
    rule = (policy["decoder"].get("acceptance") or {}).get("_target_")
    folders = {knob: trained_facts(path) for knob, path in named_paths(policy).items()}
    return {
        "pair": pair.name,
        "aligned": pair.aligned,
        "acceptance": None if rule is None else rule.rpartition(".")[2],
        "trained": {knob: told for knob, told in folders.items() if told is not None},
    }


def named_paths(policy: Mapping[str, Any]) -> dict[str, str]:
    """The files and folders that a policy's knobs name, by knob."""
    named = {knob: policy.get(knob) for knob in PATH_KNOBS}
    return {knob: path for knob, path in named.items() if isinstance(path, str) and path != SHARED}


def trained_facts(folder: str) -> dict[str, Any] | None:
    """The configuration of the adapter or the heads in this folder, but for their model; None where there are none."""
    for name in CONFIGS:
        if (file := Path(folder).expanduser() / name).is_file():
            return {key: value for key, value in json.loads(file.read_text()).items() if key != "base"}
    return None
