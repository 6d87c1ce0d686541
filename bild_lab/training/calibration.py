"""Generate calibration data: a model's greedy answers to a dataset, in parts that survive a
kill.
"""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bild_lab.engine.methods.lookup.ngram import vocabulary_hash
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.checkpoint.hub import commits_read
from bild_lab.engine.models.device import dtype_name, within_memory
from bild_lab.engine.session import LoadedModel
from bild_lab.engine.stop import StopStrings, before_stop
from bild_lab.errors import require_whole
from bild_lab.files import write_atomically, write_json
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.data.prompts import Example
from bild_lab.lab.data.rows import canonical_split
from bild_lab.lab.point.environment import environment
from bild_lab.lab.store.hashing import content_hash
from bild_lab.lab.store.inputs import require_same_settings
from bild_lab.ranks import launched
from bild_lab.training.answers import (
    END,
    LENGTH,
    MANIFEST,
    SCHEMA,
    STOP,
    TargetAnswer,
    contents_hash,
    greedy_answers,
    read_part,
)
from bild_lab.training.folder import writing
from bild_lab.training.start import require_no_languages

_WHAT = "the calibration data"
_REMEDY = "finished parts are kept; make room and run the same command again"
# fingerprint and data hash identify the contents
_MOVED = frozenset({"model.path", "model.revision", "dataset.path"})


@dataclass(frozen=True)
class CalibrationJob:
    """What to answer, with which model, and the folder for the answers.

    batch_size: prompts decoded at once. part_size: examples of one file; a kill loses at most one
    file per process.
    dataset_words: of the command that chose the dataset. stop: stop strings, which end an answer.
    """

    target: LoadedModel
    dataset: DatasetSpec
    examples: tuple[Example, ...]
    max_new_tokens: int
    batch_size: int
    part_size: int
    folder: Path
    dataset_words: Sequence[str] = ()
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_whole("decoding.max_new_tokens", self.max_new_tokens, 1)
        require_whole("batch_size", self.batch_size, 1)
        require_whole("part_size", self.part_size, 1)
        require_no_languages(self.target.checkpoint)
        if self.stop:
            StopStrings(self.stop, self.target.checkpoint)  # refuses
        if self.dataset.has_own_template and launched().is_main:
            self.target.checkpoint.warn_of_unknown_end(self.stop)

    @cached_property
    def plan(self) -> dict[str, Any]:
        """Everything that decides the rows and how they are divided into parts."""
        checkpoint, dtype = self.target.checkpoint, dtype_name(self.target.dtype)
        stop = {"stop": sorted(self.stop)} if self.stop else {}
        return {
            "schema": 1,
            "model": {
                "path": checkpoint.path,
                "revision": checkpoint.revision,
                "fingerprint": checkpoint.fingerprint,
                "type": checkpoint.config.model_type,
                "encoder_decoder": checkpoint.encoder_decoder,
                "vocabulary": vocabulary_hash(checkpoint.vocabulary),
            },
            "decoding": {
                "method": "greedy",
                "max_new_tokens": self.max_new_tokens,
                "dtype": dtype,
                **stop,
            },
            "dataset": asdict(self.dataset),
            "data": content_hash(
                {"examples": [(example.id, example.prompt) for example in self.examples]}
            ),
            "count": len(self.examples),
            "part_size": self.part_size,
        }

    @property
    def parts(self) -> list[range]:
        """The examples of every part."""
        starts = range(0, len(self.examples), self.part_size)
        return [range(start, min(start + self.part_size, len(self.examples))) for start in starts]

    def file(self, indices: range) -> Path:
        """SPLIT-FIRST-END.parquet: named as a local dataset's file, so that `dataset.path` can be
        this folder.
        """
        split = re.sub(r"\W+", "_", canonical_split(self.dataset.split))
        return self.folder / f"{split}-{indices.start:08d}-{indices.stop:08d}.parquet"


def generate_calibration(
    job: CalibrationJob, report: Callable[[int, int], None] = lambda count, total: None
) -> int:
    """Write the missing parts, each in one of the launched processes, and then the manifest.

    Returns how many examples this process had to answer. A part is written whole or not at all: a
    killed run loses only unfinished parts, and the same call completes the rest. report: called
    with 1 after each answer, and the number that this process has to answer. Raises UserError if
    the folder holds other answers, the disk is full or the batch does not fit into memory.
    """
    ranks, missing = launched(), []
    if ranks.is_main:
        with writing(job.folder, _WHAT, _REMEDY):
            _keep_plan(job)
        missing = [indices for indices in job.parts if _rows(job.file(indices)) != len(indices)]
        if missing:
            (job.folder / MANIFEST).unlink(missing_ok=True)  # it says that all parts are there
    # all processes divide the first one's list, before one of them writes
    missing = ranks.gather(missing)[0]
    mine = missing[ranks.rank :: ranks.count]
    total = sum(map(len, mine))
    for indices in mine:
        _write_part(job, indices, ranks.rank, lambda count: report(count, total))
    ranks.wait()
    if ranks.is_main and not (job.folder / MANIFEST).is_file():
        _write_manifest(job)
    ranks.wait()
    return total


def _keep_plan(job: CalibrationJob) -> None:
    """Write what is planned into the folder, or raise UserError if the answers that it holds were
    made by another plan.
    """
    file = job.folder / "plan.json"
    if file.is_file():
        stored_plan = json.loads(file.read_text(encoding="utf-8"))
        require_same_settings(job.folder, "answers", stored_plan, job.plan, _MOVED)
    else:
        write_json(file, job.plan)


def _write_part(
    job: CalibrationJob, indices: range, process: int, advance: Callable[[int], None]
) -> None:
    examples, checkpoint = [job.examples[index] for index in indices], job.target.checkpoint
    sources = [checkpoint.source(example.prompt) for example in examples]
    started = time.perf_counter()
    with within_memory(
        checkpoint.path, job.target.device, "set runtime.dtype=bfloat16, or use a larger device"
    ):
        job.target.load()
    with within_memory(
        f"batch_size={job.batch_size}", job.target.device, "lower it, finished parts are kept"
    ):
        emitted = greedy_answers(
            job.target, sources, job.max_new_tokens, job.batch_size, advance, job.stop
        )
    seconds = time.perf_counter() - started
    rows = [
        TargetAnswer(
            example.id,
            example.prompt,
            before_stop(
                checkpoint.tokenizer.decode(tokens, skip_special_tokens=True), job.stop
            ).strip(),
            tokens,
            _reason(checkpoint, tokens, job.stop),
        )
        for example, tokens in zip(examples, emitted, strict=True)
    ]
    table = pa.Table.from_pylist([asdict(row) for row in rows], schema=SCHEMA)
    content = io.BytesIO()
    pq.write_table(
        table.replace_schema_metadata({"seconds": str(seconds), "process": str(process)}), content
    )
    with writing(job.file(indices), _WHAT, _REMEDY):
        write_atomically(job.file(indices), content.getvalue())


def _reason(checkpoint: Checkpoint, tokens: list[int], stop: tuple[str, ...]) -> str:
    """Why an answer has ended."""
    if tokens[-1] in checkpoint.end_tokens:
        return END
    return STOP if stop and StopStrings(stop, checkpoint).completed(tokens) else LENGTH


def _write_manifest(job: CalibrationJob) -> None:
    """Read all parts back, and write metrics and manifest."""
    files = [job.file(indices) for indices in job.parts]
    answers = [answer for file in files for answer in read_part(file)]
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
        "commits": commits_read(),
    }
    parts = {"parts": [file.name for file in files], "hash": contents_hash(answers)}
    manifest = {
        **job.plan,
        **parts,
        "dataset_words": list(job.dataset_words),
        "commits": commits_read(),
    }
    with writing(job.folder, _WHAT, _REMEDY):
        write_json(job.folder / "metrics.json", metrics)
        write_json(job.folder / MANIFEST, manifest)  # last, as it marks the data as finished


def _rows(file: Path) -> int:
    """Rows of a part; 0 if it is missing or cannot be read, for example after a power cut."""
    try:
        return pq.read_metadata(file).num_rows
    except (OSError, pa.ArrowException):
        return 0
