"""Two accounts of the HTML report: predicted beside measured speed, and operations beside memory traffic."""

from bild_lab.lab.analysis.pareto import is_baseline
from bild_lab.lab.results.groups import Group
from bild_lab.report.formatting import knob_label, number, percent, times
from bild_lab.report.page.tables import Cell, Column, Row, point_rows

_STEPS = (
    ("Thm 3.8", "theorem", "what the theorem promises for this acceptance rate, window and cost ratio"),
    ("rounds", "rounds", "with the tokens and drafter steps per target call that there were"),
    ("+ verify", "verify", "with the real time of verifying several rows and judging them"),
    ("+ host", "host", "with the code around"),
    ("+ prefill", "prefill", "with the encoder and prompt, and the real lengths of the texts"),
    ("measured", "measured", "without the waits of the traced pass"),
)


def prediction_table(group: Group) -> tuple[list[Column], list[Row]]:
    """Return columns and rows of the points that drafted, the telling ones of many."""
    results = [result for result in group.telling() if result.get("prediction")]
    columns = [
        _name(group),
        _told("c", "cost_ratio", "seconds of a drafter step over those of a token by the target alone"),
        Column("\u03b1", "acceptance rate on the traced examples", _acceptance),
        _told("window", "window", "tokens per draft, where it is fixed", digits=0),
        *(Column(title, hint, _speed(key)) for title, key, hint in _STEPS),
    ]
    return columns, point_rows(group, columns, results)


def cost_table(group: Group) -> tuple[list[Column], list[Row]]:
    """Return columns and rows of the points whose forwards were recorded, the telling ones of many."""
    results = [result for result in group.telling() if result.get("cost")]
    columns = [
        _name(group),
        Column("GFLOP/token", "operations per emitted token, 10\u2079", _cost("flops_per_token", 1e9, 3)),
        Column("MB/token", "memory traffic per emitted token, 10\u2076 bytes", _cost("bytes_per_token", 1e6, 1)),
        Column("FLOP/byte", "arithmetic intensity", _cost("flops_per_byte", 1, 2)),
        Column("operations", "times the baseline's", _ratio("flops_ratio")),
        Column("traffic", "times the baseline's", _ratio("bytes_ratio")),
        Column("intensity", "times the baseline's", _ratio("intensity_ratio")),
    ]
    return columns, point_rows(group, columns, results)


def _name(group: Group) -> Column:
    def cell(result: dict) -> Cell:
        knobs = "baseline" if is_baseline(result) else knob_label(result, group.knobs(result))
        return Cell(result["policy"], knobs, result["policy"])

    return Column("policy", "how tokens were decoded, with the knobs that tell it from others", cell)


def _told(title: str, key: str, hint: str, digits: int = 3) -> Column:
    return Column(title, hint, lambda result: Cell(number(result["prediction"][key], digits), "", _order(result, key)))


def _order(result: dict, key: str) -> float | None:
    return result["prediction"][key]


def _acceptance(result: dict) -> Cell:
    rate = result["prediction"]["acceptance_rate"]
    return Cell(percent(rate, 1), "", rate)


def _speed(key: str):
    return lambda result: Cell(times(result["prediction"][key]), "", result["prediction"][key])


def _cost(key: str, unit: float, digits: int):
    return lambda result: Cell(number(result["cost"][key] / unit, digits), "", result["cost"][key])


def _ratio(key: str):
    return lambda result: Cell(times(result["cost"][key]), "", result["cost"][key])
