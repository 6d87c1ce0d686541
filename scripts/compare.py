"""Compare two sweeps: python scripts/compare.py outputs/before outputs/after

Points are matched by policy and knobs, examples by their ids, and intervals are paired. For each point the verdict says
whether B is faster or slower, better or worse than A, or neither; with margin=5 also whether B is
no worse than A by five points. latex=true prints a table for a paper too.
format=machines lays runs of the same points on several machines or days side by side, with the median
run of each point: python scripts/compare.py outputs/first outputs/second outputs/third format=machines
format=spec_bench prints Spec-Bench's own table of one sweep: python scripts/compare.py outputs/NAME format=spec_bench
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig
from rich.markup import escape

from bild_lab.errors import UserError, require_choice, require_finite, require_flag
from bild_lab.lab.config.command_line import words_as_list
from bild_lab.lab.config.compose import hydra_main
from bild_lab.lab.config.console import output, status_line
from bild_lab.lab.config.entrypoint import refusing, run_application

if TYPE_CHECKING:
    from bild_lab.report.matching import MatchedPoint
    from bild_lab.report.paired_comparison import PointComparison

PAIRS, MACHINES, SPEC_BENCH = "pairs", "machines", "spec_bench"


def print_spec_bench(cfg: DictConfig) -> None:
    """Print Spec-Bench's table of a sweep. Raises UserError for bad input."""
    from bild_lab.benchmark.spec_bench import spec_bench_table
    from bild_lab.lab.store.records import Sweep

    if len(cfg.sweeps) != 1:
        raise UserError(
            f"format={SPEC_BENCH} prints one sweep, got {len(cfg.sweeps)}; python scripts/compare.py"
            f" outputs/NAME format={SPEC_BENCH}"
        )
    print(spec_bench_table(Sweep(Path(str(cfg.sweeps[0])).expanduser()).finished()))


def print_machines(cfg: DictConfig) -> None:
    """Print every point's runs, and write `machines.csv`. Raises UserError for bad input."""
    from bild_lab.lab.point.identity import sweep_folder
    from bild_lab.lab.store.records import Sweep, require_writable
    from bild_lab.report.machines import (
        TABLE,
        machines_table,
        point_runs,
        runs_notes,
        write_machines,
    )

    folders = [Path(str(name)).expanduser() for name in cfg.sweeps]
    if not folders:
        raise UserError(
            f"format={MACHINES} needs the folders of runs, got none; python scripts/compare.py"
            f" outputs/first outputs/second format={MACHINES}"
        )
    folder = sweep_folder(cfg)
    require_writable(folder)
    status_line.enter("comparing")
    # folders of several machines may have one name
    names = [path.name for path in folders]
    if len(set(names)) < len(names):
        names = [str(path) for path in folders]
    sweeps = {name: Sweep(path).finished() for name, path in zip(names, folders, strict=True)}
    points = point_runs(sweeps)
    write_machines(folder, points)
    output.print(machines_table(points))
    for remark in runs_notes(points):
        output.print(escape(remark))
    output.print(f"{folder}/{TABLE} contains this table")


def compare(cfg: DictConfig) -> None:
    """Compare, print, and write the table and the page. Raises UserError for bad input."""
    formats = {PAIRS: print_pairs, MACHINES: print_machines, SPEC_BENCH: print_spec_bench}
    require_choice("format", cfg.format, tuple(formats))
    formats[cfg.format](cfg)


def print_pairs(cfg: DictConfig) -> None:
    """Compare two sweeps point by point, print it, and write the table and the page."""
    names = two_sweeps(cfg)
    # imported late: drawing and scoring libraries take seconds, and bad input should not wait for
    # them
    from bild_lab.lab.metrics.text_metrics import require_margin
    from bild_lab.lab.point.identity import sweep_folder
    from bild_lab.lab.store.records import Sweep, require_writable
    from bild_lab.report.comparison import (
        comparison_table,
        latex_comparison,
        notes,
        summary,
        write_comparison,
    )
    from bild_lab.report.matching import differences, match_points

    folder = sweep_folder(cfg)
    require_writable(folder)
    status_line.enter("comparing")
    matching = match_points(*(Sweep(Path(name).expanduser()).finished() for name in names))
    if cfg.margin is not None:
        for metric in {pair.a.setting.metric for pair in matching.pairs}:
            require_margin("margin", cfg.margin, metric)
    compared, why = compared_points(matching.pairs, cfg.margin)
    if all(comparison.quality.difference is not None for comparison in compared):
        why = ""
    remarks = notes(
        compared, differences(matching.pairs), {"A": matching.only_a, "B": matching.only_b}, why
    )
    write_comparison(folder, names, compared, remarks)
    output.print(comparison_table(compared))
    if cfg.latex:
        print(latex_comparison(compared, remarks))
    output.print(escape(summary(compared)))
    for remark in remarks:
        output.print(escape(remark))
    output.print(f"{folder}/compare.html and compare.csv contain this comparison")


def two_sweeps(cfg: DictConfig) -> tuple[str, str]:
    """The folders of the two sweeps to compare. Raises UserError for another number of them, and for
    other values that cannot be.
    """
    names = tuple(str(name) for name in cfg.sweeps)
    if len(names) != 2:
        raise UserError(
            f"two sweeps are needed, got {len(names)}; python scripts/compare.py outputs/before"
            " outputs/after"
        )
    require_flag("latex", cfg.latex)
    if cfg.margin is not None:
        from bild_lab.lab.config.schemas import MARGIN_REMEDY

        require_finite("margin", cfg.margin, 0, above=True, remedy=MARGIN_REMEDY)
    return names


def compared_points(
    pairs: Sequence[MatchedPoint], margin: float | None
) -> tuple[list[PointComparison], str]:
    """Every pair compared over the examples that both have, and why references are not known, for
    the first pair without them; empty if they are known. margin: as in `compare_point`.
    """
    from bild_lab.lab.schema.examples import read_examples
    from bild_lab.lab.store.inputs import SharedTexts, shared_texts
    from bild_lab.report.paired_comparison import compare_point

    texts: dict[str, SharedTexts] = {}  # by the data of both, which most points share
    compared, why = [], ""
    for pair in pairs:
        keys = ("dataset", "split", "data", "n_examples")
        data_key = str([side.setting.get(key) for side in (pair.a, pair.b) for key in keys])
        if data_key not in texts:
            texts[data_key] = shared_texts(pair.a, pair.b)
        shared = texts[data_key]
        why = why or shared.why
        examples = (read_examples(side.folder) for side in (pair.a, pair.b))
        compared.append(compare_point(pair, *examples, shared.references, shared.keys, margin))
    return compared, why


@hydra_main("compare")
def main(cfg: DictConfig) -> None:
    """One comparison."""
    with refusing():
        compare(cfg)


if __name__ == "__main__":
    sys.argv[1:] = words_as_list(sys.argv[1:], "sweeps")
    run_application(main, "compare")
