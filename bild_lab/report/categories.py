"""Speed by category of the dataset, for the report and the terminal (BiTA Table 7)."""

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from bild_lab.lab.analysis.pareto import is_baseline
from bild_lab.lab.results.groups import Group, by_setting
from bild_lab.report.formatting import interval, knob_label, number, percent, point_label, times
from bild_lab.report.page.tables import Cell, Column, Row

OVERALL = "overall"


def category_table(group: Group) -> tuple[list[Column], list[Row]]:
    """Return columns, and a row for every category of the telling points; no rows without categories."""
    results = [result for result in group.telling() if result.get("categories") and not is_baseline(result)]
    parts = [part for result in results for part in _parts(group, result)]
    order = list(dict.fromkeys(part["category"] for part in parts if part["category"] != OVERALL))
    parts.sort(key=lambda part: [*order, OVERALL].index(part["category"]))  # stable: the fastest point first
    rows = [Row(part["point"], [column.cell(part) for column in _COLUMNS], False, False) for part in parts]
    return _COLUMNS, rows


def terminal_table(results: list[dict]) -> Table | None:
    """Tabulate each setting's best point at no loss, or its fastest, by category; None without categories."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("category", no_wrap=True)
    for title in ("examples", "speedup", "tokens/s", "tok/call", "acc."):
        table.add_column(title, justify="right", no_wrap=True)
    for group in by_setting(results):
        best = group.best(0.0) or group.results[0]
        if not best.get("categories"):
            continue
        table.add_row(Text(point_label(best, group.knobs(best)), style="bold"))
        for part in _parts(group, best):
            faster = f"{number(part['speedup']['value'])} {_bounds(part)}".strip()
            cells = [part["category"], number(part["n_examples"], 0), faster, number(part["tokens_per_s"], 1)]
            cells += [number(part["tokens_per_target_call"]), percent(part["acceptance_rate"]).replace(" ", "")]
            table.add_row(*map(Text, cells))
        table.add_section()
    return table if table.row_count else None


def _parts(group: Group, result: dict) -> list[dict]:
    """What was measured in each category and over all examples, each with what it is a part of."""
    whole = {
        "point": result["point"],
        "policy": result["policy"],
        "label": knob_label(result, group.knobs(result)),
    }
    everything = {**result, "n_examples": result["setting"]["n_examples"]}
    parts = {**result["categories"], OVERALL: everything}
    return [{**part, **whole, "category": name} for name, part in parts.items()]


def _bounds(part: dict) -> str:
    return interval(part["speedup"]["low"], part["speedup"]["high"])


def _speedup(part: dict) -> Cell:
    return Cell(times(part["speedup"]["value"]), _bounds(part), part["speedup"]["value"])


def _rate(part: dict) -> Cell:
    base = part["baseline_tokens_per_s"]
    return Cell(number(part["tokens_per_s"], 1), "" if base is None else number(base, 1), part["tokens_per_s"])


def _calls(part: dict) -> Cell:
    return Cell(number(part["tokens_per_target_call"]), "", part["tokens_per_target_call"])


_COLUMNS = [
    Column("category", "category of the dataset", lambda part: Cell(part["category"], "", part["category"])),
    Column(
        "policy",
        "how tokens were decoded, with the knobs that tell it from others",
        lambda part: Cell(part["policy"], part["label"], part["policy"]),
    ),
    Column(
        "examples",
        "examples of the category; each turn of a conversation is one",
        lambda part: Cell(number(part["n_examples"], 0), "", part["n_examples"]),
    ),
    Column("speedup", "times the baseline's speed, with its 95 % interval over the category's examples", _speedup),
    Column("tokens/s", "emitted tokens per second, and below it the baseline's", _rate),
    Column("tokens/call", "emitted tokens per forward pass of the target", _calls),
    Column(
        "acceptance",
        "how often a drafted token stands if those before it do",
        lambda part: Cell(percent(part["acceptance_rate"], 1), "", part["acceptance_rate"]),
    ),
]
