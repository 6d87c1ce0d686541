"""Pages of results, written from small files that are kept beside them.

`docs/results/NAME.md.j2` is a page's text. Its numbers come from `docs/results/data`: of each sweep `NAME.csv`, a row
for every point; `NAME.json`, where and when it was measured; of a screening also `NAME.screen.csv`, a row for every
screened point; of a benchmark `NAME.bench.csv`, a row for every arm, and its single forwards in `NAME.json`; of a
training its end; of match rates `NAME.match.csv`, over all positions, and their picture; of drawn figures of the
papers their tables, and their pictures in `docs/results/figures`. No texts of datasets are kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from bild_lab.errors import UserError
from bild_lab.files import write_atomically
from bild_lab.lab.analysis.cost import read_machine
from bild_lab.lab.formatting import interval, number, percent, short_name, signed, signed_interval
from bild_lab.lab.results.batches import batch_curves
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.results.table import to_frame
from bild_lab.lab.schema.result import BUSY_PERCENT, Result

DATA, TEMPLATE, PICTURES = "data", ".md.j2", "figures"
DRAWN = "_small"  # ends the names of figures at small scale
POINT_COLUMNS = """policy target draft dataset split n_examples dtype batch temperature engine quality
quality_low quality_high quality_difference quality_difference_low quality_difference_high chrf_difference
chrf_difference_low chrf_difference_high log_probability_difference log_probability_difference_low
log_probability_difference_high latency_s_median
latency_s_p95 latency_s_mean speedup speedup_low speedup_high tokens_per_s baseline_tokens_per_s tokens_per_target_call
acceptance_rate drafted accepted draft_calls target_calls fallbacks rollbacks exit_layer_mean agreement_with_target
certificate_equal certificate_ties certificate_defects certificate_unjudged
certificate_output certificate_rounding busy_elsewhere_percent side_by_side
predicted_cost_ratio predicted_theorem predicted_rounds
pipeline_match_rate pipeline_latency_units pipeline_predicted_latency_units pipeline_theorem pipeline_exit
pipeline_concurrent pipeline_host""".split()
LONGEST_TABLE = 60  # rows of a figure's table that a page shows
DEPTHS, MACHINES = 4, ("a100_sxm", "h100_sxm")
DRAFT_COLUMNS = [*(f"accepted_{depth}" for depth in range(1, DEPTHS + 1)), "draft_share", *MACHINES]
SCREEN_COLUMNS = """policy split n_examples quality quality_difference predicted_speedup tokens_per_target_call
target_calls draft_calls acceptance_rate on_front""".split()
SCREEN_SUMMARY = """points live_target_calls live_draft_calls recorded_target_calls recorded_draft_calls
vanilla_target_calls record_bytes seconds cost_model_error cost_model_worst replayed_live replayed_differently
replayed_ties replayed_defects replayed_apart confirmed prediction_error_median prediction_error_largest""".split()
TRAINING = ("parameters", "train_examples", "steps", "passes", "training_s", "loss", "metric", "best", "recipe")
FOUND = ("git", "cpu", "gpu", "cores", "threads", "torch", "transformers")  # in the environment of every point


def keep(folder: Path, data: Path, name: str | None = None) -> list[Path]:
    """Write what pages need of a sweep, screening, benchmark, training, match rates or figures. Returns the files.

    Raises UserError for a folder that holds none of them.
    """
    name, contents = name or folder.name, {}
    results = Sweep(folder).results() if (folder / "points").is_dir() else []
    if results:
        frame = to_frame(results)
        drafting = pd.DataFrame([of_drafts(one) for one in results], columns=DRAFT_COLUMNS)
        frame = pd.concat([frame, drafting], axis="columns")
        for model in ("target", "draft"):
            frame[model] = frame[model].map(short_name, na_action="ignore")
        contents[f"{name}.csv"] = _csv(frame, POINT_COLUMNS + DRAFT_COLUMNS)
    if curves := batch_curves(results):
        from bild_lab.report.batch_table import batch_table  # reads configurations, and so loads torch

        contents[f"{name}.batches.csv"] = pd.DataFrame(batch_table(curves)).to_csv(index=False, float_format="%.6g")
    if (folder / "screen.csv").is_file():
        contents[f"{name}.screen.csv"] = _csv(pd.read_csv(folder / "screen.csv"), SCREEN_COLUMNS)
    summary: dict[str, Any] = {}
    if results:
        summary["measured"] = measured([(one.environment.started, one.environment.get) for one in results])
    if (folder / "bench.json").is_file():
        bench = json.loads((folder / "bench.json").read_text())
        contents[f"{name}.bench.csv"] = pd.DataFrame(bench["rows"]).to_csv(index=False, float_format="%.6g")
        summary["measured"] = measured([(bench["environment"]["started"], bench["environment"].get)])
        summary["forwards"] = [{**one, "ms": float(f"{one['ms']:.4g}")} for one in bench["forwards"]]
    metrics = folder / "metrics.json"
    told = json.loads(metrics.read_text()) if metrics.is_file() else {}
    if "recipe" in told:
        summary["training"] = of_training(told)
    if "totals" in told:
        contents[f"{name}.match.csv"] = pd.DataFrame(told["totals"]).to_csv(index=False, float_format="%.4g")
        summary["measured"] = measured([(told["environment"]["started"], told["environment"].get)])
        summary["match_rates"] = {key: told[key] for key in ("texts", "tokens")}
        write_atomically(data.parent / PICTURES / f"{name}.png", small_picture(folder / "match_rates.png"))
    if (folder / "screen.json").is_file():
        screen = json.loads((folder / "screen.json").read_text())
        summary["screen"] = {key: screen.get(key) for key in SCREEN_SUMMARY}
    if drawn := of_figures(folder):
        summary["figures"] = drawn
        for figure in drawn:
            write_atomically(data.parent / PICTURES / f"{figure}.png", small_picture(folder / f"{figure}{DRAWN}.png"))
    if not summary:
        wanted = "a sweep, screening, benchmark, training, match rates or drawn figures"
        raise UserError(f"{folder} has nothing to keep; give the folder of {wanted}")
    contents[f"{name}.json"] = json.dumps(summary, indent=1) + "\n"
    for file, content in contents.items():
        write_atomically(data / file, content.encode())
    return [data / file for file in contents]


def of_training(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Its end, and how it came there. progress: the metric that chose the best weights, by step."""
    key = f"eval_{metrics['metric']}"
    progress = {str(one["step"]): float(f"{one[key]:.4g}") for one in metrics["history"] if key in one}
    compared = metrics.get("alignment", {}).get("compared")
    return {**{one: metrics[one] for one in TRAINING}, "progress": progress, "compared": compared}


def of_figures(folder: Path) -> dict[str, dict[str, Any]]:
    """Of every figure drawn at small scale: its item in the paper, what it was measured on, and its shorter tables."""
    found = {}
    for file in sorted(folder.glob(f"*{DRAWN}.md")):
        parts = file.read_text().strip().split("\n\n")
        (here,) = re.findall(r"\. Here: (.+)\.$", parts[1])
        tables = [part for part in parts if part.startswith("| ") and part.count("\n") <= LONGEST_TABLE]
        name = file.stem.removesuffix(DRAWN)
        found[name] = {"item": parts[0].removeprefix("# "), "here": here, "tables": tables}
    return found


def small_picture(file: Path) -> bytes:
    """A PNG with 256 colors."""
    content = BytesIO()
    with Image.open(file) as picture:
        picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(content, "PNG", optimize=True)
    return content.getvalue()


def of_drafts(result: Result) -> dict[str, float | None]:
    """What its drafts did apart from the machine, and its predicted speedup on declared machines.

    accepted_1 and so on: the share of rounds with at least so many accepted tokens. draft_share: of the time of traced
    examples, the drafter's part. a100_sxm, h100_sxm: files of conf/machine.
    """
    depths, stages, work = result.counts.accepted_by_depth or [], result.stages_s, result.work
    return {
        **{f"accepted_{depth}": share for depth, share in enumerate(depths[:DEPTHS], start=1)},
        "draft_share": stages["draft"] / total if stages and (total := sum(stages.values())) else None,
        **{name: read_machine(name).speedup(work, result.setting["dtype"]) for name in MACHINES if work},
    }


def measured(environments: Sequence[tuple[str, Callable[[str], Any]]]) -> dict[str, Any]:
    """Where and when: every value that environments have, and the first and last day.

    environments: of each point, the time it started, and what gives another of its values.
    """
    days = sorted(started[:10] for started, _ in environments)
    values = {key: {value(key) for _, value in environments} - {None} for key in FOUND}
    found = {key: sorted(map(str, several)) for key, several in values.items()}
    return {"first_day": days[0], "last_day": days[-1], **found}


def _csv(frame: pd.DataFrame, columns: Sequence[str]) -> str:
    """These columns and the knobs. Numbers keep six digits."""
    names = list(frame.columns)
    knobs = names[names.index("policy") + 1 : names.index("target" if "target" in frame else "split")]
    kept = [columns[0], *knobs, *(one for one in columns[1:] if one in frame and frame[one].notna().any())]
    return frame[kept].to_csv(index=False, float_format="%.6g")


@dataclass(frozen=True)
class Kept:
    """What is kept of one sweep or screening."""

    data: Path
    name: str

    @cached_property
    def points(self) -> list[dict[str, Any]]:
        return _rows(self.data / f"{self.name}.csv")

    @cached_property
    def screened(self) -> list[dict[str, Any]]:
        return _rows(self.data / f"{self.name}.screen.csv")

    @cached_property
    def confirmed(self) -> list[dict[str, Any]]:
        """The screened points that were measured too, the one that lost least when it was chosen first.

        As measured; `chosen_at` is the difference in quality that it was chosen at.
        """
        names = list(self.screened[0])
        knobs = names[: names.index("split")]
        by_knobs = {tuple(row[name] for name in knobs): row for row in self.screened}
        keys = [tuple(point.get(name) for name in knobs) for point in self.points]
        pairs = [(by_knobs[key], point) for key, point in zip(keys, self.points, strict=True) if key in by_knobs]
        found = [{**point, "chosen_at": row["quality_difference"]} for row, point in pairs]
        return sorted(found, key=lambda one: -one["chosen_at"])

    @property
    def exists(self) -> bool:
        """Whether it has been kept."""
        return (self.data / f"{self.name}.json").is_file()

    @cached_property
    def batches(self) -> list[dict[str, Any]]:
        """Every point of the curves over the batch."""
        return _rows(self.data / f"{self.name}.batches.csv")

    @cached_property
    def _summary(self) -> Mapping[str, Any]:
        return json.loads((self.data / f"{self.name}.json").read_text())

    @property
    def measured(self) -> Mapping[str, Any]:
        return self._summary["measured"]

    @cached_property
    def arms(self) -> list[dict[str, Any]]:
        return _rows(self.data / f"{self.name}.bench.csv")

    @cached_property
    def matches(self) -> list[dict[str, Any]]:
        """Match rates over all positions: of every kind of heads, layer and k."""
        return _rows(self.data / f"{self.name}.match.csv")

    @property
    def match_rates(self) -> Mapping[str, int]:
        """How many texts and tokens they are over."""
        return self._summary["match_rates"]

    @property
    def forwards(self) -> list[dict[str, Any]]:
        return self._summary["forwards"]

    @property
    def training(self) -> Mapping[str, Any]:
        return self._summary["training"]

    @property
    def figures(self) -> Mapping[str, Mapping[str, Any]]:
        """Of figures of the papers, by name: item, here and tables."""
        return self._summary["figures"]

    @property
    def screen(self) -> Mapping[str, Any]:
        return self._summary["screen"]

    def point(self, **wanted: Any) -> dict[str, Any]:
        """The one measured point with these values."""
        return one_of(self.points, wanted, self.name)

    def arm(self, shape: str, arm: str) -> dict[str, Any]:
        """The one arm of a benchmark's shape."""
        return one_of(self.arms, {"shape": shape, "arm": arm}, self.name)

    def one_screened(self, **wanted: Any) -> dict[str, Any]:
        """The one screened point with these values."""
        return one_of(self.screened, wanted, self.name)


def one_of(rows: Sequence[dict[str, Any]], wanted: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The one row with these values. Raises UserError for none or several."""
    found = [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
    if len(found) != 1:
        raise UserError(f"{len(found)} rows of {name} have {dict(wanted)}, and a page needs one; name its knobs")
    return found[0]


def _rows(file: Path) -> list[dict[str, Any]]:
    frame = pd.read_csv(file).astype(object)
    return frame.where(frame.notna(), None).to_dict("records")


def render(template: Path) -> str:
    """The page of a template. Raises jinja2's errors for a mistake in it, and UserError for rows that are not there."""
    folder = template.parent
    environment = Environment(
        loader=FileSystemLoader(folder), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    environment.filters |= {
        "speedup": speedup,
        "difference": difference,
        "number": number,
        "signed": signed,
        "percent": percent,
        "count": lambda value: f"{value:,}",
    }
    environment.globals |= {"kept": lambda name: Kept(folder / DATA, name), "zip": zip}
    return environment.get_template(template.name).render()


def speedup(row: Mapping[str, Any]) -> str:
    """With its interval, and what else ran if the timing cannot be relied on."""
    busy = row.get("busy_elsewhere_percent") or 0.0
    caution = f" (machine {percent(busy / 100)} busy elsewhere)" if busy > BUSY_PERCENT else ""
    return f"{number(row['speedup'])} {interval(row['speedup_low'], row['speedup_high'])}{caution}"


def difference(row: Mapping[str, Any], of: str = "quality") -> str:
    """Of a row's quality, or another column, from the baseline's, with its interval where there is any."""
    value, low, high = (row[f"{of}_difference{end}"] for end in ("", "_low", "_high"))
    return signed(value) if low == high == value else f"{signed(value)} {signed_interval(low, high)}"


def page_of(template: Path) -> Path:
    return template.with_name(template.name.removesuffix(".j2"))
