"""Time finished points again, side by side: python scripts/interleave.py name=NAME outputs/first outputs/second

Every text is decoded by every point's policy in turn, and once by the baseline. So a machine that is faster in one
minute than in the next is so for all of them, and their speedups can be compared: of several drafters, for example,
which a sweep measures one after the other. The points may differ in policy, knobs and drafter. Their configurations are
read from the sweeps, which are not changed; everything is measured anew and stored in outputs/NAME as a sweep.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from omegaconf import DictConfig, OmegaConf

from bild_lab.engine.models.ranks import launched
from bild_lab.errors import UserError, require_whole
from bild_lab.lab.cli import (
    INTERRUPTED,
    console,
    escape,
    output,
    plain_message,
    progress,
    refusing,
    run_application,
    stages,
    words_as_list,
)
from bild_lab.lab.config import config_dir

if TYPE_CHECKING:
    from bild_lab.lab.point import Point
    from bild_lab.lab.schema.result import Result

AS_THE_FIRST = ("traced_examples", "certify", "target_log_probability")  # of `measure`


def interleave(cfg: DictConfig) -> None:
    """Measure the points side by side, store, report and compare them. Raises UserError for bad input."""
    from bild_lab.lab.point import sweep_folder  # late: torch takes seconds to load
    from bild_lab.lab.results.commands import record_command
    from bild_lab.lab.results.records import Sweep
    from bild_lab.lab.runner import DECODING, run_points
    from bild_lab.lab.sweep import process_age_s
    from bild_lab.report.sweep import report_sweep

    if launched().count > 1:
        raise UserError("points are timed side by side in one process; run it without torchrun")
    for key in ("limit", "repeats"):
        if cfg[key] is not None:
            require_whole(key, cfg[key], 1)
    sweep = Sweep(sweep_folder(cfg))
    if sweep.results():
        raise UserError(f"{sweep.folder} has points already, timed in other minutes; choose another name=NAME")
    stages.enter("checking the points")
    points = prepared(cfg)
    with progress() as bar:
        task = bar.add_task(DECODING, total=len(points[0].examples))
        results = run_points(
            points,
            sweep,
            process_age_s(),
            lambda: bar.advance(task),
            lambda name: bar.update(task, description=name),
        )
    record_command(sweep.folder)
    report_sweep(sweep)
    for line in ranking(points, results):
        output.print(escape(line))


def prepared(cfg: DictConfig) -> list[Point]:
    """The points to measure, each once. Raises UserError if there are fewer than two, or if one cannot be measured."""
    from bild_lab.lab.point import prepare

    points = {}
    for file, config in stored_configs(cfg):
        try:
            point = prepare(config)
        except Exception as error:
            raise UserError(f"{file}: {plain_message(error)}; leave it out with points=[…]") from error
        points[point.id] = point
    if len(points) < 2:
        raise UserError(f"two points or more are timed side by side, got {len(points)}; name more sweeps")
    return list(points.values())


def stored_configs(cfg: DictConfig) -> list[tuple[Path, DictConfig]]:
    """The points' files and their configurations as they are measured now, those of a drafter one after the other.

    Raises UserError for a sweep without finished points, for hashes that no point has, and for unreadable files.
    """
    from bild_lab.lab.results.records import CONFIG, Sweep

    if not cfg.sweeps:
        raise UserError("folders of sweeps are needed, got none; python scripts/interleave.py name=NAME outputs/FIRST")
    wanted, found = [str(point) for point in cfg.points], []
    for folder in cfg.sweeps:
        sweep = Sweep(Path(str(folder)).expanduser())
        results = sweep.results()
        if not results:
            raise UserError(f"{sweep.folder} has no finished points; give the folder of a sweep, outputs/NAME")
        found += [one for one in results if not wanted or any(one.point.startswith(point) for point in wanted)]
    if missing := [point for point in wanted if not any(one.point.startswith(point) for one in found)]:
        raise UserError(f"no point of these sweeps begins with {', '.join(missing)}; see sweep.csv for their hashes")
    configs = []
    for result in sorted(found, key=lambda one: str(one.setting.draft)):  # a model is kept while its points follow
        file = result.folder / CONFIG
        try:
            config = OmegaConf.load(file)
            measure = configs[0][1].measure if configs else config.measure
            OmegaConf.update(config, "name", cfg.name)
            for key in AS_THE_FIRST:
                OmegaConf.update(config, f"measure.{key}", measure[key])
            for key, value in (("dataset.limit", cfg.limit), ("measure.repeats", cfg.repeats)):
                if value is not None:
                    OmegaConf.update(config, key, value)
        except Exception as error:
            raise UserError(f"{file} cannot be read: {plain_message(error)}; leave it out with points=[…]") from error
        configs.append((file, config))
    return configs


def ranking(points: Sequence[Point], results: Sequence[Result]) -> Iterator[str]:
    """The points, fastest first: a line each, with its time as a multiple of the fastest one's."""
    import numpy as np

    from bild_lab.lab.analysis.statistics import paired_speedup
    from bild_lab.lab.formatting import interval, signed, times
    from bild_lab.lab.point_progress import title_of
    from bild_lab.lab.schema.examples import read_examples

    first = None
    for point, result in sorted(zip(points, results, strict=True), key=lambda pair: pair[1].latency_s.total):
        own_s = np.array([one.latency_s for one in read_examples(result.folder)])
        first = own_s if first is None else first
        beside, speedup, quality = paired_speedup(own_s, first), result.speedup, result.quality
        parts = [f"{times(beside.value)} the time of the fastest {interval(beside.low, beside.high)}"]
        if own_s is first:
            parts = ["the fastest"]
        if speedup.value is not None:
            fast = f"{times(speedup.value)} {interval(speedup.low, speedup.high)}"
            parts.append(f"{fast} as fast as {result.setting.baseline}")
            parts.append(f"{quality.metric} {signed(quality.difference)}")
        yield f"{title_of(point, 1, 1, [f'policy.{knob}' for knob in varying(points, point)])}: {', '.join(parts)}"


def varying(points: Sequence[Point], point: Point) -> list[str]:
    """The knobs in which the points of this policy differ."""
    from bild_lab.lab.results.groups import varying_knobs

    return varying_knobs([one for one in points if one.policy == point.policy])


def with_hashes_as_text(words: Sequence[str]) -> list[str]:
    """The command line with every hash of `points=` in quotes: Hydra would read 12e456 as a number."""
    quoted = []
    for word in words:
        if word.startswith("points="):
            hashes = re.findall(r"[^\]\[,\s'\"]+", word.removeprefix("points="))
            word = "points=[" + ",".join(f"'{point}'" for point in hashes) + "]"
        quoted.append(word)
    return quoted


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="interleave")
def main(cfg: DictConfig) -> None:
    """Several points, side by side."""
    with refusing("interleave"):
        try:
            interleave(cfg)
        except KeyboardInterrupt:
            stages.leave()
            console.print("[bold]stopped[/bold]: nothing is stored, as the points are stored together at the end")
            sys.exit(INTERRUPTED)


if __name__ == "__main__":
    sys.argv[1:] = with_hashes_as_text(words_as_list(sys.argv[1:], "sweeps"))
    run_application(main, "interleave")
