"""Pages of results say what the kept numbers say."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from bild_lab.errors import UserError
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.schema.numbers import ForwardKind, Work
from bild_lab.lab.schema.result import BUSY_PERCENT
from bild_lab.report.result_pages import (
    DATA,
    TEMPLATE,
    TRAINING,
    Kept,
    difference,
    keep,
    of_drafts,
    page_of,
    render,
    speedup,
)
from tests.report.sample import sample_drafted

PAGES = Path(__file__).parents[2] / "docs" / "results"
TEMPLATES = sorted(PAGES.glob(f"*{TEMPLATE}"))
MEASURED = re.compile(r"\d\.\d+ ?×|\[−?\d+\.\d+, |\d,\d{3} (target|drafter) forwards|\d\.\d BLEU")


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda file: file.name)
def test_a_page_is_what_its_template_and_the_kept_numbers_give(template: Path) -> None:
    assert page_of(template).read_text() == render(template), "run make results"


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda file: file.name)
def test_a_template_has_no_measured_number_of_its_own(template: Path) -> None:
    text = re.sub(r"{[{%].*?[}%]}", "", template.read_text())
    assert not MEASURED.findall(text)


def test_every_page_has_a_template() -> None:
    assert {file.stem for file in PAGES.glob("*.md")} == {page_of(file).stem for file in TEMPLATES}


def test_kept_numbers_are_small_and_without_texts() -> None:
    for file in (PAGES / DATA).iterdir():
        assert file.stat().st_size < 60_000, file
        assert "/" not in re.sub(r"outputs/[\w./]+|drafter/|km/h", "", file.read_text()), f"a path in {file}"


def test_the_readme_says_what_the_register_says() -> None:
    register = (PAGES / "README.md").read_text()
    readme = (PAGES.parents[1] / "README.md").read_text()
    claims = re.search(r"## What was measured\n(.*?)\n## ", readme, re.DOTALL)
    stated = re.findall(r"(\d\.\d\d)× (\[\d\.\d\d, \d\.\d\d\])", claims[1].replace("\n  ", " "))
    assert len(stated) >= 4
    assert all(f"{value} {interval}" in register for value, interval in stated)


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    fast, slow = (
        sample_drafted("bild", {"fallback": fallback}, speed, lost, (0.8, 0.5))
        for fallback, speed, lost in ((0.3, 1.61, -0.4), (0.5, 1.4, 0.0))
    )
    for result in (fast, slow):
        Sweep(tmp_path / "swept").write_point(result.point, "name: swept\n", result, [])
    files = keep(tmp_path / "swept", tmp_path / DATA, "other")
    assert [file.name for file in files] == ["other.csv", "other.json"]
    kept = Kept(tmp_path / DATA, "other")
    point = kept.point(fallback=0.3)
    assert (point["speedup"], point["target"]) == (pytest.approx(fast.speedup.value, rel=1e-5), "t5-large")
    assert (kept.measured["first_day"], kept.measured["cpu"]) == ("2026-11-21", ["AMD EPYC 7B13"])
    with pytest.raises(UserError, match="2 rows of other have"):
        kept.point(policy="bild")
    (tmp_path / f"page{TEMPLATE}").write_text('{{ kept("other").point(fallback=0.3) | speedup }}\n')
    assert render(tmp_path / f"page{TEMPLATE}").startswith("1.61 [")


def test_confirmed_points_are_told_with_what_they_were_chosen_at(tmp_path: Path) -> None:
    """Found by all of their knobs, those without a value too; points that were not screened are left out."""
    screened = [("bild", 0.1, 2, -0.9), ("bild", 0.2, 2, 0.1), ("bild", 0.2, 3, -2), ("speculative", "", 2, 0)]
    rows = "".join(f"{policy},{fallback},{window},validation,{lost}\n" for policy, fallback, window, lost in screened)
    (tmp_path / "plane.screen.csv").write_text("policy,fallback,window,split,quality_difference\n" + rows)
    measured = [("speculative", "", 2, 0), ("bild", 0.1, 2, -1.2), ("bild", 0.2, 2, -0.3), ("speculative", "", 7, 0)]
    rows = "".join(f"{policy},{window},{fallback},large,{lost}\n" for policy, fallback, window, lost in measured)
    (tmp_path / "plane.csv").write_text("policy,window,fallback,target,quality_difference\n" + rows)
    found = [(one["policy"], one["chosen_at"], one["quality_difference"]) for one in Kept(tmp_path, "plane").confirmed]
    assert found == [("bild", 0.1, -0.3), ("speculative", 0, 0), ("bild", -0.9, -1.2)]


def test_a_speedup_timed_on_a_busy_machine_says_so() -> None:
    row = {"speedup": 1.2, "speedup_low": 1.1, "speedup_high": 1.3, "busy_elsewhere_percent": BUSY_PERCENT}
    assert speedup(row) == "1.20 [1.10, 1.30]"
    assert speedup({**row, "busy_elsewhere_percent": 17.6}) == "1.20 [1.10, 1.30] (machine 18 % busy elsewhere)"


def test_depths_the_drafters_share_of_the_time_and_declared_machines_are_kept() -> None:
    one, two = (ForwardKind(model=0, rows=rows, count=rows, flops=0, bytes_moved=rows * 10**9) for rows in (1, 2))
    work = Work(method=[one], baseline=[two], rounds=1, baseline_rounds=2)
    drafted = replace(sample_drafted("speculative", {"window": 5}, 1.5, 0.0, (0.8, 1.0)), work=work)
    deep = replace(drafted, counts=replace(drafted.counts, accepted_by_depth=[0.9, 0.5]))
    found = of_drafts(deep)
    assert (found["accepted_1"], found["accepted_2"], "accepted_3" in found) == (0.9, 0.5, False)
    assert found["draft_share"] == pytest.approx(0.38, rel=0.01)
    assert found["h100_sxm"] == found["a100_sxm"] == pytest.approx(2.0)
    assert "h100_sxm" not in of_drafts(replace(deep, work=None))


def test_what_is_kept_of_a_benchmark_comes_back(tmp_path: Path) -> None:
    environment = {"started": "2026-11-21T10:00:00+00:00", "threads": 2, "gpu": None}
    rows = [{"shape": "toy", "arm": arm, "ms_per_token": ms, "ratio": None} for arm, ms in (("ours", 1.5), ("a", 2.25))]
    forwards = [{"shape": "toy", "by": "query", "length": 1, "ms": 0.123456}]
    (tmp_path / "bench").mkdir()
    content = {"environment": environment, "rows": rows, "forwards": forwards}
    (tmp_path / "bench" / "bench.json").write_text(json.dumps(content))
    files = keep(tmp_path / "bench", tmp_path / DATA)
    assert [file.name for file in files] == ["bench.bench.csv", "bench.json"]
    kept = Kept(tmp_path / DATA, "bench")
    assert (kept.arm("toy", "a")["ms_per_token"], kept.arm("toy", "ours")["ratio"]) == (2.25, None)
    assert (kept.forwards[0]["ms"], kept.measured["threads"]) == (0.1235, ["2"])
    with pytest.raises(UserError, match="0 rows of bench have"):
        kept.arm("toy", "other")


def test_the_end_of_a_training_is_kept(tmp_path: Path) -> None:
    (tmp_path / "aligned").mkdir()
    compared = {"token_agreement": {"before": 0.5, "after": 0.75}}
    end = {**dict.fromkeys(TRAINING, 1), "metric": "bleu"}
    history = [{"step": 10, "loss": 1.5}, {"step": 10, "eval_bleu": 40.0}, {"step": 20, "eval_bleu": 41.123456}]
    metrics = {**end, "history": history, "alignment": {"folder": "a", "compared": compared}}
    (tmp_path / "aligned" / "metrics.json").write_text(json.dumps(metrics))
    keep(tmp_path / "aligned", tmp_path / DATA)
    assert Kept(tmp_path / DATA, "aligned").training == {
        **end,
        "progress": {"10": 40.0, "20": 41.12},
        "compared": compared,
    }


def test_match_rates_and_their_picture_are_kept(tmp_path: Path) -> None:
    (tmp_path / "match").mkdir()
    environment = {"started": "2026-11-21T10:00:00+00:00", "threads": 1}
    totals = [{"heads": "shared", "layer": 2, "top_k": 1, "rate": 0.61234, "low": 0.6, "high": 0.62}]
    told = {"totals": totals, "texts": 200, "tokens": 3000, "environment": environment, "settings": {"layers": [2]}}
    (tmp_path / "match" / "metrics.json").write_text(json.dumps(told))
    Image.effect_noise((300, 200), 90).convert("RGB").save(tmp_path / "match" / "match_rates.png")
    files = keep(tmp_path / "match", tmp_path / DATA, "match_t5")
    assert [file.name for file in files] == ["match_t5.match.csv", "match_t5.json"]
    kept = Kept(tmp_path / DATA, "match_t5")
    assert kept.matches == [{**totals[0], "rate": 0.6123}]
    assert (kept.match_rates, kept.measured["threads"]) == ({"texts": 200, "tokens": 3000}, ["1"])
    with Image.open(tmp_path / "figures" / "match_t5.png") as picture:
        assert (picture.size, picture.mode) == ((300, 200), "P")


def test_drawn_figures_keep_their_tables_and_a_small_picture(tmp_path: Path) -> None:
    (tmp_path / "drawn").mkdir()
    heading = "# Figure 4\n\nKim et al., 2023. The paper's hardware: a T4. Here: t5-large on toy test, 24 examples."
    claims, numbers = (
        "| claim | here |\n| --- | --- |\n| faster | holds |",
        "| row | here |\n| --- | --- |\n| a | 1.50 |",
    )
    written = [
        heading,
        "Small scale: others.",
        "![Figure 4](bild_fig4_small.png)",
        claims,
        numbers,
        "## Texts\n\nA dog.",
    ]
    (tmp_path / "drawn" / "bild_fig4_small.md").write_text("\n\n".join(written) + "\n")
    Image.effect_noise((300, 200), 90).convert("RGB").save(tmp_path / "drawn" / "bild_fig4_small.png")
    keep(tmp_path / "drawn", tmp_path / DATA)
    here = "t5-large on toy test, 24 examples"
    wanted = {"bild_fig4": {"item": "Figure 4", "here": here, "tables": [claims, numbers]}}
    assert Kept(tmp_path / DATA, "drawn").figures == wanted
    with Image.open(tmp_path / "figures" / "bild_fig4.png") as picture:
        assert (picture.size, picture.mode) == ((300, 200), "P")


def test_a_folder_without_numbers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to keep"):
        keep(tmp_path, tmp_path / DATA)


def test_a_difference_without_spread_has_no_interval() -> None:
    row = {"quality_difference": 0.0, "quality_difference_low": 0.0, "quality_difference_high": 0.0}
    assert difference(row) == "0.00"
    assert difference({**row, "quality_difference_low": -0.5}) == "0.00 [−0.50, 0.00]"
