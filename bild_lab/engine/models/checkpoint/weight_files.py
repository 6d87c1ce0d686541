"""Which files of a checkpoint hold its weights: those that `from_pretrained` of Transformers reads,
and no others.

A folder may hold one file, shards and their index, pickles, and what a training left, beside each
other. Transformers takes the first of `ORDER` that is there, unless `transformers_weights` in
config.json names another file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from bild_lab.errors import UserError

SAFE = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
ORDER = (*SAFE, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
INDEX_SUFFIX = ".index.json"
SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".pkl",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".ot",
    INDEX_SUFFIX,
)
ADAPTER = "adapter_config.json"
# how torch.distributed.checkpoint names its files
TRAINING_SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors$")


def opened_weight_file(names: Collection[str], named: str | None = None) -> str | None:
    """The file that Transformers opens, one with weights or an index of shards; None if there is
    none.

    names: all files of the checkpoint. named: `transformers_weights` of its config.json.
    """
    order = ORDER if named is None else (named,)
    return next((name for name in order if name in names), None)


def is_pickled(name: str) -> bool:
    """Whether this file, or the shards of this index, are pickles."""
    return name.removesuffix(INDEX_SUFFIX).endswith(".bin")


def named_in_config(file: Path | str | None) -> str | None:
    """The weight file that a config.json names; None if it names none or cannot be read."""
    try:
        settings = {} if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return settings.get("transformers_weights") if isinstance(settings, dict) else None


def in_folder(folder: Path) -> list[str]:
    """The weight files of a folder by their names in it, an index before its shards; empty if there
    are none.

    Raises UserError for an index that cannot be read.
    """
    named = named_in_config(folder / "config.json")
    candidates = ORDER if named is None else (named,)
    weight_file = next((name for name in candidates if (folder / name).is_file()), None)
    if weight_file is None:
        return []
    return (
        [weight_file, *shards_of(folder / weight_file)]
        if weight_file.endswith(INDEX_SUFFIX)
        else [weight_file]
    )


def shards_of(index: Path) -> list[str]:
    """The names of the files that an index lists. Raises UserError for one that cannot be read."""
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"cannot read {index}: it must list the shard of each weight in weight_map; copy it"
            " again from where the model came from, or remove it if the weights are in one file"
        ) from error


def fetched(location: str, **options: Any) -> Sequence[str]:
    """Paths of the safetensors files with a checkpoint's weights, from the hub if need be; empty if
    it has none.

    location: a folder or a hub id. options: `revision` and others of `from_pretrained`.
    """
    options["_raise_exceptions_for_missing_entries"] = False
    named = named_in_config(cached_file(location, "config.json", **options))
    for name in SAFE if named is None else (named,):
        if (file := cached_file(location, name, **options)) is not None:
            if name.endswith(INDEX_SUFFIX):
                return get_checkpoint_shard_files(location, file, **options)[0]
            return [] if is_pickled(name) else [file]
    return []


def holds_weights(name: str) -> bool:
    """Whether a file of this name holds weights, or a training's state, of any library; or is an
    index of such.
    """
    return name.endswith(SUFFIXES)


def require_weights(path: str, names: Collection[str], named: str | None) -> str:
    """The file that Transformers opens. Raises UserError where there is none, or where it adds
    others to it.

    path: of the checkpoint, for messages. names, named: as in `opened_weight_file`.
    """
    require_no_adapter(path, names)
    if shards := sorted(name for name in names if TRAINING_SHARD.match(name)):
        raise UserError(
            f"{path} has {shards[0]}, a shard of a distributed training, which Transformers reads"
            " in place of model.safetensors; move such shards elsewhere, or save the model anew"
            " with save_pretrained"
        )
    if (weight_file := opened_weight_file(names, named)) is not None:
        return weight_file
    expected = (
        " or ".join(SAFE)
        if named is None
        else f"{named}, as transformers_weights in its config.json says"
    )
    beside = sorted(name for name in names if holds_weights(name))
    got = f"got {', '.join(beside[:3])}" if beside else "got no file with weights"
    raise UserError(
        f"{path} has no weights that Transformers reads: wanted {expected}, {got}; rename the file,"
        " or save the model anew with save_pretrained"
    )


def require_no_adapter(path: str, names: Collection[str]) -> None:
    """Raise UserError for a checkpoint with an adapter, which Transformers reads with peft, and
    without leaves out.
    """
    if ADAPTER not in names:
        return
    remedy = "merge it into its base with peft's merge_and_unload first"
    if "config.json" in names:
        raise UserError(
            f"{path} has an adapter beside its weights; {remedy}, or remove {ADAPTER} to decode"
            " without it"
        )
    raise UserError(f"{path} is an adapter; {remedy}")
