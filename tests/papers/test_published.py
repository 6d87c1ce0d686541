"""The papers' printed numbers: every file loads, agrees with the others and with the papers' own text."""

from __future__ import annotations

from pathlib import Path

import pytest

from bild_lab.errors import UserError
from bild_lab.papers import ppd_table1 as paper
from bild_lab.papers.published import FOLDER, load_published, published_names
from tests.papers.printed import PRINTED

PAPERS = Path(__file__).resolve().parents[3] / "shared" / "papers"
DATASETS = {"squad": "SQuAD", "wmt15_en_fr": "WMT", "cnn_dailymail": "CNN/DM"}


@pytest.mark.parametrize("name", published_names())
def test_a_file_of_published_numbers_loads_and_opens_with_its_command(name: str) -> None:
    published = load_published(name)
    assert (FOLDER / f"{name}.yaml").read_text().partition("\n")[0].endswith(f": python scripts/figures.py {name}")
    assert len(published.printed) == sum(
        value is not None for b in published.values for v in b.rows.values() for value in v
    )
    commands = [*published.commands["paper"], *published.commands["small"]]
    assert all(command.startswith(("python run.py", "python scripts/")) for command in commands)


@pytest.mark.parametrize("name", published_names())
def test_published_numbers_are_of_a_plausible_size(name: str) -> None:
    for (_, _, quantity), value in load_published(name).printed.items():
        if quantity.startswith("quality") and "ahead" not in quantity:
            assert 30 < value < 45
        elif quantity.startswith(("speedup at", "speedup,", "greedy speedup", "Theorem 3.8")) or quantity == "speedup":
            assert 1 < value < 6
        elif "rate" in quantity or "share" in quantity or "latency" in quantity:
            assert 0 < value < 1
        else:
            assert 0 < value <= 5


@pytest.mark.skipif(not PAPERS.is_dir(), reason="no papers beside the project (../shared/papers)")
@pytest.mark.parametrize("name", published_names())
def test_every_published_number_is_in_its_papers_row_and_column(name: str) -> None:
    printed = load_published(name).printed
    if not printed:
        assert name not in PRINTED
        return
    paper, read = PRINTED[name]
    assert printed == pytest.approx(read((PAPERS / f"{paper}.txt").read_text()))


def test_the_averages_of_bilds_table_1_are_those_of_its_columns() -> None:
    printed = load_published("bild_fig4").printed
    for row in ("unaligned", "aligned"):
        for quantity in ("speedup at minimal loss", "speedup at one point of loss"):
            several = [printed[panel, row, quantity] for panel in ("iwslt2017", "wmt14", "xsum", "cnn_dailymail")]
            assert printed["average", row, quantity] == pytest.approx(sum(several) / 4, abs=0.011)


def test_bitas_tables_agree_where_they_repeat_each_other() -> None:
    first = load_published("bita_tab1").printed
    rows = {
        "bita_tab3_8": "deep prompt",
        "bita_tab4_9": "efficient_tree, k = 5",
        "bita_fig8": "16 prompt tokens",
        "bita_fig9": "3 mask tokens",
    }
    for name, row in rows.items():
        for panel in ("xsum", "mt_bench", "cip", "humaneval_x"):
            told = load_published(name).printed[panel, row, "greedy speedup"]
            assert told == first[panel, "llama2_7b_chat", "greedy speedup"], name
    overall = load_published("bita_tab7").printed
    for row in ("llama2_7b_chat", "llama2_13b_chat", "vicuna_33b", "falcon_40b", "llama2_70b_chat"):
        assert overall["overall", row, "greedy speedup"] == first["mt_bench", row, "greedy speedup"]


@pytest.mark.parametrize("name", ["ppd_tab1", "ppd_tab4_6"])
def test_match_rates_over_all_positions_are_those_that_the_theory_is_drawn_from(name: str) -> None:
    printed = load_published(name).printed
    for panel, dataset in DATASETS.items():
        for layer in paper.EXIT_LAYERS:
            for top_k in paper.TOP_KS:
                for trained, heads in ((False, "shared"), (True, "trained")):
                    told = printed[panel, f"layer {layer}, {heads}, k = {top_k}", "match rate"]
                    assert told == pytest.approx(paper.match_rate(dataset, top_k, trained, layer))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("tolerance: 0.1", "tolerance: 0", "tolerance must be a number > 0, got 0"),
        ("[0.2, 0.2]", "[0.2]", "2 values are wanted, got 1"),
        ("[0.2, 0.2]", "[0.2, twenty]", "values must be numbers or null, got 'twenty'"),
        ("hardware:", "machine:", "Published has the keys"),
        ("  small: [bild_fig2_small]\n", "", "folders must be given for paper and small, got paper"),
        ("  small:\n", "  tiny:\n", "commands must be given for paper and small, got paper, tiny"),
        ("values:", "values: [", "is no record of published numbers"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (FOLDER / "bild_fig2.yaml").read_text()
    assert old in text
    (tmp_path / "bild_fig2.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(UserError, match="no record of published numbers") as refused:
        load_published("bild_fig2", tmp_path)
    assert message in str(refused.value)


def test_an_unknown_figure_is_refused_with_those_there_are() -> None:
    with pytest.raises(UserError, match=r"figure must be one of bild_cascades, .*, got 'bild_fig3'"):
        load_published("bild_fig3")
