"""BiLD's thresholds for a drafter, chosen on other examples than they are measured on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from bild_lab.files import write_atomically
from bild_lab.lab.config import knob_values
from bild_lab.lab.hashing import content_hash
from bild_lab.lab.measure.cost_model import fit
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.screening.candidates import Candidate
from bild_lab.lab.screening.rows import Row
from bild_lab.lab.screening.screen import Screening

LOSSES = (0.0, 1.0)  # points of quality below the target's that are allowed
TIMED_S = 30.0  # of live decoding, from which the cost model learns
FILE = "chosen.json"


@dataclass(frozen=True)
class Configured:
    """Points as a screening takes them, from whole configurations.

    candidates: one for each. select, limit: the split to choose on and how many of its texts, None: all. Other splits
    keep the limit of their configuration.
    """

    configs: tuple[DictConfig, ...]
    candidates: tuple[Candidate, ...]
    select: str
    limit: int | None

    def config(self, candidate: Candidate, split: str, _name: str) -> DictConfig:
        config = self.configs[self.candidates.index(candidate)].copy()
        config.dataset.split = split
        if split == self.select:
            config.dataset.limit = self.limit
        return config


def screening_of(configs: Sequence[DictConfig], select: str, limit: int | None) -> Screening:
    """Of these points on the first `limit` texts of this split; None: on all of them."""
    candidates = [
        Candidate((), config.policy.name, knob_values(OmegaConf.to_container(config.policy)), config.policy)
        for config in configs
    ]
    grid = Configured(tuple(configs), tuple(candidates), select, limit)
    return Screening(grid, select, "align")


def choose(
    configs: Sequence[DictConfig],
    select: str,
    limit: int | None,
    split: str,
    fingerprint: str,
    report: Callable[[str], None],
) -> list[int | None]:
    """The places of the fastest points that lose at most so much on `select`, one for each of LOSSES; None without any.

    limit: choose on the first so many texts of `select`; None: on all. split: where the chosen points are measured.
    fingerprint: of the drafter's weights. Points are decoded over a record of the models' scores, and their speed is
    predicted (docs/screening.md). What was chosen is kept in `chosen.json`.
    Raises UserError if both splits are the same examples.
    """
    screening = screening_of(configs, select, limit)
    screening.require_other_examples(split)
    plain = [OmegaConf.to_container(config, resolve=True) for config in configs]
    key = content_hash({"configs": plain, "select": select, "limit": limit, "draft": fingerprint})
    with Sweep(screening.folder).search_lock():
        known = stored(screening.folder / FILE)
        if key not in known:
            report(f"choosing from {len(configs)} points on {select}")
            screened = screening.decode(screening.grid.candidates)
            texts, _, _ = screening.timed(screened, TIMED_S)
            rows = screening.rows(screened, fit(texts, "0"))
            known[key] = [fastest(rows, loss) for loss in LOSSES]
            write_atomically(screening.folder / FILE, (json.dumps(known, indent=2) + "\n").encode())
    return known[key]


def fastest(rows: Sequence[Row], loss: float) -> int | None:
    """The place of the fastest row that loses at most so many points of quality."""
    kept = [place for place, row in enumerate(rows) if row.quality_difference >= -loss]
    return max(kept, key=lambda place: (rows[place].predicted_speedup, rows[place].quality), default=None)


def stored(file: Path) -> dict[str, list[int | None]]:
    return json.loads(file.read_text()) if file.is_file() else {}
