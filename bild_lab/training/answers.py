"""A model's greedy answers: decoding them, and their rows and manifest on disk (BiLD §3.5.1,
§7.1.1).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bild_lab.engine.batch_decoding import (
    MEMORY_SHARE,
    auto_batch_size,
    decode_batch,
    longest,
)
from bild_lab.engine.batch_scheduler import Batch
from bild_lab.engine.methods.hf_generation import HuggingFaceGenerate
from bild_lab.engine.methods.vanilla import target_alone
from bild_lab.engine.models.checkpoint.chat import CompleteText
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.device import free_bytes
from bild_lab.engine.models.native.layers import cache_bytes
from bild_lab.engine.protocols import Method
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.session import LoadedModel
from bild_lab.engine.stop import StopStrings
from bild_lab.errors import UserError
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.measure.cost import has_cost_model
from bild_lab.lab.store.hashing import content_hash

MANIFEST = "manifest.json"
END, STOP, LENGTH = "end", "stop", "length"


@dataclass(frozen=True)
class TargetAnswer:
    """One row: a prompt as the tokenizer gets it, and the target's answer.

    answer: without special tokens. answer_token_ids: as emitted, the end token included.
    finish_reason: "end", or "stop" if a stop string did, or "length" if max_new_tokens cut the
    answer.
    """

    id: str
    prompt: str
    answer: str
    answer_token_ids: list[int]
    finish_reason: str


SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("prompt", pa.string()),
        ("answer", pa.string()),
        ("answer_token_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
    ]
)


@dataclass(frozen=True)
class Calibration:
    """Finished calibration data, complete and unchanged since it was written. folder: where from,
    for messages.
    """

    folder: Path
    manifest: Mapping[str, Any]
    answers: tuple[TargetAnswer, ...]

    @property
    def target(self) -> Checkpoint:
        """The model that answered, at the path that it had then."""
        return Checkpoint(self.manifest["model"]["path"], self.manifest["model"]["revision"])

    @property
    def dataset(self) -> DatasetSpec:
        return DatasetSpec(**self.manifest["dataset"])

    @property
    def dataset_words(self) -> Sequence[str]:
        """The words that chose the dataset, for a command that decodes on it; a stand-in where they
        are not known.
        """
        return self.manifest.get("dataset_words") or ("dataset=NAME",)


def read_calibration(folder: Path) -> Calibration:
    """Finished calibration data.

    Raises UserError for a folder that is missing, unfinished or changed.
    """
    remedy = (
        f"make it with: python scripts/generate_calibration.py name={folder.name} model.path=TARGET"
        " dataset=…"
    )
    if not folder.is_dir():
        raise UserError(f"no calibration data in {folder}; {remedy}")
    if not (folder / MANIFEST).is_file():
        parts = len(list(folder.glob("*.parquet")))
        raise UserError(
            f"the calibration data in {folder} is not finished ({parts} parts, no {MANIFEST});"
            f" {remedy}"
        )
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        answers = tuple(answer for name in manifest["parts"] for answer in read_part(folder / name))
        digest, count = manifest["hash"], manifest["count"]
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise UserError(
            f"cannot read the calibration data in {folder}: {error}; {remedy}"
        ) from error
    if len(answers) != count or contents_hash(answers) != digest:
        raise UserError(
            f"the calibration data in {folder} has changed since it was made: wanted {count} rows"
            f" with hash {digest}, got {len(answers)} with {contents_hash(answers)}; {remedy}"
        )
    calibration = Calibration(folder, manifest, answers)
    return (
        _with_complete_prompts(calibration) if calibration.dataset.has_own_template else calibration
    )


def _with_complete_prompts(calibration: Calibration) -> Calibration:
    """The answers to prompts in the model's own template, which writes all special tokens."""
    answers = (
        replace(answer, prompt=CompleteText(answer.prompt)) for answer in calibration.answers
    )
    return replace(calibration, answers=tuple(answers))


def joined(calibrations: Sequence[Calibration]) -> Calibration:
    """The answers of several calibrations as those of one, in turn, such as BiTA's to five data
    sets (Table 5).

    Raises UserError for answers of several models or to prompts cut differently.
    """
    reference = calibrations[0]
    if len(calibrations) == 1:
        return reference
    fingerprint = reference.manifest["model"]["fingerprint"]
    limit = reference.dataset.max_source_tokens
    for calibration in calibrations[1:]:
        if calibration.manifest["model"]["fingerprint"] != fingerprint:
            raise UserError(
                f"calibration must be the answers of one model, got {reference.folder} and"
                f" {calibration.folder}"
            )
        if calibration.dataset.max_source_tokens != limit:
            raise UserError(
                f"calibration must have one dataset.max_source_tokens, got {limit} in"
                f" {reference.folder} and {calibration.dataset.max_source_tokens} in"
                f" {calibration.folder}; generate one of them anew"
            )
    names = dict.fromkeys(calibration.dataset.name for calibration in calibrations)
    hashes = [calibration.manifest["hash"] for calibration in calibrations]
    together = {
        "dataset": {**reference.manifest["dataset"], "name": " + ".join(names)},
        "hash": content_hash({"several": hashes}),
        "count": sum(calibration.manifest["count"] for calibration in calibrations),
        "commits": {
            name: commit
            for calibration in calibrations
            for name, commit in calibration.manifest.get("commits", {}).items()
        },
    }
    # the ids of two data sets may be the same
    answers = tuple(
        replace(answer, id=f"{place}:{answer.id}")
        for place, calibration in enumerate(calibrations, start=1)
        for answer in calibration.answers
    )
    folders = ", ".join(str(calibration.folder) for calibration in calibrations)
    return Calibration(Path(folders), {**reference.manifest, **together}, answers)


def read_part(file: Path) -> Iterator[TargetAnswer]:
    for row in pq.read_table(file, columns=SCHEMA.names).to_pylist():
        yield TargetAnswer(**row)


def contents_hash(answers: Sequence[TargetAnswer]) -> str:
    """SHA-256 over the rows in their order, however they are divided into files."""
    digest = hashlib.sha256()
    for answer in answers:
        digest.update(json.dumps(astuple(answer), ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()


def greedy_answers(
    model: LoadedModel,
    sources: Sequence[Source],
    max_new_tokens: int,
    batch_size: int,
    advance: Callable[[int], None] = lambda count: None,
    stop: Sequence[str] = (),
) -> list[list[int]]:
    """The tokens that `vanilla` emits for each prompt, decoded in batches, the longest prompts
    first.

    They are vanilla's on the CPU kernels in every precision, and on our own decoders in float32. A
    model on hf answers by batched `generate`. batch_size: at most; fewer where their caches would
    not fit into the free memory, of GPUs alone on hf. advance: called with 1 after each answer.
    stop: stop strings, which end an answer too.
    """
    order = sorted(range(len(sources)), key=lambda index: -sources[index].length)
    stops = StopStrings(tuple(stop), model.checkpoint) if stop else None
    requests = []
    for index in order:
        limits = Limits(
            len(sources[index].prompt), max_new_tokens, model.checkpoint.end_tokens, stop=stops
        )
        requests.append(Request(sources[index].to(model.device), limits))
    method: Method = HuggingFaceGenerate(model)
    if model.engine == "hf":
        batch_size = min(batch_size, texts_that_fit(model, requests) or batch_size)
    else:
        method = target_alone(model)
        model.load()
        # fewer where their caches would not fit
        batch_size = auto_batch_size(method, [model], requests, batch_size)
    decoded = decode_batch(method, requests, Batch(batch_size), lambda index: advance(1))
    answers: list[list[int]] = [[]] * len(sources)
    for index, text in zip(order, decoded, strict=True):
        answers[index] = text.token_ids
    return answers


def texts_that_fit(model: LoadedModel, requests: Sequence[Request]) -> int | None:
    """How many texts' caches the GPUs of a model on hf still hold, one at least, each with its share
    of the layers; None on a CPU, and for a model whose cache has no known width.
    """
    config = model.checkpoint.config
    if model.device.type != "cuda" or not has_cost_model(config):
        return None
    model.load()
    devices = {weight.device for weight in model.module.parameters() if weight.is_cuda}
    room = MEMORY_SHARE * len(devices) * min(map(free_bytes, devices))
    return max(1, int(room / cache_bytes(config, model.dtype, *longest(requests))))
