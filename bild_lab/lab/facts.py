"""Facts about a point that do not affect its numbers. Figures use them to place it, instead of names or paths."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bild_lab.engine.adapters import bita, eagle_files, hydra, judge, layer_heads, medusa
from bild_lab.engine.drafters.candidates import AUTO, STRAIGHTFORWARD
from bild_lab.engine.drafters.state_trees import CHAIN, DYNAMIC, PUBLISHED
from bild_lab.engine.drafters.trees import GROWTHS
from bild_lab.engine.ppd.pipeline import SHARED
from bild_lab.engine.protocols import External
from bild_lab.lab.config import PairSpec
from bild_lab.lab.decoder import Decoder

PATH_KNOBS = ("adapter", "heads", "table", "tree", "corpus")  # the knobs that name a file or a folder
WORDS = {SHARED, *GROWTHS, STRAIGHTFORWARD, AUTO, CHAIN, DYNAMIC, PUBLISHED}  # what they may hold instead
CONFIGS = sorted({one.KIND.config for one in (bita, eagle_files, hydra, judge, layer_heads, medusa)})


def facts_of(pair: PairSpec, policy: Mapping[str, Any], decoder: Decoder) -> dict[str, Any]:
    """The facts of a point with this pair, this policy and its decoder. The policy's interpolations must be resolved.

    In the result: pair is its name. aligned: whether its draft model was aligned with the target. acceptance: the
    class of the acceptance rule, None for a policy without one. trained: for each knob that names a folder of a small
    trained module, that module's configuration; for a fitted tree its file. versions: of the packages of a peer with
    its own environment. vocabularies: of each draft model with another vocabulary than the target's, how many pieces
    they share, and how it drafts.
    """
    rule = (policy["decoder"].get("acceptance") or {}).get("_target_")
    folders = {
        knob: json.loads(Path(path).expanduser().read_text()) if knob.endswith("tree") else trained_facts(path)
        for knob, path in named_paths(policy).items()
    }
    return {
        "pair": pair.name,
        "aligned": pair.aligned,
        "acceptance": None if rule is None else rule.rpartition(".")[2],
        "trained": {knob: told for knob, told in folders.items() if told is not None},
        **({"versions": dict(decoder.method.versions)} if isinstance(decoder.method, External) else {}),
        **({"vocabularies": decoder.vocabularies} if decoder.vocabularies else {}),
    }


def named_paths(policy: Mapping[str, Any]) -> dict[str, str]:
    """The files and folders that a policy's knobs name, by knob; also the knobs of policies that it is composed of."""
    inner = {key: value for key, value in policy.items() if isinstance(value, Mapping) and key != "decoder"}
    groups = {"": policy, **{f"{key}.": value for key, value in inner.items()}}
    named = {f"{group}{knob}": values.get(knob) for group, values in groups.items() for knob in PATH_KNOBS}
    return {knob: path for knob, path in named.items() if isinstance(path, str) and path not in WORDS}


def trained_facts(folder: str) -> dict[str, Any] | None:
    """The configuration of the adapter or heads in this folder, without their base model; None if there are none."""
    for name in CONFIGS:
        if (file := Path(folder).expanduser() / name).is_file():
            return {key: value for key, value in json.loads(file.read_text()).items() if key != "base"}
    return None
