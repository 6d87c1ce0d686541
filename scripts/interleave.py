"""Time finished points again, side by side: python scripts/interleave.py name=NAME outputs/first outputs/second

Every text is decoded by every point's policy in turn, and once by the baseline. So a machine that is faster in one
minute than in the next is so for all of them, and their speedups can be compared: of several drafters, for example,
which a sweep measures one after the other. The points may differ in policy, knobs and drafter. What they are is read
from the sweeps, which are not changed; everything is measured anew and stored in outputs/NAME as a sweep.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from omegaconf import DictConfig, OmegaConf

from bild_lab.errors import UserError, require_whole
from bild_lab.lab.cli import escape, output, progress, refusing, run_application, stages, words_as_list
from bild_lab.lab.config import config_dir

if TYPE_CHECKING:
    from bild_lab.lab.results.records import Sweep
    from bild_lab.lab.schema.result import Result


def interleave(cfg: DictConfig) -> None:
    """Measure the points side by side, store, report and compare them. Raises UserError for bad input."""
    from bild_lab.lab.point import prepare, sweep_folder  # late: torch takes seconds to load
    from bild_lab.lab.results.commands import record_command
    from bild_lab.lab.results.records import Sweep
    from bild_lab.lab.runner import DECODING, require_same_work, run_points
    from bild_lab.report.sweep import report_sweep

    for key in ("limit", "repeats"):
        if cfg[key] is not None:
            require_whole(key, cfg[key], 1)
    stages.enter("checking the points")
    sweeps = [Sweep(Path(str(folder)).expanduser()) for folder in cfg.sweeps]
    points = {point.id: point for config in stored_configs(sweeps, cfg) for point in [prepare(config)]}
    if len(points) < 2:
        raise UserError(f"two points or more are timed side by side, got {len(points)}; name more sweeps")
    several = list(points.values())
    require_same_work(several)
    sweep = Sweep(sweep_folder(cfg))
    record_command(sweep.folder)
    with progress() as bar:
        task = bar.add_task(DECODING, total=len(several[0].examples))
        results = run_points(
            several, sweep, advance=lambda: bar.advance(task), stage=lambda name: bar.update(task, description=name)
        )
    report_sweep(sweep)
    for line in ranking(results, sweep):
        output.print(escape(line))


def stored_configs(sweeps: Sequence[Sweep], cfg: DictConfig) -> Iterator[DictConfig]:
    """The configurations of the sweeps' points, as they are measured now.

    Raises UserError for a sweep without finished points, and for hashes that no point has.
    """
    from bild_lab.lab.results.records import CONFIG

    if not sweeps:
        raise UserError("folders of sweeps are needed, got none; python scripts/interleave.py name=NAME outputs/FIRST")
    wanted, found = [str(point) for point in cfg.points], set()
    for sweep in sweeps:
        results = sweep.results()
        if not results:
            raise UserError(f"{sweep.folder} has no finished points; give the folder of a sweep, outputs/NAME")
        for result in results:
            chosen = [point for point in wanted if result.point.startswith(point)]
            found |= set(chosen)
            if wanted and not chosen:
                continue
            config = OmegaConf.load(result.folder / CONFIG)
            config.name, config.resume = cfg.name, False
            config.dataset.limit = config.dataset.limit if cfg.limit is None else cfg.limit
            config.measure.repeats = config.measure.repeats if cfg.repeats is None else cfg.repeats
            yield config
    if missing := [point for point in wanted if point not in found]:
        raise UserError(f"no point of these sweeps begins with {', '.join(missing)}; see sweep.csv for their hashes")


def ranking(results: Sequence[Result], sweep: Sweep) -> list[str]:
    """The points, fastest first: a line each, with its time as a multiple of the fastest one's."""
    import numpy as np

    from bild_lab.lab.analysis.statistics import paired_speedup
    from bild_lab.lab.formatting import interval, point_label, short_name, signed, times
    from bild_lab.lab.results.groups import varying_knobs
    from bild_lab.lab.schema.measured_examples import read_examples

    ordered = sorted(results, key=lambda one: one.latency_s.total)
    seconds = [np.array([one.latency_s for one in read_examples(result.folder)]) for result in ordered]
    lines = []
    for result, own_s in zip(ordered, seconds, strict=True):
        peers = [one for one in ordered if one.policy == result.policy]
        label = point_label(result, varying_knobs(peers) if len(peers) > 1 else list(result.knobs))
        drafter = f" with {short_name(result.setting.draft)}" if result.setting.draft else ""
        beside = paired_speedup(own_s, seconds[0])
        parts = [f"{times(beside.value)} the time of the fastest {interval(beside.low, beside.high)}"]
        if result is ordered[0]:
            parts = ["the fastest"]
        speedup, quality = result.speedup, result.quality
        if speedup.value is not None:
            fast = f"{times(speedup.value)} {interval(speedup.low, speedup.high)}"
            parts.append(f"{fast} as fast as {result.setting.baseline}")
            parts.append(f"{quality.metric} {signed(quality.difference)}")
        lines.append(f"{label}{drafter}: {', '.join(parts)}")
    return lines


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="interleave")
def main(cfg: DictConfig) -> None:
    """Several points, side by side."""
    with refusing("interleave"):
        interleave(cfg)


if __name__ == "__main__":
    sys.argv[1:] = words_as_list(sys.argv[1:], "sweeps")
    run_application(main, "interleave")
