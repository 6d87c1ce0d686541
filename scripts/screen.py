"""Screen knobs at the cost of a few decodings, measure the best live: python scripts/screen.py [KEY=VALUE …]

    python scripts/screen.py name=grid pair.target=DIR pair.draft=DIR dataset=multi30k dataset.path=DIR \\
      policy=bild policy.fallback='range(0.05,1,0.05)' policy.rollback=0.5,1,2,5

Give lists of values as for a sweep; policy=bild,typical_acceptance screens several policies, each with the lists of the
knobs that it has. screen.max_loss=1 measures no point that lost more than one point of quality (of a
log-probability one nat, so set 0.01). Begin with coarse lists; finer ones around the front cost little, as the record
stays.

screen.guarantee.loss=0.02 certifies the fastest point whose mean loss per text is at most 2 % of the metric's scale.

Both models run only where a context is new; what they scored is kept in outputs/NAME/record for later commands.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.markup import escape

from bild_lab.errors import UserError
from bild_lab.lab.config.command_line import key_of
from bild_lab.lab.config.compose import hydra_main
from bild_lab.lab.config.console import output
from bild_lab.lab.config.entrypoint import refusing, run_application
from bild_lab.lab.config.schemas import typed
from bild_lab.lab.data.rows import canonical_split
from bild_lab.screening.candidates import as_overrides, command_line_lists

if TYPE_CHECKING:
    from bild_lab.screening.screen_spec import ScreenSpec
    from bild_lab.screening.screened_sweep import ScreeningResult

WANTED = (
    "lists of knobs to screen are needed; python scripts/screen.py name=grid policy=bild"
    " policy.fallback=0.3,0.5,0.7 policy.rollback=1,2,5 takes the toy pair, pair.target=DIR"
    " pair.draft=DIR dataset=local dataset.path=FILE yours"
)


def run(cfg: DictConfig) -> None:
    """Screen, choose, confirm and print. Raises UserError for bad input."""
    from bild_lab.lab.store.commands import record_command
    from bild_lab.lab.sweep import measure_point
    from bild_lab.screening.candidates import grid_of  # late: torch takes seconds to load
    from bild_lab.screening.guarantee import require_losses
    from bild_lab.screening.screen import Screening
    from bild_lab.screening.screen_spec import ScreenSpec
    from bild_lab.screening.screened_sweep import screen

    spec = typed(ScreenSpec, cfg.screen, "screen")
    task, lists = command_line_lists(HydraConfig.get())
    require_split(task, str(cfg.dataset.split), spec.select)
    grid = grid_of(task, [*lists, *spec.space])
    screening = Screening(grid, spec.select, spec.batch, spec.keep)
    certifies = spec.guarantee.loss is not None
    if certifies:
        require_losses(
            screening.point.scoring.lead, max(example.turn for example in screening.point.examples)
        )
    screened = screen(screening, spec)
    record_command(screening.folder)
    output.print(cost_in_words(screened.summary))
    if certifies:
        output.print(escape(screened.guarantee(spec)))
    screened.confirm(spec.confirm, measure_point)
    print_confirmed(screened, spec)


def cost_in_words(summary: Mapping[str, Any]) -> str:
    """What the screening took, and how well it predicted. summary: as in `screen.json`."""
    recorded, live = summary["recorded_target_calls"], summary["live_target_calls"]
    words = (
        f"{summary['points']} points screened: {recorded:,} target forwards where live runs take"
        f" {live:,} ({live / max(1, recorded):.1f} times as many; one vanilla decoding is"
        f" {summary['vanilla_target_calls']:,})"
    )
    error = summary["cost_model_error"]
    return words if error is None else f"{words}, predicted to {error:.1%} (median)"


def print_confirmed(screened: ScreeningResult, spec: ScreenSpec) -> None:
    """Print each point that was measured live, beside what was predicted of it."""
    from bild_lab.lab.schema.formatting import counted
    from bild_lab.screening.screened_sweep import row_label

    shared = screened.summary["shared_texts"]
    with_shared = f" (with {counted(shared, 'text')} of {spec.select})" if shared else ""
    labels = {
        row.confirmed: row_label(row, screened.rows) for row in screened.rows if row.confirmed
    }
    for point in screened.summary["confirmed"]:
        output.print(
            escape(
                f"chosen on {spec.select}, measured on {spec.confirm}{with_shared}:"
                f" {confirmed(point, labels[point['point']])}"
            )
        )


def require_split(words: Sequence[str], split: str, select: str) -> None:
    """Raise UserError for a `dataset.split` that is not `screen.select`: it would change nothing.

    words: the overrides of the command. split: the configuration's.
    """
    keys = {key_of(word).lstrip("+") for word in words}
    if "dataset.split" in keys and canonical_split(split) != canonical_split(select):
        raise UserError(
            f"points are screened on screen.select={select}, so dataset.split={split} would change"
            f" nothing; set screen.select={split}, or leave it out"
        )


def confirmed(point: Mapping[str, Any], label: str) -> str:
    """A point that was measured, beside what was predicted of it. label: as a report names it."""
    from bild_lab.lab.schema.formatting import signed
    from bild_lab.lab.schema.numbers import scale_of

    digits = scale_of(point["metric"]).digits
    confirmed_difference = signed(point["confirmed_difference"], digits)
    selected_difference = signed(point["selected_difference"], digits)
    return (
        f"{label}: {point['speedup']:.2f}x [{point['speedup_low']:.2f},"
        f" {point['speedup_high']:.2f}], predicted {point['predicted_speedup']:.2f}x (where it was"
        f" chosen {point['selected_speedup']:.2f}x; vanilla took {point['baseline_drift']:+.0%} against"
        f" its prediction); {point['metric']} {confirmed_difference} (where it was chosen"
        f" {selected_difference})"
    )


@hydra_main("screen")
def main(cfg: DictConfig) -> None:
    """One screening."""
    with refusing("screen"):
        run(cfg)


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.argv[1:] = as_overrides(sys.argv[1:], "screen.space")
    run_application(main, "screen", WANTED)
