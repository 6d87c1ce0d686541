"""Screen a plane of knobs at the cost of a few decodings, measure the best live: python scripts/screen.py [KEY=VALUE …]

    python scripts/screen.py name=plane pair.target=DIR pair.draft=DIR dataset=multi30k dataset.path=DIR \\
      policy=bild policy.fallback='range(0.05,1,0.05)' policy.rollback=0.5,1,2,5

Give lists of values as for a sweep; policy=bild,typical_acceptance screens several policies, each with the lists of the
knobs that it has. Both models run only where a context is new; what they scored is kept in outputs/NAME/record, where
later commands find it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from bild_lab.lab.cli import escape, output, refusing, run_application
from bild_lab.lab.config import config_dir, typed
from bild_lab.lab.screening.space import as_overrides, given_lists

if TYPE_CHECKING:
    from bild_lab.lab.screening.found import Confirmed, Found
    from bild_lab.lab.screening.screen import ScreenSpec


def run(cfg: DictConfig) -> None:
    """Screen, choose, confirm and print. Raises UserError for bad input."""
    from bild_lab.lab.analysis.cost import Machine  # late: torch takes seconds to load
    from bild_lab.lab.screening.candidates import grid_of
    from bild_lab.lab.screening.found import screen
    from bild_lab.lab.screening.screen import RecordSpec, Screening, ScreenSpec
    from bild_lab.lab.sweep import measure_point

    spec, record = typed(ScreenSpec, cfg.screen, "screen"), typed(RecordSpec, cfg.record, "record")
    machine = None if cfg.get("machine") is None else typed(Machine, cfg.machine, "machine")
    task, lists = given_lists(HydraConfig.get(), ("screen", "record", "machine"))
    screening = Screening(grid_of(task, [*lists, *spec.space], "screen"), spec.select, record, "screen")
    if spec.confirmations:
        screening.require_other_examples(spec.confirm)
    found = screen(screening, spec, machine)
    output.print(escape(told(found)))
    found.confirm(spec.confirm, measure_point)
    for one in found.confirmed:
        output.print(escape(confirmed(one, spec)))


def told(found: Found) -> str:
    """What was screened, and at what cost."""
    one = found.summary
    live, recorded = one.live_target_calls, max(1, one.recorded_target_calls)
    error = "" if one.cost_model_error is None else f", predicted to {one.cost_model_error:.1%} (median)"
    return (
        f"{one.points} points screened: {one.recorded_target_calls:,} target forwards instead of {live:,} "
        f"({live / recorded:.0f} times fewer; one vanilla decoding is {one.vanilla_target_calls:,}){error}"
    )


def confirmed(one: Confirmed, spec: ScreenSpec) -> str:
    """A confirmed point: chosen on one split, measured on the other."""
    row, point = one.row, one.result
    knobs = " ".join(f"{knob} {value}" for knob, value in row.knobs.items())
    speedup, quality = point.speedup, point.quality
    return (
        f"chosen on {spec.select}, measured on {spec.confirm}: {row.policy} {knobs}: {speedup.value:.2f}x "
        f"[{speedup.low:.2f}, {speedup.high:.2f}], predicted {one.predicted_speedup:.2f}x (on {spec.select} "
        f"{row.predicted_speedup:.2f}x; vanilla took {one.baseline_drift:+.0%} against its prediction); "
        f"{quality.metric} {quality.difference:+.2f} (on {spec.select} {row.quality_difference:+.2f})"
    )


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="screen")
def main(cfg: DictConfig) -> None:
    """One screening."""
    with refusing("screen"):
        run(cfg)


if __name__ == "__main__":
    sys.argv[1:] = as_overrides(sys.argv[1:], "screen.space")
    run_application(main, "screen")
