"""Runs of a point on several machines lie side by side, and the median is a run that exists."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from bild_lab.errors import UserError
from bild_lab.lab.schema.result import Result
from bild_lab.report.machines import (
    machines_frame,
    machines_table,
    point_runs,
    runs_notes,
    write_machines,
)
from tests.report.sample import ENVIRONMENT, sample_baseline, sample_result


def run(speedup: float, fallback: float = 0.5, hardware: str = "EPYC", **changes: object) -> Result:
    environment = {**ENVIRONMENT, **changes.pop("environment", {})}
    setting = {"hardware": hardware, **changes.pop("setting", {})}
    knobs = {"fallback": fallback}
    return sample_result(
        "bild", knobs, speedup, environment=environment, setting=setting, **changes
    )


def sweeps(*speedups: float) -> dict[str, list[Result]]:
    """A sweep for each speedup; of all but the first the machine's numbers are known."""
    return {
        f"run{place}": [
            sample_baseline(),
            run(
                speedup,
                hardware=f"machine {place}",
                environment={"read_gb_per_s": 10.0 + place, "eight_rows_cost": 1.5}
                if place
                else {},
            ),
        ]
        for place, speedup in enumerate(speedups)
    }


def printed(points: list) -> list[str]:
    console = Console(width=80, record=True, file=StringIO())
    console.print(machines_table(points))
    return console.export_text().splitlines()


@pytest.mark.parametrize(
    ("speedups", "median"),
    [
        ((2.6, 1.2, 1.9), "run2"),
        ((2.6, 1.2), "run1"),
        ((2.6, 1.2, 1.9, 1.3), "run3"),
        ((2.6,), "run0"),
    ],
)
def test_the_median_is_a_run_that_exists_of_an_even_number_the_lower(
    speedups: tuple[float, ...], median: str
) -> None:
    (point,) = point_runs(sweeps(*speedups))
    assert point.median_name == median
    assert point.median.speedup.value == speedups[int(median[-1])]
    assert point.range == (min(speedups), max(speedups))


def test_the_table_has_each_run_with_its_machine_and_its_two_numbers() -> None:
    lines = printed(point_runs(sweeps(2.6, 1.2, 1.9)))
    assert max(map(len, lines)) <= 80
    (point,) = (line for line in lines if "bild" in line)
    assert "1.90 [1.85, 1.95]" in point and "3 runs, 1.20 to 2.60" in " ".join(lines)
    rows = {name: line for name in ("run0", "run1", "run2") for line in lines if name in line}
    assert [name for name, line in rows.items() if line.strip().startswith("●")] == ["run2"]
    assert "11.0" in rows["run1"] and "1.50" in rows["run1"] and "machine 1" in rows["run1"]
    assert rows["run0"].count("–") == 2  # of before the numbers were measured


def test_points_are_named_by_what_differs_among_all_of_a_policy() -> None:
    found = {
        name: [
            sample_baseline(),
            *(
                sample_result("bild", {"fallback": fallback, "rollback": 7}, 1.5)
                for fallback in (0.5, 0.7)
            ),
        ]
        for name in ("one", "other")
    }
    labels = [runs.label for runs in point_runs(found)]
    assert labels == ["bild fallback 0.5", "bild fallback 0.7"]


def test_points_match_as_in_a_comparison_of_two() -> None:
    first = [run(1.5, 0.3), run(1.6, 0.5), run(1.7, 0.5)]  # the newest of equal points counts
    second = [run(1.2, 0.5)]
    three, five = point_runs({"a": first, "b": second})
    assert (three.label, list(three.results)) == ("bild fallback 0.3", ["a"])
    assert (five.label, five.range) == ("bild fallback 0.5", (1.2, 1.7))
    with pytest.raises(UserError, match="a and b must have the same dataset"):
        point_runs({"a": first, "b": [run(1.2, setting={"dataset": "iwslt"})]})
    with pytest.raises(UserError, match="no point was timed beside a baseline"):
        point_runs({"a": [sample_baseline()]})


def test_points_whose_paths_end_alike_have_names_of_their_own() -> None:
    """Fault: a label is written without the values of the others."""
    results = [
        sample_result("bita", {"adapter": f"outputs/{name}/one"}, 1.5, environment=ENVIRONMENT)
        for name in ("shallow", "deep")
    ]
    labels = [point.label for point in point_runs({"a": results})]
    assert labels == ["bita adapter shallow/one", "bita adapter deep/one"]


def test_what_else_differs_and_what_was_disturbed_is_said() -> None:
    runs = sweeps(2.6, 1.2)
    assert runs_notes(point_runs(runs)) == []
    runs["late"] = [
        run(1.4, setting={"dtype": "float32"}, environment={"busy_elsewhere_percent": 74.0})
    ]
    differing, disturbed = runs_notes(point_runs(runs))
    assert differing == "The runs differ in dtype: bfloat16, float32."
    assert "late: machine 74 % busy" in disturbed
    assert any("!1.40" in line for line in printed(point_runs(runs)))


def test_the_file_has_a_row_for_each_run(tmp_path: Path) -> None:
    points = point_runs(sweeps(2.6, 1.2, 1.9))
    write_machines(tmp_path, points)
    frame = pd.read_csv(tmp_path / "machines.csv")
    assert len(frame) == 3 == len(machines_frame(points))
    assert frame[frame.is_median].speedup.tolist() == [1.9]
    assert frame.read_gb_per_s.isna().sum() == 1
    assert set(frame.commit) == {"abc1234"} and set(frame.runs_highest) == {2.6}
    assert set(frame.runs_lowest) == {1.2}
    (row,) = frame[frame.is_median].to_dict("records")
    assert [row["speedup_low"], row["speedup_high"]] == pytest.approx([1.85, 1.95])


def test_the_file_tells_points_that_differ_in_the_setting_from_each_other() -> None:
    runs = {
        machine: [
            sample_result(
                "medusa",
                {"top_k": 10},
                speedup + place,
                setting={
                    "batch": batch,
                    "hardware": machine,
                    "decoding": {**SAMPLED, "top_k": top_k},
                },
                environment=ENVIRONMENT,
            )
            for batch, top_k, speedup in ((1, None, 1.5), (8, 50, 1.1))
        ]
        for place, machine in enumerate(("EPYC", "Xeon"))
    }
    frame = machines_frame(point_runs(runs))
    assert frame.groupby("batch").speedup.apply(sorted).tolist() == [[1.5, 2.5], [1.1, 2.1]]
    assert set(frame.knob_top_k) == {10} and set(frame.top_k.dropna()) == {50}


SAMPLED = {"max_new_tokens": 128, "temperature": 1.0, "top_p": None}


def test_a_merged_folder_lays_its_machines_side_by_side() -> None:
    """Fault: of two machines in one folder the newest alone was shown."""
    merged = [
        run(speedup, hardware=machine, setting={"threads": threads})
        for machine, threads, speedup in (("EPYC", 8, 1.2), ("Xeon", 4, 1.9))
    ]
    (point,) = point_runs({"all": [sample_baseline(), *merged]})
    assert list(point.results) == ["all, EPYC", "all, Xeon"]
    assert (point.range, point.median_name) == ((1.2, 1.9), "all, EPYC")
    (point,) = point_runs({"all": merged, "later": [run(1.5, hardware="Xeon")]})
    assert list(point.results) == ["all, EPYC", "later", "all, Xeon"]


def test_two_devices_of_one_machine_are_two_points() -> None:
    both = [
        run(1.5, hardware=hardware, setting={"device": device})
        for device, hardware in (("cpu", "EPYC"), ("cuda", "H200"))
    ]
    assert [list(point.results) for point in point_runs({"a": both})] == [["a"], ["a"]]


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("batch", (1, 8)),
        ("target", ("t5-small", "t5-large")),
        ("dataset", ("wmt14", "iwslt2017")),
        ("device", ("cpu", "cuda")),
    ],
)
def test_what_differs_between_machines_of_a_folder_tells_points_apart(
    key: str, values: tuple[object, object]
) -> None:
    """Fault: each machine was a sweep of its own, in which nothing differs."""
    merged = [
        run(1.5, hardware=machine, setting={key: value})
        for machine, value in zip(("EPYC", "Xeon"), values, strict=True)
    ]
    merged.append(run(1.2, hardware="A100", setting={key: values[1]}))
    assert len(point_runs({"all": merged})) == 2
