"""Compare two sweeps: python scripts/compare.py outputs/before outputs/after

Points are matched by policy and knobs, examples by their ids, and intervals are paired. For each point the verdict says
whether B is faster or slower, better or worse than A, or neither. latex=true prints a table for a paper too.
"""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig

from bild_lab.errors import UserError, require_flag
from bild_lab.lab.config.cli import (
    escape,
    output,
    refusing,
    run_application,
    stages,
    words_as_list,
)
from bild_lab.lab.config.groups import hydra_main


def compare(cfg: DictConfig) -> None:
    """Compare, print, and write the table and the page. Raises UserError for bad input."""
    names = tuple(str(name) for name in cfg.sweeps)
    if len(names) != 2:
        raise UserError(
            f"two sweeps are needed, got {len(names)}; python scripts/compare.py outputs/before"
            " outputs/after"
        )
    require_flag("latex", cfg.latex)
    # imported late: drawing and scoring libraries take seconds, and bad input should not wait for
    # them
    from bild_lab.lab.point.identity import sweep_folder
    from bild_lab.lab.schema.examples import read_examples
    from bild_lab.lab.store.inputs import SharedTexts, shared_texts
    from bild_lab.lab.store.records import Sweep, require_writable
    from bild_lab.report.comparison import (
        comparison_table,
        latex_comparison,
        notes,
        summary,
        write_comparison,
    )
    from bild_lab.report.paired_comparison import compare_pair, differences, match

    folder = sweep_folder(cfg)
    require_writable(folder)
    stages.enter("comparing")
    matching = match(*(Sweep(Path(name).expanduser()).finished() for name in names))
    texts: dict[str, SharedTexts] = {}  # by the data of both, which most points share
    compared, why = [], ""
    for pair in matching.pairs:
        keys = ("dataset", "split", "data", "n_examples")
        data_key = str([side.setting.get(key) for side in (pair.a, pair.b) for key in keys])
        if data_key not in texts:
            texts[data_key] = shared_texts(pair.a, pair.b)
        shared = texts[data_key]
        why = why or shared.why
        examples = (read_examples(side.folder) for side in (pair.a, pair.b))
        compared.append(compare_pair(pair, *examples, shared.references, shared.keys))
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


@hydra_main("compare")
def main(cfg: DictConfig) -> None:
    """One comparison."""
    with refusing():
        compare(cfg)


if __name__ == "__main__":
    sys.argv[1:] = words_as_list(sys.argv[1:], "sweeps")
    run_application(main, "compare")
