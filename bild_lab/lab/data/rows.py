"""Rows of a dataset: which files of a folder hold a split, and the Hugging Face hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from bild_lab.engine.models.checkpoint.hub import (
    hub_problem,
    note_commit,
    offline_hub,
    require_hub,
)
from bild_lab.errors import UserError
from bild_lab.files import pin_of
from bild_lab.lab.data.formats import (
    SUFFIXES,
    Row,
    as_written,
    labels,
    plain_stem,
    read_rows,
    suffix_of,
)

SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
# files that `datasets` and the hub write next to the data
METADATA_FILES = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"}
REMEDY = f"give a local copy instead: dataset.path=DIR (a folder or a file: {' '.join(SUFFIXES)})"

# older versions of datasets wrote a fingerprint behind it, which is another for each shard
_SHARD = re.compile(r"(\d+)-of-(\d+)(?:-[0-9a-f]{16}(?=\.))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def canonical_split(split: str) -> str:
    """The standard name of a split: "val", "valid" and "dev" are "validation".

    Other names are unchanged.
    """
    return SPLIT_WORDS.get(split.lower(), split)


def local_rows(path: Path, split: str, subfolders: Sequence[str] = ()) -> Iterator[tuple[str, Row]]:
    """Rows of one split of a local dataset, each with its location ("FILE line 3").

    path: a file, or a folder in the hub's layout (`test.jsonl`, `data/test-00000-of-00001.parquet`,
    `CONFIG/test/0000.parquet`), or with a file for each config (`CONFIG.jsonl`). subfolders:
    possible names of a config's folder or file; the first folder that exists is used. Raises
    UserError for a missing path or split, for files that cannot be read, and for a shard without
    rows.
    """
    files = find_split_files(path, split, subfolders)
    for file in files:
        empty = True
        for row in read_rows(file):
            empty = False
            yield row
        if empty and len(files) > 1:
            raise UserError(
                f"{file} has no rows, but is one of {len(files)} shards; copy it again, or"
                " remove it"
            )


def find_split_files(path: Path, split: str, subfolders: Sequence[str] = ()) -> list[Path]:
    """The data files of `split`, in the order of their shards.

    A single file whose name contains no split (`question.jsonl`) is used for any split. Raises
    UserError if the path, the split or one of its shards is missing, or if two datasets are mixed.
    """
    if re.search(r"[\[+%:]", split):
        raise UserError(
            f"dataset.split={split!r} is a slice or a sum, which local files do not have; name one"
            " split, and take some of its rows by dataset.skip and dataset.limit"
        )
    if not path.exists():
        raise UserError(
            f"dataset.path {path} does not exist; give a folder or a file ({' '.join(SUFFIXES)})"
        )
    root, files = _data_files(path, subfolders) if path.is_dir() else (path.parent, [path])
    if not files or suffix_of(files[0]) is None:
        raise UserError(
            f"no data files at {path}: wanted {' '.join(SUFFIXES)}; point dataset.path at them"
        )
    split = canonical_split(split)
    by_split: dict[str | None, list[Path]] = {}
    for file in files:
        by_split.setdefault(split_of(file.relative_to(root), split), []).append(file)
    if split in by_split:
        if path.is_dir():
            _require_one_dataset(root, split, by_split[split])
        return by_split[split]
    names_no_split = by_split.keys() == {None}
    is_one_dataset = len(files) == 1 or all(_SHARD.search(file.name) for file in files)
    if names_no_split and is_one_dataset:
        if path.is_dir():
            _require_one_dataset(root, split, files)
            _require_configuration(root, files, subfolders)
        return files
    raise _no_split(path, split, by_split)


def _no_split(path: Path, split: str, by_split: dict[str | None, list[Path]]) -> UserError:
    """The error for files of which none is of the split. by_split: the files by the split that their
    names say, None for those that say none.
    """
    if split_names := sorted(name for name in by_split if name is not None):
        return UserError(
            f"{path} has no split {split!r}, only {', '.join(split_names)}; set dataset.split to"
            " one of them"
        )
    names = ", ".join(file.name for file in by_split[None][:5])
    return UserError(
        f"cannot tell which file under {path} is split {split!r}, got {names}; "
        f"name it {split}.jsonl or point dataset.path at one file"
    )


def _data_files(folder: Path, subfolders: Sequence[str]) -> tuple[Path, list[Path]]:
    """Where the data files of a folder begin, and the files, sorted.

    Of several configurations those of `subfolders`: the first such folder, else the files that are
    named so.
    """
    root = next((folder / name for name in subfolders if (folder / name).is_dir()), folder)
    data_files = (
        file for file in root.rglob("*") if suffix_of(file) and not _beside_data(file.name)
    )
    visible = (
        file
        for file in data_files
        if not any(path_part.startswith(".") for path_part in file.relative_to(root).parts)
    )
    files = sorted((file for file in visible if file.is_file()), key=_in_words_and_numbers)
    if root == folder:
        of_config = [
            file for file in files if file.parent == folder and plain_stem(file) in subfolders
        ]
        files = of_config or files
    return root, files


def _in_words_and_numbers(file: PurePath) -> list[tuple[bool, int, str]]:
    """A path's words and numbers, by which shard 2 comes before shard 10."""
    return [
        (word.isdecimal(), int(word) if word.isdecimal() else 0, word)
        for word in re.split(r"(\d+)", str(file))
    ]


def split_of(relative: PurePath, requested_split: str) -> str | None:
    """The split in a file's name, else the split in the nearest folder's name; None if there is
    none.
    """
    for path_part in (relative.stem, *reversed(relative.parent.parts)):
        for word in re.split(r"[^a-z0-9]+", path_part.lower()):
            if word in SPLIT_WORDS:
                return SPLIT_WORDS[word]
            if word == requested_split.lower():  # a split with a non-standard name
                return requested_split
    return None


def _beside_data(name: str) -> bool:
    """Whether `datasets` and the hub write a file of this name next to the data."""
    return name in METADATA_FILES or (name.startswith("cache-") and name.endswith(".arrow"))


def _require_configuration(
    root: Path, files: Sequence[Path], configurations: Sequence[str]
) -> None:
    """Raise UserError for a folder whose only file, named neither by a split nor as a shard, may be
    of another configuration than those that were asked for.
    """
    file = files[0]
    is_named = _SHARD.search(file.name) or {plain_stem(file), root.name} & set(configurations)
    if configurations and file.parent == root and not is_named:
        raise UserError(
            f"{root} has no file or folder of the configuration {configurations[-1]}, but"
            f" {file.name}; if that is the one, set dataset.path={file}"
        )


def _require_one_dataset(root: Path, split: str, files: Sequence[Path]) -> None:
    """Raise UserError unless the files are the shards of one dataset: two configs, years or formats
    must not be mixed, and no shard may be missing.
    """
    names = {file: re.sub(r"\d+", "#", _SHARD.sub("0-of-0", file.name)) for file in files}
    families = {str(file.relative_to(root).with_name(name)) for file, name in names.items()}
    if len(families) > 1:
        families_text = ", ".join(sorted(families))
        raise UserError(
            f"{root} holds split {split!r} more than once ({families_text}); point dataset.path at"
            " one of them"
        )
    shards = [shard for file in files if (shard := _SHARD.search(file.name))]
    if shards and not _are_counted(sorted(int(shard[1]) for shard in shards), int(shards[0][2])):
        raise UserError(
            f"{files[0]} is one of {int(shards[0][2])} shards, got {len(files)}; copy the others"
            " next to it, and leave no shard there twice"
        )
    if len(files) > 1 and not shards and not _count_up(files):
        raise UserError(
            f"{root} holds split {split!r} in {', '.join(file.name for file in files[:5])}, whose"
            " numbers are not those of shards, 0, 1, 2 and so on; copy the others next to them, or"
            " point dataset.path at one of them"
        )


def _count_up(files: Sequence[Path]) -> bool:
    """Whether one number in the names counts the files, from 0 or 1, or two say from which row to
    which, as those of calibrations do. Years do neither.
    """
    numbers = [tuple(map(int, re.findall(r"\d+", file.name))) for file in files]
    counting = [place for place in zip(*numbers, strict=True) if len(set(place)) > 1]
    if len(counting) == 1:
        return _are_counted(sorted(counting[0]), len(files))
    if len(counting) != 2:
        return False
    ranges = sorted(zip(*counting, strict=True))
    steps = {start - end for (_, end), (start, _) in pairwise(ranges)}
    return ranges[0][0] == 0 and steps in ({0}, {1})  # up to a row, or to the one before


def _are_counted(numbers: list[int], count: int) -> bool:
    return numbers in (list(range(count)), list(range(1, count + 1)))


def hub_rows(
    hub_id: str,
    split: str,
    *,
    config: str | None = None,
    data_dir: str | None = None,
    revision: str | None = None,
) -> Iterator[tuple[str, Row]]:
    """Rows of one split of a dataset on the hub, or in its local cache, each with its location
    ("wmt/wmt14 row 3").

    With `data_dir` only the files of the split are downloaded; without it `datasets` prepares every
    split. A revision that `pins.yaml` pins is read at its commit. Raises UserError if the hub is
    unreachable and the cache does not have the complete dataset (within about 5 s), if the dataset
    is missing, gated, a script, or has no such config, revision or split, and if a download stops
    early or a file is damaged.
    """
    pin = pin_of("datasets", hub_id, revision)
    commit = revision if pin is None else pin["revision"]
    if data_dir:
        snapshot, folder = _folder(hub_id, data_dir.strip("/"), split, commit)
        note_commit(hub_id, revision, snapshot.name)
        yield from local_rows(folder, split, [config] if config else [])
        return
    dataset = _load(hub_id, {"name": config, "revision": commit, "split": split})
    if (prepared_from := _prepared_from(dataset)) is not None:
        note_commit(hub_id, revision, prepared_from)
    label, written = labels(dataset.features or {}), as_written(dataset.data.schema)
    for index, row in enumerate(dataset):
        yield f"{hub_id} row {index}", label(written(row))


def _folder(hub_id: str, data_dir: str, split: str, revision: str | None) -> tuple[Path, Path]:
    """A commit's folder in the hub's cache, and in it one folder of a dataset's repository with the
    split's files, or one file.

    With a `data_dir`, `datasets` 5.2 does not find its own cache again, and the files alone do not
    show whether the download was complete. `snapshot_download` keeps a list of the files. A cache
    that was filled in another way has no list, and counts as complete.
    """
    from huggingface_hub import HfApi, get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, HTTPError

    where: dict[str, Any] = {"repo_type": "dataset", "revision": revision}
    cached_only = hub_problem() is not None
    try:
        if cached_only:
            listed = [entry.path for entry in get_cached_repo_tree(hub_id, **where)]
        else:
            listed = HfApi().list_repo_files(hub_id, **where)
        requested_paths = _files_of_split(hub_id, listed, data_dir, canonical_split(split))
    except CachedRepoTreeNotFoundError:
        requested_paths = [data_dir, f"{data_dir}/*"]
    except (HTTPError, OSError) as error:
        raise UserError(
            _complaint(hub_id, {"data_dir": data_dir, "revision": revision}, error)
        ) from error
    try:
        snapshot = snapshot_download(
            hub_id, local_files_only=cached_only, allow_patterns=requested_paths, **where
        )
    except (HTTPError, OSError, ValueError) as error:
        if cached_only:
            require_hub(
                f"dataset {hub_id!r}, whose local cache lacks a part of {data_dir},", REMEDY
            )
        raise UserError(
            _complaint(hub_id, {"data_dir": data_dir, "revision": revision}, error)
        ) from error
    return Path(snapshot), Path(snapshot, data_dir)


def _files_of_split(hub_id: str, listed: Sequence[str], data_dir: str, split: str) -> list[str]:
    """The paths of a split in a folder of a repository; the only file, where its name has no split,
    or is given.

    Raises UserError if the folder or the split is not there.
    """
    if data_dir in listed:
        return [data_dir]
    paths = [PurePosixPath(path) for path in listed if path.startswith(f"{data_dir}/")]
    splits = {
        path: split_of(path.relative_to(data_dir), split) for path in paths if suffix_of(path)
    }
    if not splits:
        raise UserError(
            f"dataset {hub_id!r} has no folder {data_dir!r}; correct dataset.hub_data_dir, or"
            f" {REMEDY}"
        )
    paths_of_split = (
        splits
        if set(splits.values()) == {None}
        else [path for path in splits if splits[path] == split]
    )
    if not paths_of_split:
        split_names = ", ".join(sorted({name for name in splits.values() if name is not None}))
        raise UserError(
            f"dataset {hub_id!r} has no split {split!r} in {data_dir}, only {split_names}; set"
            " dataset.split to one of them"
        )
    return [str(path) for path in paths_of_split]


def _load(hub_id: str, options: dict[str, Any]) -> Any:
    """The dataset at the revision's commit, from the local cache if the hub cannot be reached."""
    import datasets
    from huggingface_hub.errors import HTTPError

    offline = hub_problem() is not None
    try:
        if offline:
            commit = _commit(hub_id, options["revision"], cached_only=True)
            with offline_hub():
                return _prepared(hub_id, options["name"], options["revision"], commit).as_dataset(
                    split=options["split"]
                )
        dataset = datasets.load_dataset(hub_id, **options)
        commit = _commit(hub_id, options["revision"], cached_only=False)
        # it gives the newest that it has prepared where it cannot find the revision
        if (prepared_from := _prepared_from(dataset)) not in (None, commit):
            raise ValueError(f"it is at {commit}, and the cache gave {prepared_from}")
        return dataset
    except (
        datasets.exceptions.DatasetsError,
        HTTPError,
        OSError,
        ValueError,
        RuntimeError,
    ) as error:
        if offline:
            require_hub(
                f"dataset {hub_id!r}, whose local cache could not be used ({error}),", REMEDY
            )
        raise UserError(_complaint(hub_id, options, error)) from error


def _commit(hub_id: str, revision: str | None, cached_only: bool) -> str | None:
    """The commit of a revision: the hub's, or offline the one that this function has read last;
    None if it has read none.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    try:
        snapshot = snapshot_download(
            hub_id,
            repo_type="dataset",
            revision=revision,
            allow_patterns=["README.md"],  # the commit is kept with any file, or none
            local_files_only=cached_only,
        )
    except LocalEntryNotFoundError:
        if not cached_only:
            raise
        return None
    return Path(snapshot).name


def _prepared(hub_id: str, config: str | None, revision: str | None, commit: str | None) -> Any:
    """The dataset of a commit that `datasets` has prepared. Its own `load_dataset` takes the newest,
    whatever the revision, where the hub cannot be reached (seen in datasets 5.2).

    commit: of the revision; None if it is not known: then the only one that there is counts as main.
    Raises ValueError unless there is one such dataset.
    """
    from datasets import config as settings
    from datasets.naming import camelcase_to_snakecase
    from datasets.packaged_modules.cache.cache import Cache

    owner, _, name = hub_id.rpartition("/")
    place = "___".join(filter(None, (owner, camelcase_to_snakecase(name))))
    folders = [
        folder
        for folder in Path(settings.HF_DATASETS_CACHE, place).glob(f"{config or '*'}/*/*")
        # others were made of some files alone
        if _configuration_of(folder) == folder.parts[-3]
    ]
    matching = [folder for folder in folders if folder.name == commit]
    if commit is None and revision in (None, "main"):
        matching = folders
    if len(matching) != 1:
        prepared_names = ", ".join(
            f"{folder.name} ({folder.parts[-3]})" for folder in sorted(folders)
        )
        raise ValueError(
            f"it holds {prepared_names or 'nothing'}, and not one dataset of {revision or 'main'}; a commit is"
            " chosen by dataset.hub_revision, a configuration by dataset.hub_config"
        )
    configuration, version, folder_hash = matching[0].parts[-3:]
    return Cache(
        repo_id=hub_id,
        dataset_name=name,
        config_name=configuration,
        version=version,
        hash=folder_hash,
    )


def _prepared_from(dataset: Any) -> str | None:
    """The commit that `datasets` has named the folder of a dataset after; None if it has not."""
    for cached in dataset.cache_files[:1]:
        folder_name = Path(cached["filename"]).parent.name
        if _COMMIT.fullmatch(folder_name):
            return folder_name
    return None


def _configuration_of(folder: Path) -> str | None:
    """The configuration of a prepared dataset; None for a folder that is none."""
    file = folder / "dataset_info.json"
    return json.loads(file.read_text(encoding="utf-8"))["config_name"] if file.is_file() else None


def _complaint(hub_id: str, options: dict[str, Any], error: Exception) -> str:
    """The error message: what could not be loaded, why, and what the user can do."""
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
    from huggingface_hub import constants
    from huggingface_hub.errors import HTTPError, RepositoryNotFoundError, RevisionNotFoundError
    from pyarrow import ArrowException

    reason, remedy = error, ""
    if isinstance(error, DatasetNotFoundError | RepositoryNotFoundError | RevisionNotFoundError):
        remedy = (
            "check its name, its revision and your access (ask on the dataset's page, then `hf auth"
            " login`), or "
        )
    elif isinstance(error, DatasetGenerationError | ArrowException):
        reason = error.__cause__ or error  # the message of `datasets` does not name the file
        cache = Path(constants.HF_HUB_CACHE, f"datasets--{hub_id.replace('/', '--')}")
        remedy = f"if its file is damaged, remove {cache} and repeat the command, or "
    elif "scripts are no longer supported" in str(error):
        remedy = (
            "use the hub's own conversion of it, where CONFIG is a folder of that branch: "
            "dataset.hub_revision=refs/convert/parquet dataset.hub_data_dir=CONFIG; or "
        )
    elif isinstance(error, HTTPError) or "Consistency check failed" in str(error):
        remedy = "the download stopped early; repeat the command, or "
    options_text = ", ".join(
        f"{key}={value}" for key, value in options.items() if value is not None
    )
    return (
        f"cannot load dataset {hub_id!r} ({options_text}) from the hub:"
        f" {' '.join(str(reason).split())};"
        f" {remedy}{REMEDY}"
    )
