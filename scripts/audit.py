"""Judge any engine's answers by the target's own scores: python scripts/audit.py pair.target=DIR answers=FILE.jsonl

    python scripts/audit.py pair.target=DIR answers=FILE.jsonl decoding.max_new_tokens=64 runtime.dtype=bfloat16
    python scripts/audit.py pair.target=DIR answers=FILE.jsonl decoding=sample decoding.top_k=50

A line of FILE.jsonl holds prompt and answer, each text or token ids: {"prompt": "Ein Hund.", "answer": [71, 1782, 1]}.
A greedy answer is equal, tied within the precision of runtime.dtype, or a defect, with its first token and by how much
the target scores it lower than its own. Sampled answers are token ids, some hundred draws of each of a few prompts.
The exit status is 0 without a defect and 1 with one.
"""

from __future__ import annotations

import csv
import io
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf
from rich.box import SIMPLE_HEAD
from rich.table import Table

from bild_lab.errors import UserError
from bild_lab.files import write_atomically
from bild_lab.lab.cli import escape, output, progress, refusing, run_application
from bild_lab.lab.config import DecodingSpec, PairSpec, RuntimeSpec, compose_policy, hydra_main, typed

if TYPE_CHECKING:
    from bild_lab.lab.decoding.decoder import Decoder
    from bild_lab.lab.measure.audit import Finding

FAILED = 1
MOST_SHOWN = 20


def audit(cfg: DictConfig) -> bool:
    """Judge, print and write the table. Returns whether there is a defect. Raises UserError for bad input."""
    if not isinstance(cfg.answers, str):
        raise UserError(f"answers must be a file of answers, got {cfg.answers}; set answers=FILE.jsonl")
    from bild_lab.engine.sampling import Sampling  # late: torch takes seconds to load
    from bild_lab.lab.decoding.load import decoder_of
    from bild_lab.lab.measure.audit import audit_greedy, audit_sampled, read_answers
    from bild_lab.lab.measure.certificate import DEFECT, EQUAL, SESSION_DEFECT, TIE
    from bild_lab.lab.point import sweep_folder
    from bild_lab.lab.results.records import require_writable

    folder, answers = sweep_folder(cfg), read_answers(Path(cfg.answers).expanduser())
    require_writable(folder)
    given = OmegaConf.to_container(cfg.decoding, resolve=True)
    limit = given["max_new_tokens"]
    decoding = typed(DecodingSpec, {**given, "max_new_tokens": 1 if limit is None else limit}, "decoding")
    sampling = Sampling(decoding.temperature, decoding.top_k, decoding.top_p)
    pair, runtime = typed(PairSpec, cfg.pair, "pair"), typed(RuntimeSpec, cfg.runtime, "runtime")
    decoder = decoder_of(compose_policy("vanilla"), pair, decoding, runtime)
    decoder.load_weights()
    if sampling.greedy:
        with progress() as bar:
            findings = [audit_greedy(decoder, one, limit) for one in bar.track(answers, description="judging")]
    else:
        findings = audit_sampled(decoder, answers, sampling)
    found = Counter(DEFECT if one.verdict == SESSION_DEFECT else one.verdict for one in findings)
    shown = [one for one in findings if one.verdict != EQUAL or not sampling.greedy]
    if shown:
        output.print(table(shown[:MOST_SHOWN], decoder))
    write(folder / "audit.csv", findings)
    output.print(escape(f"{folder / 'audit.csv'} has them all"))
    output.print(f"equal {found[EQUAL]}, ties {found[TIE]}, defects {found[DEFECT]}")
    return found[DEFECT] > 0


def table(findings: Sequence[Finding], decoder: Decoder) -> Table:
    """The findings, each with what is known of it."""
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    pieces = decoder.pieces({token for one in findings for token in (one.token, one.target_token) if token is not None})
    rows = []
    for one in findings:
        numbers = (one.gap, one.noise, one.p_value, one.total_variation)
        tokens = [None if token is None else repr(pieces[token]) for token in (one.token, one.target_token)]
        rows.append(
            [str(one.line), one.verdict, one.position, *tokens, *(None if n is None else f"{n:.2g}" for n in numbers)]
        )
    titles = ("line", "verdict", "position", "token", "target's", "gap", "noise", "p-value", "variation")
    used = [place for place in range(len(titles)) if any(row[place] is not None for row in rows)]
    for place in used:
        shown.add_column(titles[place], justify="left" if place == 1 else "right")
    for row in rows:
        shown.add_row(*("–" if row[place] is None else escape(str(row[place])) for place in used))
    return shown


def write(file: Path, findings: Sequence[Finding]) -> None:
    """One row a finding."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [one.name for one in fields(findings[0])], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(one) for one in findings)
    write_atomically(file, text.getvalue().encode())


@hydra_main("audit")
def main(cfg: DictConfig) -> None:
    """One audit."""
    with refusing("audit"):
        defective = audit(cfg)
    if defective:
        sys.exit(FAILED)


if __name__ == "__main__":
    run_application(main, "audit")
