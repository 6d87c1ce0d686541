"""Rows of a dataset on the Hugging Face hub, or in its local cache if the hub cannot be reached."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bild_lab.engine.models.hub import hub_problem, offline_hub, require_hub
from bild_lab.errors import UserError
from bild_lab.lab.data.local_files import Row, local_rows

REMEDY = "give a local copy instead: dataset.path=DIR (a folder or a file: .jsonl .json .csv .tsv .parquet)"
ACCESS = "check its name, its revision and your access (ask for it on the dataset's page, then `hf auth login`)"
CONVERTED = (
    "use the hub's own conversion of it, where CONFIG is a folder of that branch: "
    "dataset.hub_revision=refs/convert/parquet dataset.hub_data_dir=CONFIG"
)


def hub_rows(
    hub_id: str,
    split: str,
    *,
    config: str | None = None,
    data_dir: str | None = None,
    revision: str | None = None,
) -> Iterator[tuple[str, Row]]:
    """Rows of one split, each with its location ("wmt/wmt14 row 3").

    Raises UserError if the hub is unreachable and the cache does not have the complete dataset (within about 5 s), if
    the dataset is missing, gated, a script, or has no such config, revision or split, and if a download stops early or
    a file is damaged.
    """
    if data_dir:
        yield from local_rows(_folder(hub_id, data_dir.strip("/"), revision), split, [config] if config else [])
        return
    options = {"name": config, "revision": revision, "split": split}
    dataset = _load(hub_id, options) if hub_problem() is None else _load_cached(hub_id, options)
    for index, row in enumerate(dataset):
        yield f"{hub_id} row {index}", row


def _folder(hub_id: str, data_dir: str, revision: str | None) -> Path:
    """One folder of a dataset's files, in the hub's cache.

    With a `data_dir`, `datasets` 5.2 does not find its own cache again, and the files alone do not show whether the
    download was complete. `snapshot_download` keeps a list of the files. A cache that was filled in another way has no
    list, and counts as complete.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError

    where: dict[str, Any] = {"revision": revision, "allow_patterns": f"{data_dir}/*"}
    cached_only = hub_problem() is not None
    try:
        snapshot = snapshot_download(hub_id, repo_type="dataset", local_files_only=cached_only, **where)
    except (HTTPError, OSError, ValueError) as error:
        if cached_only:
            require_hub(f"dataset {hub_id!r}, whose local cache lacks a part of {data_dir},", REMEDY)
        raise UserError(_complaint(hub_id, {"data_dir": data_dir, "revision": revision}, error)) from error
    folder = Path(snapshot, data_dir)
    if not folder.is_dir():
        raise UserError(
            f"dataset {hub_id!r} has no folder {data_dir!r} (revision={revision}); correct dataset.hub_data_dir, "
            f"or {REMEDY}"
        )
    return folder


def _load_cached(hub_id: str, options: dict[str, Any]) -> Any:
    """The dataset from the local cache of `datasets`; raises UserError if it is not there."""
    what = f"dataset {hub_id!r}"
    if not _may_be_cached(hub_id):  # first, as importing `datasets` takes seconds
        require_hub(what, REMEDY)
    import datasets  # noqa: F401 - offline_hub changes a setting of this module

    try:
        with offline_hub():
            return _load(hub_id, options)
    except UserError as error:
        require_hub(f"{what}, whose local cache could not be used ({error.__cause__}),", REMEDY)
        raise


def _load(hub_id: str, options: dict[str, Any]) -> Any:
    import datasets
    from huggingface_hub.errors import HTTPError

    try:
        return datasets.load_dataset(hub_id, **options)
    except (datasets.exceptions.DatasetsError, HTTPError, OSError, ValueError, RuntimeError) as error:
        raise UserError(_complaint(hub_id, options, error)) from error


def _complaint(hub_id: str, options: dict[str, Any], error: Exception) -> str:
    """The error message: what could not be loaded, why, and what the user can do."""
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
    from huggingface_hub.errors import HTTPError, RepositoryNotFoundError, RevisionNotFoundError
    from pyarrow import ArrowException

    reason, remedy = error, REMEDY
    if isinstance(error, DatasetNotFoundError | RepositoryNotFoundError | RevisionNotFoundError):
        remedy = f"{ACCESS}, or {REMEDY}"
    elif isinstance(error, DatasetGenerationError | ArrowException):
        reason = error.__cause__ or error  # the message of `datasets` does not name the file
        remedy = f"if its file is damaged, remove {_cache(hub_id)} and repeat the command, or {REMEDY}"
    elif "scripts are no longer supported" in str(error):
        remedy = f"{CONVERTED}; or {REMEDY}"
    elif isinstance(error, HTTPError) or "Consistency check failed" in str(error):
        remedy = f"the download stopped early; repeat the command, or {REMEDY}"
    asked = ", ".join(f"{key}={value}" for key, value in options.items() if value is not None)
    return f"cannot load dataset {hub_id!r} ({asked}) from the hub: {' '.join(str(reason).split())}; {remedy}"


def _cache(hub_id: str) -> Path:
    """The folder in which the hub's library keeps its downloads of a dataset."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE, f"datasets--{hub_id.replace('/', '--')}")


def _may_be_cached(hub_id: str) -> bool:
    """Whether the cache of `datasets` holds anything of this owner, without importing `datasets`."""
    from huggingface_hub import constants

    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets")).expanduser()
    return any(cache.glob(f"{hub_id.split('/')[0]}*"))
