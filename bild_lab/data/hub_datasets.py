"""Rows of a dataset on the Hugging Face hub, or in its local cache when the hub cannot be reached."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bild_lab.data.hub import hub_problem, offline_hub, require_hub
from bild_lab.data.loading import Row, local_rows
from bild_lab.errors import UserError

REMEDY = "give a local copy instead: dataset.path=DIR (a folder or a file: .jsonl .json .csv .tsv .parquet)"


def hub_rows(
    hub_id: str,
    split: str,
    *,
    config: str | None = None,
    data_dir: str | None = None,
    revision: str | None = None,
) -> Iterator[tuple[str, Row]]:
    """Rows of one split, each with where it stands ("wmt/wmt14 row 3").

    Raises UserError when the hub is unreachable and the dataset is not cached (within about 5 s), and
    when the dataset is missing, gated, or has no such config, revision or split.
    """
    options = {"name": config, "data_dir": data_dir, "revision": revision, "split": split}
    if hub_problem() is None:
        dataset = _load(hub_id, options)
    else:
        snapshot = _cached_snapshot(hub_id, data_dir) if data_dir else None
        if snapshot is not None:
            yield from local_rows(snapshot, split)
            return
        dataset = _load_cached(hub_id, options)
    for index, row in enumerate(dataset):
        yield f"{hub_id} row {index}", row


def _load_cached(hub_id: str, options: dict[str, Any]) -> Any:
    """The dataset from the local cache of `datasets`; raises UserError if it is not there."""
    what = f"dataset {hub_id!r}"
    if not _may_be_cached(hub_id):  # looked up first: importing `datasets` takes seconds
        require_hub(what, REMEDY)
    import datasets  # noqa: F401 - its switch must exist before offline_hub turns it

    try:
        with offline_hub():
            return _load(hub_id, options)
    except UserError as error:
        require_hub(f"{what}, whose local cache did not serve ({error.__cause__}),", REMEDY)
        raise


def _load(hub_id: str, options: dict[str, Any]) -> Any:
    import datasets

    try:
        return datasets.load_dataset(hub_id, **options)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        asked = ", ".join(f"{key}={value}" for key, value in options.items() if value is not None)
        raise UserError(f"cannot load dataset {hub_id!r} ({asked}) from the hub: {error}; {REMEDY}") from error


def _may_be_cached(hub_id: str) -> bool:
    """Whether the cache of `datasets` holds anything of this owner, without importing `datasets`."""
    from huggingface_hub import constants

    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets")).expanduser()
    return any(cache.glob(f"{hub_id.split('/')[0]}*"))


def _cached_snapshot(hub_id: str, data_dir: str) -> Path | None:
    """The newest downloaded copy of a dataset's folder.

    `datasets` 5.2 does not find its own cache again when it was loaded with a `data_dir`.
    """
    from huggingface_hub import constants

    snapshots = Path(constants.HF_HUB_CACHE, f"datasets--{hub_id.replace('/', '--')}", "snapshots")
    return max(snapshots.glob(f"*/{data_dir}"), key=lambda folder: folder.stat().st_mtime, default=None)
