"""Pages of results, written from small files that are kept beside them.

`docs/results/NAME.md.j2` is a page's text. Its numbers come from `docs/results/data`: of each sweep `NAME.csv`, a row
for every point; `NAME.json`, where and when it was measured; of a screening also `NAME.screen.csv`, a row for every
screened point. No texts of datasets are kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from transformers import PreTrainedConfig

from bild_lab.engine.models.checkpoint import DTYPES
from bild_lab.errors import UserError
from bild_lab.files import write_atomically
from bild_lab.lab.analysis.cost import dimensions
from bild_lab.lab.formatting import interval, number, percent, short_name, signed, signed_interval
from bild_lab.lab.results.batches import BatchCurve, batch_curves, device_speedup, roofline
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.results.table import to_frame
from bild_lab.lab.schema.result import Result
from bild_lab.lab.toy_pair import named_checkpoint

DATA, TEMPLATE = "data", ".md.j2"
POINT_COLUMNS = """policy target draft dataset split n_examples dtype batch engine quality quality_low quality_high
quality_difference quality_difference_low quality_difference_high latency_s_median latency_s_p95 latency_s_mean speedup
speedup_low speedup_high tokens_per_s baseline_tokens_per_s tokens_per_target_call acceptance_rate drafted accepted
draft_calls target_calls fallbacks rollbacks exit_layer_mean agreement_with_target certificate_equal certificate_ties
certificate_defects predicted_cost_ratio""".split()
SCREEN_COLUMNS = """policy split n_examples quality quality_difference predicted_speedup tokens_per_target_call
acceptance_rate on_front""".split()
SCREEN_SUMMARY = """points live_target_calls live_draft_calls recorded_target_calls recorded_draft_calls
vanilla_target_calls record_bytes seconds cost_model_error cost_model_worst replayed_live replayed_differently confirmed
prediction_error_median prediction_error_largest""".split()
# bytes and bfloat16 operations per second, of the manufacturer's data sheets (SXM modules, dense)
DEVICES = {"A100": (2.039e12, 312e12), "H100": (3.35e12, 989e12)}
FOUND = ("git", "cpu", "gpu", "cores", "threads", "torch", "transformers")  # in the environment of every point


def keep(folder: Path, data: Path, name: str | None = None) -> list[Path]:
    """Write what pages need of a sweep or a screening (outputs/NAME) to `data`. Returns the files.

    Raises UserError for a folder that holds neither.
    """
    name, contents = name or folder.name, {}
    results = Sweep(folder).results() if (folder / "points").is_dir() else []
    if results:
        frame = to_frame(results)
        for model in ("target", "draft"):
            frame[model] = frame[model].map(short_name, na_action="ignore")
        contents[f"{name}.csv"] = _csv(frame, POINT_COLUMNS)
    if curves := batch_curves(results):
        contents[f"{name}.batches.csv"] = pd.DataFrame(batch_table(curves)).to_csv(index=False, float_format="%.6g")
    if (folder / "screen.csv").is_file():
        contents[f"{name}.screen.csv"] = _csv(pd.read_csv(folder / "screen.csv"), SCREEN_COLUMNS)
    summary = {"measured": measured(results)} if results else {}
    if (folder / "screen.json").is_file():
        screen = json.loads((folder / "screen.json").read_text())
        summary["screen"] = {key: screen.get(key) for key in SCREEN_SUMMARY}
    if not summary:
        raise UserError(f"{folder} has nothing to keep; give the folder of a sweep or a screening")
    contents[f"{name}.json"] = json.dumps(summary, indent=1) + "\n"
    for file, content in contents.items():
        write_atomically(data / file, content.encode())
    return [data / file for file in contents]


def batch_table(curves: Sequence[BatchCurve]) -> list[dict[str, Any]]:
    """A row for every point of the curves, with the speedups that devices would have by their bandwidth and speed."""
    rows = []
    for curve in curves:
        alone = next((one.result for one in curve.points if one.batch == 1), None)
        for one in curve.points:
            result = one.result
            rows.append(
                {
                    "policy": curve.label,
                    "batch": one.batch,
                    "speedup": result.speedup.value,
                    "speedup_low": result.speedup.low,
                    "speedup_high": result.speedup.high,
                    "predicted": one.predicted,
                    "tokens_per_s": result.tokens_per_s,
                    "baseline_tokens_per_s": result.baseline_tokens_per_s,
                    "latency_s_median": result.latency_s.median,
                    "latency_s_p95": result.latency_s.p95,
                    "agreement_with_target": result.agreement_with_target,
                    "break_even": curve.break_even,
                    **{name: on_device(alone, one.batch, *speeds) for name, speeds in DEVICES.items()},
                }
            )
    return rows


def on_device(alone: Result | None, batch: int, bandwidth: float, flops: float) -> float | None:
    """The speedup at a batch that a device would have; None without rounds at batch 1."""
    if alone is None or not alone.counts.target_calls:
        return None
    width = DTYPES[alone.setting.dtype].itemsize
    seconds = [
        None if path is None else roofline(decoder_weights(named_checkpoint(path).config), width, bandwidth, flops)
        for path in (alone.setting.target, alone.setting.draft if alone.counts.draft_calls else None)
    ]
    return device_speedup(alone, batch, *seconds)


def decoder_weights(config: PreTrainedConfig) -> int:
    """Numbers in the matrices that a forward of the decoder reads."""
    sizes = dimensions(config)
    return sizes.layers.values + sizes.head.values


def measured(results: Sequence[Result]) -> dict[str, Any]:
    """Where and when: every value that the points' environments have, and the first and last day."""
    days = sorted(result.environment.started[:10] for result in results)
    values = {key: {one.environment.get(key) for one in results} - {None} for key in FOUND}
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
    def batches(self) -> list[dict[str, Any]]:
        """Every point of the curves over the batch."""
        return _rows(self.data / f"{self.name}.batches.csv")

    @cached_property
    def _summary(self) -> Mapping[str, Any]:
        return json.loads((self.data / f"{self.name}.json").read_text())

    @property
    def measured(self) -> Mapping[str, Any]:
        return self._summary["measured"]

    @property
    def screen(self) -> Mapping[str, Any]:
        return self._summary["screen"]

    def point(self, **wanted: Any) -> dict[str, Any]:
        """The one measured point with these values."""
        return one_of(self.points, wanted, self.name)

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
        "speedup": lambda row: f"{number(row['speedup'])} {interval(row['speedup_low'], row['speedup_high'])}",
        "difference": difference,
        "number": number,
        "signed": signed,
        "percent": percent,
        "count": lambda value: f"{value:,}",
    }
    environment.globals |= {"kept": lambda name: Kept(folder / DATA, name)}
    return environment.get_template(template.name).render()


def difference(row: Mapping[str, Any]) -> str:
    """Of a row's quality from the baseline's, with its interval where there is any."""
    value, low, high = (row[f"quality_difference{end}"] for end in ("", "_low", "_high"))
    return signed(value) if low == high == value else f"{signed(value)} {signed_interval(low, high)}"


def page_of(template: Path) -> Path:
    return template.with_name(template.name.removesuffix(".j2"))
