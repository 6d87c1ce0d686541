"""A checkpoint in another engine's format: converted once, then kept in a cache."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock

from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.engine.peers.process import SCRIPT, convert
from bild_lab.errors import UserError
from bild_lab.files import cache_folder

log = logging.getLogger(__name__)


def converted(checkpoint: Checkpoint, engine: str, versions: Mapping[str, str], cache: Path | None = None) -> Path:
    """The folder of the converted checkpoint. The first call for these weights and versions converts, in seconds.

    The weights keep their precision: the engine rounds them, if at all, as it loads. cache: where to keep it, by
    default the cache of bild_lab. The weights of a checkpoint on the hub must have been read once, so that they are in
    the hub's cache. Raises UserError if the engine cannot convert the checkpoint.
    """
    folder = (cache or cache_folder() / "peers") / conversion_name(checkpoint, engine, versions)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            log.warning("converting %s for %s, once", checkpoint.path, engine)
            _convert(checkpoint, engine, folder)
    return folder


def conversion_name(checkpoint: Checkpoint, engine: str, versions: Mapping[str, str]) -> str:
    """Names a conversion by everything that decides its content."""
    decisive = (
        checkpoint.fingerprint,
        *(f"{name} {version}" for name, version in versions.items()),
        SCRIPT.read_text(),
    )
    return f"{engine}-{hashlib.sha256(chr(0).join(decisive).encode()).hexdigest()[:16]}"


def _convert(checkpoint: Checkpoint, engine: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary) / "made"
        job = {
            "engine": engine,
            "encoder_decoder": checkpoint.encoder_decoder,
            "source": str(checkpoint.files),
            "folder": str(made),
        }
        problem = convert(job)
        if problem is not None:
            raise UserError(f"{engine} cannot convert {checkpoint.path}: {problem}; use another policy for this model")
        os.rename(made, folder)
