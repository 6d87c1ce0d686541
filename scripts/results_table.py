"""Print a sweep's points as a Markdown table: python scripts/results_table.py outputs/NAME"""

from __future__ import annotations

import sys
from pathlib import Path

from bild_lab.errors import UserError
from bild_lab.lab.cli import run_application, stages
from bild_lab.lab.formatting import MISSING, percent
from bild_lab.lab.schema.result import Result

HEADER = "policy|knobs|quality|difference|speedup|ms (median, p95)|tokens/s|tokens/call|kept|same".split("|")


def row(result: Result) -> tuple[str, ...]:
    """One point's cells; a dash where a policy has no such number."""
    quality, speedup, latency = result.quality, result.speedup, result.latency_s
    calls = result.counts.tokens_per_target_call
    return (
        f"`{result.policy}`",
        ", ".join(f"{knob} {value}" for knob, value in result.knobs.items()),
        f"{quality.value:.2f} [{quality.low:.2f}, {quality.high:.2f}]",
        MISSING
        if quality.difference is None
        else f"{quality.difference:+.2f} [{quality.difference_low:+.2f}, {quality.difference_high:+.2f}]",
        MISSING if speedup.value is None else f"{speedup.value:.2f} [{speedup.low:.2f}, {speedup.high:.2f}]",
        f"{1000 * latency.median:.1f}, {1000 * latency.p95:.1f}",
        f"{result.tokens_per_s:.0f}",
        MISSING if calls is None else f"{calls:.2f}",
        percent(result.counts.acceptance_rate),
        percent(result.agreement_with_target),
    )


def main() -> None:
    if len(sys.argv) != 2:
        raise UserError(f"one folder is needed, got {len(sys.argv) - 1}; give the folder of a sweep, outputs/NAME")
    stages.enter("loading libraries")
    from bild_lab.lab.results.records import Sweep  # late: pandas takes seconds to load
    from bild_lab.report.headline import headline

    results = Sweep(Path(sys.argv[1])).results()
    if not results:
        raise UserError(f"{sys.argv[1]} has no finished points; give the folder of a sweep, outputs/NAME")
    rows = [HEADER, ("---",) * len(HEADER)]
    rows += [row(result) for result in sorted(results, key=lambda result: result.latency_s.mean)]
    stages.leave()
    print(headline(results) + "\n")
    print("\n".join("| " + " | ".join(cells) + " |" for cells in rows))


if __name__ == "__main__":
    run_application(main, None)
