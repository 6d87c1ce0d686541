"""Measure many points in one process and draw its memory after each point: python scripts/soak.py [KEY=VALUE …]

The points are 500 of policy bild on the toy pair, measured as by `python run.py -m`. Writes `memory.png` and
`memory.csv` next to the sweep's report in outputs/soak. Finished points are not measured again, so start a stopped
soak anew with resume=false.
"""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path

import hydra
import psutil
from omegaconf import DictConfig

from bild_lab.lab.cli import output, run_application
from bild_lab.lab.config import config_dir

FALLBACKS = ",".join(f"{number / 100:g}" for number in range(2, 52, 2))  # 25
ROLLBACKS = ",".join(f"{number / 4:g}" for number in range(1, 21))  # 20
POINTS = [f"policy.fallback={FALLBACKS}", f"policy.rollback={ROLLBACKS}"]
SMALL = ["dataset.limit=3", "measure.repeats=1", "measure.warmup=1", "measure.traced_examples=1"]
SETTLED = 0.1  # share of the points after which caches are full

memory_mb: list[float] = []
FOLDER = Path("outputs/soak")


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
def main(cfg: DictConfig) -> float:
    """One point of the soak."""
    from bild_lab.lab.sweep import measure_point  # late: torch takes seconds to load

    speedup = measure_point(cfg)
    memory_mb.append(psutil.Process().memory_info().rss / 2**20)
    return speedup


def write_memory() -> None:
    """Store and draw the memory after every point, and print how much it grew after caches were full."""
    from bild_lab.files import write_atomically

    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(("point", "memory_mb"))
    rows.writerows((number, round(used, 1)) for number, used in enumerate(memory_mb, 1))
    write_atomically(FOLDER / "memory.csv", text.getvalue().encode())
    write_atomically(FOLDER / "memory.png", drawn())
    settled = memory_mb[int(SETTLED * len(memory_mb)) :]
    started = f"{settled[0]:.0f} MB after the first {SETTLED:.0%} of {len(memory_mb)} points"
    output.print(f"{started}, {settled[-1]:.0f} MB at the end, {max(memory_mb):.0f} MB at most: {FOLDER}/memory.png")


def drawn() -> bytes:
    """The figure as a PNG: memory over points. The axis starts at zero, so that slopes look as large as they are."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from bild_lab.report.style import FIGURE_STYLE, HAIRLINE

    with rc_context(FIGURE_STYLE):
        figure = Figure(figsize=(6, 2.6), layout="constrained")
        axes = figure.subplots()
        axes.plot(range(1, len(memory_mb) + 1), memory_mb, color="#0072B2", linewidth=1.2)
        axes.set_ylim(0, 1.15 * max(memory_mb))
        axes.set_xlim(0, len(memory_mb) + 1)
        axes.grid(axis="y", color=HAIRLINE)
        axes.set_xlabel("points measured in one process")
        axes.set_ylabel("resident memory, MB")
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=150)
        return image.getvalue()


if __name__ == "__main__":
    sys.argv[1:] = ["-m", "policy=bild", *POINTS, *SMALL, *sys.argv[1:], f"name={FOLDER.name}"]
    try:
        run_application(main)
    finally:
        if memory_mb:
            write_memory()
