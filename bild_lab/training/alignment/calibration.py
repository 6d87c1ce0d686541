"""Calibration data: a target's greedy answers to a dataset, for a drafter to imitate (BiLD §3.5.1, §7.1.1)."""

from __future__ import annotations

import hashlib
import io
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.engine.models.hf import HuggingFaceModel
from bild_lab.errors import UserError, require_whole
from bild_lab.files import write_atomically
from bild_lab.lab.build import flatten
from bild_lab.lab.data.examples import DatasetSpec, Example
from bild_lab.lab.data.local_files import canonical_split
from bild_lab.lab.hashing import content_hash
from bild_lab.lab.measure.environment import environment
from bild_lab.lab.toy_pair import named_checkpoint
from bild_lab.training.alignment.answers import greedy_answers
from bild_lab.training.folder import write_json, writing

MANIFEST, PLAN = "manifest.json", "plan.json"
END, LENGTH = "end", "length"
AGAIN = "what is finished is kept, make room and run the same line again"


@dataclass(frozen=True)
class Answer:
    """One row: a prompt as the tokenizer gets it, and what the target answered.

    answer: without special tokens. answer_token_ids: as emitted, the end token included.
    finish_reason: "end" or, where max_new_tokens cut the answer, "length".
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
class CalibrationJob:
    """What to answer, with what, and where the answers go.

    batch_size: prompts decoded at once. part_size: examples a file, which is what a kill can cost.
    """

    target: HuggingFaceModel
    dataset: DatasetSpec
    examples: tuple[Example, ...]
    max_new_tokens: int
    batch_size: int
    part_size: int
    folder: Path

    def __post_init__(self) -> None:
        require_whole("decoding.max_new_tokens", self.max_new_tokens, 1)
        require_whole("batch_size", self.batch_size, 1)
        require_whole("part_size", self.part_size, 1)

    @cached_property
    def plan(self) -> dict[str, Any]:
        """Everything that decides the rows and how they are cut into parts."""
        checkpoint = self.target.checkpoint
        return {
            "schema": 1,
            "model": {
                "path": checkpoint.path,
                "revision": checkpoint.revision,
                "fingerprint": checkpoint.fingerprint,
                "type": checkpoint.config.model_type,
                "encoder_decoder": checkpoint.encoder_decoder,
                "vocabulary": vocabulary_hash(checkpoint),
            },
            "decoding": {"method": "greedy", "max_new_tokens": self.max_new_tokens, "dtype": dtype_name(self.target)},
            "dataset": asdict(self.dataset),
            "data": content_hash({"examples": [(one.id, one.prompt) for one in self.examples]}),
            "count": len(self.examples),
            "part_size": self.part_size,
        }

    @property
    def parts(self) -> list[range]:
        """The examples of every part."""
        starts = range(0, len(self.examples), self.part_size)
        return [range(start, min(start + self.part_size, len(self.examples))) for start in starts]

    def file(self, part: range) -> Path:
        """SPLIT-FIRST-END.parquet: a local dataset's name, so that `dataset.path` can be this folder."""
        split = re.sub(r"\W+", "_", canonical_split(self.dataset.split))
        return self.folder / f"{split}-{part.start:08d}-{part.stop:08d}.parquet"


@dataclass(frozen=True)
class Calibration:
    """Finished calibration data, whole and as it was written."""

    folder: Path
    manifest: Mapping[str, Any]
    answers: tuple[Answer, ...]

    @property
    def target(self) -> Checkpoint:
        """The model that answered, where it lay then."""
        return named_checkpoint(self.manifest["model"]["path"], self.manifest["model"]["revision"])

    @property
    def dataset(self) -> DatasetSpec:
        return DatasetSpec(**self.manifest["dataset"])


def generate_calibration(
    job: CalibrationJob, processes: PartialState, report: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """Write the parts that are missing, each by one of the processes, and then the manifest; returns it.

    A part appears whole or not at all, so a killed run costs the parts in work and the same call
    does the rest. report: called with the examples this process has done and will do. Raises UserError
    where the folder holds other answers, the disk is full or the batch does not fit into memory.
    """
    missing: list[range] = []
    if processes.is_main_process:
        _require_same_plan(job)
        missing = [part for part in job.parts if _rows(job.file(part)) != len(part)]
        if missing:
            (job.folder / MANIFEST).unlink(missing_ok=True)  # it speaks of all parts
    (missing,) = broadcast_object_list([missing])  # one view of the folder, before anyone writes to it
    mine = missing[processes.process_index :: processes.num_processes]
    done, total = 0, sum(map(len, mine))

    def advance(count: int) -> None:
        nonlocal done
        done += count
        report(done, total)

    for part in mine:
        _write_part(job, part, processes.process_index, advance)
    processes.wait_for_everyone()
    if processes.is_main_process and not (job.folder / MANIFEST).is_file():
        _write_manifest(job)
    processes.wait_for_everyone()
    return json.loads((job.folder / MANIFEST).read_text())


def read_calibration(folder: Path) -> Calibration:
    """The data that `generate_calibration` finished.

    Raises UserError for a folder that is missing, unfinished, changed or empty.
    """
    again = f"make it with: python scripts/generate_calibration.py name={folder.name} model.path=TARGET dataset=…"
    if not folder.is_dir():
        raise UserError(f"no calibration data in {folder}; {again}")
    if not (folder / MANIFEST).is_file():
        parts = len(list(folder.glob("*.parquet")))
        raise UserError(f"the calibration data in {folder} is not finished ({parts} parts, no {MANIFEST}); {again}")
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        answers = tuple(answer for name in manifest["parts"] for answer in _read_part(folder / name))
        digest, count = manifest["hash"], manifest["count"]
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise UserError(f"cannot read the calibration data in {folder}: {error}; {again}") from error
    if len(answers) != count or contents_hash(answers) != digest:
        raise UserError(
            f"the calibration data in {folder} has changed since it was made: wanted {count} rows with hash {digest}, "
            f"got {len(answers)} with {contents_hash(answers)}; {again}"
        )
    if not answers:
        raise UserError(f"the calibration data in {folder} is empty; {again}")
    return Calibration(folder, manifest, answers)


def vocabulary_hash(checkpoint: Checkpoint) -> str:
    """What identifies a tokenizer's pieces and their ids."""
    return content_hash({"pieces": sorted(checkpoint.vocabulary.items(), key=lambda item: item[1])})


def contents_hash(answers: Sequence[Answer]) -> str:
    """SHA-256 over the rows in their order, whatever file holds them."""
    digest = hashlib.sha256()
    for answer in answers:
        digest.update(json.dumps(astuple(answer), ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()


def dtype_name(model: HuggingFaceModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def _require_same_plan(job: CalibrationJob) -> None:
    """Write down what the folder will hold, or raise UserError where it is something else already."""
    file = job.folder / PLAN
    plan = json.loads(json.dumps(job.plan))
    if not file.is_file():
        with writing(job.folder, "the calibration data", AGAIN):
            write_json(file, plan)
        return
    before, now = flatten(json.loads(file.read_text())), flatten(plan)
    moved = {"model.path", "model.revision", "dataset.path"}  # the fingerprint and the data's hash tell
    for key in sorted({*before, *now} - moved):
        if before.get(key) != now.get(key):
            raise UserError(
                f"{job.folder} holds answers with {key} {before.get(key)!r}, now it is {now.get(key)!r}; "
                "choose another name=NAME, or remove the folder"
            )


def _write_part(job: CalibrationJob, part: range, process: int, advance: Callable[[int], None]) -> None:
    examples, checkpoint = [job.examples[index] for index in part], job.target.checkpoint
    sources = [checkpoint.source(example.prompt, job.dataset.max_source_tokens) for example in examples]
    started = time.perf_counter()
    try:
        emitted = greedy_answers(job.target, sources, job.max_new_tokens, job.batch_size, advance)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"batch_size={job.batch_size} does not fit into the memory of {job.target.device}; lower it, "
            "what is finished is kept"
        ) from error
    seconds = time.perf_counter() - started
    rows = [
        Answer(
            example.id,
            example.prompt,
            checkpoint.tokenizer.decode(tokens, skip_special_tokens=True).strip(),
            tokens,
            END if tokens[-1] in checkpoint.end_tokens else LENGTH,
        )
        for example, tokens in zip(examples, emitted, strict=True)
    ]
    table = pa.Table.from_pylist([asdict(row) for row in rows], schema=SCHEMA)
    content = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({"seconds": str(seconds), "process": str(process)}), content)
    with writing(job.file(part), "the calibration data", AGAIN):
        write_atomically(job.file(part), content.getvalue())


def _write_manifest(job: CalibrationJob) -> None:
    """Read everything back, see that each example is there once, and say so."""
    files = [job.file(part) for part in job.parts]
    answers = [answer for file in files for answer in _read_part(file)]
    if [answer.id for answer in answers] != [example.id for example in job.examples]:
        raise UserError(f"the parquet files in {job.folder} are not the dataset's examples in order; remove the folder")
    seconds = sum(float(pq.read_schema(file).metadata[b"seconds"]) for file in files)
    tokens = sum(len(answer.answer_token_ids) for answer in answers)
    metrics = {
        "examples": len(answers),
        "answer_tokens": tokens,
        "cut_by_length": sum(answer.finish_reason == LENGTH for answer in answers),
        "generation_s": seconds,  # of all processes together, over all runs
        "examples_per_s": len(answers) / seconds,  # of one process
        "tokens_per_s": tokens / seconds,
        "batch_size": job.batch_size,
        "environment": environment(job.target.device),
    }
    manifest = {**job.plan, "parts": [file.name for file in files], "hash": contents_hash(answers)}
    with writing(job.folder, "the calibration data", AGAIN):
        write_json(job.folder / "metrics.json", metrics)
        write_json(job.folder / MANIFEST, manifest)  # last: it says finished


def _rows(file: Path) -> int:
    """Rows of a part; 0 where there is none or it cannot be read, say after a power cut."""
    try:
        return pq.read_metadata(file).num_rows
    except (OSError, pa.ArrowException):
        return 0


def _read_part(file: Path) -> Iterator[Answer]:
    for row in pq.read_table(file, columns=SCHEMA.names).to_pylist():
        yield Answer(**row)
