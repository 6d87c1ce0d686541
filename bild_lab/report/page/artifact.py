"""A sweep as an artifact for evaluation: points, versions, hashes, commands, expected results; and
the check of one.

The appendix (`page/artifact.md.j2`) has the check-list that systems conferences ask for, by
cTuning's template (ctuning.org/ae/submission_extra.html).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path

import numpy as np
import pandas as pd

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.errors import UserError
from bild_lab.files import file_digest, write_atomically, write_json
from bild_lab.lab.config.compose import config_dir
from bild_lab.lab.measure.blocks import block_numbers
from bild_lab.lab.point.environment import git_commit
from bild_lab.lab.schema.examples import read_examples
from bild_lab.lab.schema.formatting import duration
from bild_lab.lab.schema.questions import questions_of, source_ids
from bild_lab.lab.schema.result import Result
from bild_lab.lab.schema.statistics import conversations_of, paired_speedup
from bild_lab.lab.store.commands import COMMANDS, read_commands
from bild_lab.lab.store.groups import by_setting, data_title
from bild_lab.lab.store.inputs import stored_config
from bild_lab.lab.store.records import RESULT, Sweep
from bild_lab.lab.store.table import to_frame, write_table
from bild_lab.report.headline import headline
from bild_lab.report.page.base import page_environment
from bild_lab.report.page.html import environments, write_html
from bild_lab.report.phrases import setting_titles
from bild_lab.report.provenance import notes
from bild_lab.report.review import review_answers
from bild_lab.report.screened_points import screened_points
from bild_lab.report.terminal import points_text
from bild_lab.screening.rows import TABLE as SCREENED

APPENDIX, TABLE, HASHES = "README.md", "sweep.csv", "SHA256SUMS"
FOLDER = "artifact"  # in the folder of a sweep
SPEEDUP_ENDS = ("speedup low", "speedup high")  # whose formula may be another in another version
_BIBTEX = re.compile(r"^@\w+\{.*?^\}", re.MULTILINE | re.DOTALL)
_LICENCE = re.compile(r"^license: *(\S.*)$", re.MULTILINE)


def write_artifact(sweep: Sweep) -> Path:
    """Write `artifact` in a sweep's folder, in place of an earlier one.

    Raises UserError without finished points.
    """
    results, folder = sweep.finished(), sweep.folder / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    for result in results:
        copy = folder / "points" / result.folder.name
        shutil.copytree(result.folder, copy)
        content = json.loads((copy / RESULT).read_bytes())
        content["environment"].pop("host", None)  # reviews may be blind
        write_json(copy / RESULT, content)
    # the table of a screening says where the points were chosen
    further_files = (
        sweep.folder / COMMANDS,
        sweep.folder / SCREENED,
        *sweep.folder.glob("pareto.*"),
    )
    for file in further_files:
        if file.is_file():
            shutil.copy(file, folder)
    copied = Sweep(folder).results()
    write_table(copied, folder / TABLE)
    write_html(sweep.name, copied, sweep.failures(), folder / "report.html")
    write_atomically(folder / APPENDIX, _appendix(sweep, folder, copied).encode())
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    sums = "".join(
        f"{file_digest(file)}  {file.relative_to(folder).as_posix()}\n" for file in files
    )
    write_atomically(folder / HASHES, sums.encode())
    return folder


def faults(folder: Path) -> Iterator[str]:
    """What is wrong with an artifact: changed files, and numbers that do not follow from the stored
    texts and times.

    folder: of the artifact, or of the sweep that it was packed in. Needs no GPU, models or data.
    Raises UserError for a folder that is no artifact.
    """
    folder = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    if not (folder / HASHES).is_file():
        raise UserError(
            f"{folder} has no {HASHES}; give the folder that scripts/artifact.py outputs/NAME wrote"
        )
    for line in (folder / HASHES).read_text(encoding="utf-8").splitlines():
        digest, _, name = line.partition("  ")
        if not (folder / name).is_file() or file_digest(folder / name) != digest:
            yield f"{name} is missing or was changed"
    results = Sweep(folder).results()
    for result in results:
        for name, stored, recomputed in _recomputed(result):
            if not np.isclose(stored, recomputed, rtol=1e-9):
                numbers = f"{name} is {stored}, its examples give {recomputed}"
                if name in SPEEDUP_ENDS:
                    numbers += _by_other_code(result)
                yield f"{result.policy} {result.point}: {numbers}"
    # a table of an earlier version has fewer columns
    stored_table = pd.read_csv(folder / TABLE, dtype=str, keep_default_na=False)
    written = to_frame(results).to_csv(index=False)
    table = pd.read_csv(StringIO(written), dtype=str, keep_default_na=False)
    if not stored_table.equals(table.reindex(columns=stored_table.columns)):
        yield f"{TABLE} does not hold the numbers of the points"


def _by_other_code(result: Result) -> str:
    """What to do where another commit measured a point; nothing where this one did, or where one of
    the two is not known.
    """
    measured, checking = result.environment.get("git"), git_commit()
    if None in (measured, checking) or measured == checking:
        return ""
    return (
        f"; this is {checking}, whose intervals may be computed in another way: check it with"
        f" {measured}, which measured it"
    )


def _recomputed(result: Result) -> Iterator[tuple[str, float, float]]:
    """Numbers of a point as stored, and as its examples give them; those that a server failed to
    give count nowhere but in their number.
    """
    examples, speedup = read_examples(result.folder), result.speedup
    yield "examples", result.setting.n_examples, len(examples)
    blocks = block_numbers(len(examples), result.setting.get("batch"))
    if blocks is not None:
        blocks = [
            number for number, example in zip(blocks, examples, strict=True) if not example.failed
        ]
    questions = [
        question
        for question, example in zip(questions_of(source_ids(examples)), examples, strict=True)
        if not example.failed
    ]
    examples = [example for example in examples if not example.failed]
    yield "tokens", result.tokens, sum(len(example.token_ids) for example in examples)
    rounds = [
        decoding_round
        for example in examples
        if not example.reports
        for decoding_round in example.rounds
    ]
    if rounds:
        n_drafted = sum(len(decoding_round.drafted) for decoding_round in rounds)
        yield "drafted", result.counts.drafted, n_drafted
        n_accepted = sum(decoding_round.accepted for decoding_round in rounds)
        yield "accepted", result.counts.accepted, n_accepted
    if speedup.value is not None:
        baseline_s = np.array([example.baseline_latency_s for example in examples])
        latency_s = np.array([example.latency_s for example in examples])
        conversations = conversations_of(questions)
        recomputed = paired_speedup(baseline_s, latency_s, conversations, blocks)
        yield from (
            (f"speedup {end}", getattr(speedup, end), getattr(recomputed, end))
            for end in ("value", "low", "high")
        )
    if result.agreement_with_target is not None:
        same = [
            list(example.token_ids) == list(example.baseline_token_ids or ())
            for example in examples
        ]
        yield "agreement_with_target", result.agreement_with_target, sum(same) / len(same)


def _appendix(sweep: Sweep, folder: Path, results: Sequence[Result]) -> str:
    screened, groups = screened_points(sweep.folder, results), by_setting(results)
    page = page_environment().overlay(autoescape=False).get_template("artifact.md.j2")
    return page.render(
        name=sweep.name,
        headline=headline(results),
        notes=notes(results),
        results=results,
        policies={result.policy: _described(result.policy) for result in results},
        sources=_sources(results),
        environment=environments(results),
        commands=read_commands(folder),
        megabytes=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6,
        total=duration(sum(result.total_s for result in results)),
        settings=[
            (title, review_answers(group, screened), points_text(group, latex=False))
            for group, title in zip(groups, setting_titles(groups), strict=True)
        ],
        table=TABLE,
        hashes=HASHES,
    )


def _described(policy: str) -> str:
    """What the policy is and where it was published, from the first line of its file; of the user's
    own what the artifact lacks.
    """
    file = config_dir() / "policy" / f"{policy.partition(' (changed')[0]}.yaml"
    if not file.is_file():
        return "not in the repository: its files are to be added here"
    head = file.read_text(encoding="utf-8").partition("\n")[0]
    return head.removeprefix("# ").partition(": python run.py")[0]


def _sources(results: Sequence[Result]) -> dict[str, tuple[str, str, str]]:
    """Each model and data set once: its hash or commit of the hub, its licence and its citation."""
    source_facts: dict[str, tuple[str, str, str]] = {}
    for result in results:
        setting, config = result.setting, stored_config(result)
        for role in ("target", "draft", "second_draft"):
            if (path := setting.get(role)) and path not in source_facts:
                source_facts[path] = (
                    setting.weights if role == "target" else _fingerprint(path),
                    *_card(path),
                )
        place = config["dataset"].get("path") or config["dataset"].get("hub_id") or setting.dataset
        source_facts.setdefault(data_title(setting), (setting.data, *_card(str(place))))
    return source_facts


def _fingerprint(path: str) -> str:
    try:
        return Checkpoint(path).fingerprint
    except UserError:  # it was moved since
        return "not found"


def _card(path: str) -> tuple[str, str]:
    """The licence and the citation that the files in a folder state; empty where they do not, and
    for the hub's ids.
    """
    if path.startswith("toy:"):
        return "Apache-2.0, shipped with the code", ""
    place = Path(path).expanduser()
    if not place.exists():
        return "", ""
    folder = place if place.is_dir() else place.parent
    by_stem = {file.stem.lower(): file for file in folder.iterdir()}
    card = ""
    if "readme" in by_stem:
        card = by_stem["readme"].read_text(encoding="utf-8", errors="replace")
    citation = "\n\n".join(_BIBTEX.findall(card))
    stated = _LICENCE.search(card)
    if stated:
        return stated[1], citation
    files = [by_stem[stem].name for stem in ("license", "licence", "copying") if stem in by_stem]
    return f"see {files[0]}" if files else "", citation
