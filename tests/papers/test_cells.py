"""Every number that a paper's figure or table takes from finished points, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bild_lab.lab.schema.result import Result, Setting
from bild_lab.papers import cells as rows
from bild_lab.papers.cells import against_speculative as ahead
from bild_lab.papers.cells import (
    at_losses,
    cost_ratios,
    counted_once,
    curves,
    greatest,
    in_one_regime,
    match_rates,
    replaced_share,
    table,
    theorem_table,
    tokens_per_call,
)
from bild_lab.papers.figures import FIGURES
from bild_lab.papers.match_rates import Rate
from bild_lab.papers.published import MeasuredNumber, compare, load_published
from tests.papers.samples import bild, bita, known, other, points, ppd
from tests.report.sample import sample_baseline, with_quality, with_speedup

DATA = "multi30k"
VANILLA = MeasuredNumber(DATA, "vanilla", "quality", 41.0)


def speedup(
    row: str, quantity: str, value: float, formula: float | None = None, panel: str = DATA
) -> MeasuredNumber:
    return MeasuredNumber(panel, row, quantity, value, value - 0.05, value + 0.05, formula)


def quality(row: str, quantity: str, value: float) -> MeasuredNumber:
    return MeasuredNumber(DATA, row, quantity, value, value - 2.3, value + 2.5)


def fastest(row: str, words: str, value: float, text: float) -> list[MeasuredNumber]:
    return [speedup(row, f"speedup at {words}", value), quality(row, f"quality at {words}", text)]


def curve(
    row: str, minimal: tuple | None, one_point: tuple, best: float = 41.0
) -> list[MeasuredNumber]:
    """Speedup and quality at minimal loss and at one point of loss, and the best quality."""
    first = [] if minimal is None else fastest(row, "minimal loss", *minimal)
    return [
        *first,
        *fastest(row, "one point of loss", *one_point),
        quality(row, "best quality", best),
    ]


def ratio(row: str, value: float, panel: str = DATA) -> MeasuredNumber:
    return MeasuredNumber(panel, row, "greedy speedup", value)


def same(row: str, value: float = 1.5) -> list[MeasuredNumber]:
    return curve(row, (value, 41.0), (value, 41.0))


RULES = ["cascade chow", "typical acceptance", "lenience", "static ensemble"]
CELLS = {
    "bild_fig4": [*curve("unaligned", (1.5, 41.0), (1.7, 40.0)), *same("aligned", 1.6), VANILLA],
    "bild_fig5": [*same("bild", 1.6), *curve("bild_no_rollback", None, (1.4, 40.0), 40.0), VANILLA],
    "bild_fig6_7": [
        *same("bild_early_exit", 1.6),
        *curve("calm", None, (1.3, 40.5), 40.5),
        VANILLA,
    ],
    "bild_fig8": [
        MeasuredNumber(DATA, "aligned", "FLOPs", 1.4),
        MeasuredNumber(DATA, "aligned", "memory operations", 0.6),
        MeasuredNumber(DATA, "aligned", "arithmetic intensity", 1.4 / 0.6),
        speedup("aligned", "speedup", 1.6),
    ],
    "bild_fig9": [*same("rollback 2", 1.6), *curve("rollback 5", None, (1.7, 40.0), 40.0), VANILLA],
    "bild_lossy": [*same("bild", 1.6), *(cell for row in RULES for cell in same(row)), VANILLA],
    "bild_speculative": [
        speedup("speculative, greedy", "speedup", 1.4),
        quality("speculative, greedy", "quality", 41.0),
        MeasuredNumber(DATA, "bild", "speedup ahead of speculative, greedy", 1.6 - 1.4),
        MeasuredNumber(DATA, "bild", "quality ahead of speculative, greedy", 0.0),
    ],
    "spec_tab2": [
        speedup("t5-tiny", "speedup, temperature 0", 1.5),
        MeasuredNumber(DATA, "t5-tiny", "acceptance rate, temperature 0", 0.7),
    ],
    "spec_tab3": [
        MeasuredNumber(DATA, "t5-tiny", "acceptance rate, temperature 0", 0.6),
        MeasuredNumber(DATA, "bigrams", "acceptance rate, temperature 0", 0.2),
    ],
    "spec_tab4": [speedup("t5-tiny, window 5, temperature 0", "speedup", 1.5, 1.31 * 1.5)],
    "spec_tab5": [
        cell
        for row in ("lenience 0.5", "lenience 1")
        for cell in (
            MeasuredNumber(DATA, row, "acceptance rate, temperature 0", 0.7),
            MeasuredNumber(DATA, row, "Theorem 3.8, temperature 0", 1.31 * 1.5),
            speedup(row, "speedup, temperature 0", 1.5),
        )
    ],
    "bita_tab1": [ratio("user", 2.0)],
    "bita_tab2": [ratio("bita", 2.0, "user"), ratio("layer_skip", 1.1, "user")],
    "bita_tab3_8": [ratio("deep prompt", 2.0), ratio("masks only", 1.5)],
    "bita_tab4_9": [ratio("efficient_tree, k = 5", 2.0), ratio("straightforward", 1.5)],
    "bita_tab7": [ratio("user", 2.5, "coding"), ratio("user", 2.0, "overall")],
    "bita_fig7": [ratio("bita", 2.0, "user"), ratio("medusa", 1.6, "user")],
    "bita_fig8": [ratio("16 prompt tokens", 2.0)],
    "bita_fig9": [ratio("3 mask tokens", 2.0)],
    "ppd_fig2": [
        MeasuredNumber(DATA, "shared head, k = 3", "match rate", 0.5),
        MeasuredNumber(DATA, "shared head, k = 3", "latency per token by the theorem", 1 / 1.33),
        MeasuredNumber(DATA, "shared head, k = 3", "processes on average", 9.0 / 4.6),
        speedup("shared head, k = 3", "speedup", 0.9),
    ],
    "ppd_fig4": [
        MeasuredNumber(DATA, "shared head, k = 3", "layers run per token", 9.0, formula=9.1),
        speedup("shared head, k = 3", "speedup", 0.9, 1.33),
    ],
}


@pytest.mark.parametrize("name", CELLS)
def test_a_figures_numbers_are_those_of_its_points(name: str) -> None:
    assert FIGURES[name].numbers(points(name)) == CELLS[name]


def aligned(result: Result) -> Result:
    return known("toy_aligned", result)


def test_costs_are_those_of_the_fastest_point_at_minimal_loss_if_they_were_counted() -> None:
    worse, uncounted = aligned(bild(1.9, loss=0.5)), replace(aligned(bild(1.6)), cost=None)
    assert cost_ratios([worse]) == cost_ratios([uncounted]) == []
    other_data = aligned(bild(1.3, setting={"dataset": "wmt"}))
    assert [cell.data for cell in cost_ratios([worse, uncounted, other_data])] == ["wmt"] * 4
    both = cost_ratios([aligned(bild(1.6)), other_data])
    assert [cell.data for cell in both] == [DATA] * 4 + ["wmt"] * 4


def test_the_losses_of_a_row_are_those_that_the_papers_table_allows() -> None:
    """0.12 of a point at minimal loss, 1.19 at one point of loss."""
    lossy = ((1.5, 0.12), (1.6, 0.13), (1.8, 1.19), (1.9, 1.2))
    several = [known("toy", bild(value, loss)) for value, loss in lossy]
    found = {cell.quantity: cell.value for cell in at_losses(several, rows.alignment)}
    speeds = [found[f"speedup at {words}"] for words in ("minimal loss", "one point of loss")]
    assert speeds == [1.5, 1.8]


def test_a_curve_is_of_measured_points_beside_the_baseline() -> None:
    undefined = with_quality(bild(1.5), value=None)
    found = curves([sample_baseline(), undefined, bild(1.6)], rows.policy)
    assert found == {(DATA, "bild"): [bild(1.6)]}


def test_points_of_other_batches_or_graphs_do_not_replace_one_another() -> None:
    several = [bild(1.5, setting=own) for own in ({}, {"batch": 4}, {"compile": "graphs"})]
    assert counted_once(several) == several
    assert counted_once([*several, bild(1.9, rollback=5.0)])[3:] == [bild(1.9, rollback=5.0)]


def test_the_share_replaced_is_the_least_with_which_quality_reaches_the_targets() -> None:
    def point(rollbacks: int, loss: float, baseline: float | None = 41.0, **setting: str) -> Result:
        result = with_quality(bild(1.0, loss, setting=setting), baseline=baseline)
        return replace(result, tokens=200, counts=replace(result.counts, rollbacks=rollbacks))

    several = [point(10, 0.5), point(30, 0.12), point(50, 0.1), point(80, 0.0)]
    share = MeasuredNumber(DATA, "small model", "share replaced at the target's quality", 0.15)
    assert replaced_share(several) == [share, VANILLA]
    alone = point(1, 0.0, baseline=None, dataset="toy")
    assert replaced_share([alone, several[0]]) == [VANILLA]
    assert replaced_share([alone, *several]) == [share, VANILLA]


def test_a_quality_is_compared_with_the_papers_only_by_the_papers_metric() -> None:
    def verdict(metric: str) -> tuple[str, ...]:
        point = bild(1.7, setting={"dataset": "cnn_dailymail"})
        found = FIGURES["bild_fig4"].numbers(
            [known("t5", with_quality(point, metric=metric, value=41.5, baseline=41.5))]
        )
        lines = compare(found, load_published("bild_fig4"), "paper").lines
        return tuple(
            line.verdict
            for line in lines
            if line.cell.quantity in ("quality", "quality at minimal loss")
        )

    assert verdict("ROUGE-Lsum") == ("agrees", "agrees")
    assert verdict("ROUGE-L") == verdict("ROUGE-1") == ("–", "–")


def test_the_released_loop_is_a_curve_of_its_own_beside_the_same_printed_numbers() -> None:
    released = replace(bild(1.5, setting={"dataset": "iwslt2017"}), policy="bild_released")
    found = FIGURES["bild_fig4"].numbers([known("t5", released)])
    assert {cell.row for cell in found} == {"unaligned, released loop", "vanilla"}
    lines = compare(found, load_published("bild_fig4"), "paper").lines
    assert {line.cell.quantity: line.reference for line in lines}["speedup at minimal loss"] == 1.43


def speculative(value: float, loss: float = 0.0) -> Result:
    return known("toy", other("speculative", value, loss, lenience=1.0))


def test_the_fastest_speculative_point_is_the_rival_and_bild_is_as_good_or_as_fast() -> None:
    bilds = [
        known("toy", bild(value, loss))
        for value, loss in ((1.3, 0.0), (1.5, 0.1), (1.6, 0.2), (1.9, 1.0))
    ]
    unmeasured = with_speedup(known("toy", bild(1.0)), value=None)
    untimed = with_speedup(speculative(1.2), value=None)
    several = [untimed, speculative(1.2), speculative(1.4, 0.05), unmeasured, *bilds]
    told = {(cell.row, cell.quantity): cell.value for cell in ahead(several)}
    assert told == {
        ("speculative, greedy", "speedup"): 1.4,
        ("speculative, greedy", "quality"): 40.95,
        ("bild", "speedup ahead of speculative, greedy"): pytest.approx(0.1),
        ("bild", "quality ahead of speculative, greedy"): pytest.approx(-0.05),
    }
    assert len(ahead([speculative(1.4)])) == 2 and ahead(bilds) == []
    other_data = known("toy", bild(1.9, setting={"dataset": "wmt"}))
    assert len(ahead([speculative(1.4), other_data])) == 2
    equally_fast = ahead([speculative(1.4), known("toy", bild(1.4, 1.0))])
    assert [cell.value for cell in equally_fast][2:] == [pytest.approx(-1.0)]
    for bild_at, what in ((bilds[0], "speedup"), (bilds[3], "quality")):
        found = ahead([speculative(1.4), bild_at])
        assert [cell.quantity for cell in found][2:] == [f"{what} ahead of speculative, greedy"]


def test_greedy_and_sampled_speculative_points_are_rivals_of_their_own_and_print_compares_with_the_sampled() -> (
    None
):
    warm = speculative(1.3, 0.6)
    warm = replace(warm, setting=Setting({**warm.setting, "decoding": {"temperature": 1.0}}))
    cells = ahead([speculative(1.4), warm, known("toy", bild(1.5)), known("toy", bild(1.35))])
    told = {(cell.row, cell.quantity): cell.value for cell in cells}
    assert (
        told["speculative, greedy", "speedup"] == 1.4
        and told["speculative, sampled", "speedup"] == 1.3
    )
    assert told["bild", "speedup ahead of speculative, greedy"] == pytest.approx(0.1)
    assert told["bild", "speedup ahead of speculative, sampled"] == pytest.approx(0.2)
    assert told["bild", "quality ahead of speculative, sampled"] == pytest.approx(0.6)
    lines = compare(
        [replace(one, data="iwslt2017") for one in cells],
        load_published("bild_speculative"),
        "paper",
    ).lines
    assert {
        "sampled" in line.cell.row + line.cell.quantity
        for line in lines
        if line.reference is not None
    } == {True}
    assert sum(line.reference is not None for line in lines) == 4


def test_tokens_per_call_are_those_of_synthetic_drafters_with_a_rate() -> None:
    synthetic = other("synthetic", acceptance_rate=0.7)
    uncounted = replace(synthetic, counts=replace(synthetic.counts, acceptance_rate=None))
    (one,) = tokens_per_call([bild(1.5), uncounted, synthetic])
    calls = 1650 / int(1650 / (1 + 3.2 * 0.7))
    expected = pytest.approx((1 - 0.7**6) / (1 - 0.7))
    named = ("window 5", "drafted right with 0.7", "tokens per target call", calls, expected)
    assert (one.panel, *one.key[1:], one.value, one.formula) == named


def test_rows_keep_their_best_point_and_leave_out_the_baseline_and_what_has_no_row() -> None:
    quantity = {"greedy speedup": lambda point: point.tokens_per_s_ratio}
    cells = table(rows.policy, quantity, lambda point: point.knobs.get("panel", "one"))
    several = [
        bita(1.2),
        bita(1.9),
        bita(1.4),
        bita(1.1, panel="two"),
        bita(9.0, panel=None),
        sample_baseline(),
    ]
    assert cells(several) == [ratio("bita", 1.9, "one"), ratio("bita", 1.1, "two")]
    unknown = [bita(9.0, "medusa"), replace(bita(), tokens_per_s_ratio=None)]
    assert table(rows.prompt_design, quantity)(unknown) == []
    by_category = FIGURES["bita_tab7"].numbers
    plain, baseline = (
        replace(bita(9.0), categories=None),
        replace(sample_baseline(), categories=bita().categories),
    )
    assert by_category([plain, baseline]) == []
    best = [plain, known("user", bita(3.0)), known("user", bita(2.0)), baseline]
    assert by_category(best) == [ratio("user", 2.5, "coding"), ratio("user", 3.0, "overall")]
    first = speedup("bita", "speedup", 1.9)
    assert greatest([speedup("bita", "speedup", 1.2), first, replace(first, low=1.0)]) == [first]


def test_match_rates_are_of_the_whole_text_or_also_by_position() -> None:
    rates = [
        ("squad", Rate(20, 3, "shared", "1-2", 3, 10, 0.3)),
        ("squad", Rate(20, 3, "my/heads", "all", 7, 10, 0.7)),
    ]
    whole = MeasuredNumber("squad", "layer 20, trained, k = 3", "match rate", 0.7)
    assert match_rates(rates, positions=False) == [whole]
    part = MeasuredNumber("squad", "layer 20, shared, k = 3", "match rate", 0.3, part="tokens 1-2")
    assert match_rates(rates, positions=True) == [part, whole]
    assert (part.panel, whole.panel) == ("squad, tokens 1-2", "squad")


def test_rows_are_named_after_facts_and_what_was_varied_not_after_folders() -> None:
    mine = replace(bild(1.5), facts={"pair": "mine", "aligned": True})
    renamed = replace(mine, facts={"pair": "mine_aligned", "aligned": False})
    assert (rows.alignment(mine), rows.alignment(renamed)) == ("aligned", "unaligned")
    assert rows.prompt_design(bita(adapter="outputs/bita_none/adapter")) == "deep prompt"
    assert rows.mask_tokens(bita(adapter="outputs/bita_m5/adapter")) == "3 mask tokens"
    fewer = bita(mask_tokens=1, prompt_tokens=8)  # than the 3 and 16 that were trained
    assert (rows.mask_tokens(fewer), rows.prompt_tokens(fewer)) == (
        "1 mask tokens",
        "8 prompt tokens",
    )


def test_a_row_is_named_after_what_its_figure_varies() -> None:
    unaligned = known("toy", other("bild_no_rollback"))
    assert rows.ablation(unaligned) is None and rows.ablation(aligned(unaligned)) is not None
    assert rows.rollback_threshold(known("toy", bild(1.5))) is None
    narrowing = rows.tree(bita(tree="narrowing_tree"))
    assert narrowing == rows.tree(bita()) == "efficient_tree, k = 5"
    early = replace(ppd(), knobs={**ppd().knobs, "exit_layer": 2})
    early = replace(early, pipeline=replace(early.pipeline, exit_layer=2))
    assert rows.pipeline(early) == "shared head, k = 3, layer 2"
    assert rows.pipeline(ppd()) == "shared head, k = 3"  # 3 of 6 layers


def test_a_speedup_without_a_prediction_is_beside_no_theorem() -> None:
    predicted = known("toy", other("speculative", lenience=1.0))
    assert len(theorem_table([predicted])) == 1
    assert theorem_table([replace(predicted, prediction=None)]) == []


def test_a_claim_is_judged_within_one_regime(caplog: pytest.LogCaptureFixture) -> None:
    """Medusa with CUDA graphs beside BiTA without: their baselines differ, so the claim stays
    open.
    """

    def under(regime: str, point: Result) -> Result:
        return replace(point, setting=Setting({**point.setting, "compile": regime}))

    published, figure = load_published("bita_fig7"), FIGURES["bita_fig7"]

    def verdicts(*several: Result) -> set[str]:
        measured = figure.numbers(in_one_regime([known("vicuna_7b", one) for one in several]))
        claims = compare(measured, published, "paper").claims
        return {line.verdict for line in claims if line.order.claim == "BiTA beats Medusa"}

    assert verdicts(under("false", bita(2.0)), under("false", bita(1.5, "medusa"))) == {"holds"}
    assert not caplog.records
    assert verdicts(under("false", bita(2.0)), under("graphs", bita(1.5, "medusa"))) == {
        "not measured"
    }
    assert "1 points with another runtime.compile" in caplog.text


def test_at_equal_numbers_of_policies_the_points_without_graphs_count() -> None:
    graphs, plain = (
        replace(bita(1.5, policy), setting=Setting({**bita().setting, "compile": regime}))
        for policy, regime in (("medusa", "graphs"), ("bita", "false"))
    )
    assert in_one_regime([graphs, plain]) == in_one_regime([plain, graphs]) == [plain]
    # of many points with graphs there is one policy; others are told without
    more = [replace(graphs, point=name, knobs={**graphs.knobs, "top_k": 1}) for name in "abc"]
    both = [plain, replace(plain, policy="medusa")]
    assert in_one_regime([*more, *both]) == both


def test_medusas_released_heads_and_those_trained_here_are_two_rows() -> None:
    """Ours have a configuration in their folder; the authors' layout has none of these."""
    ours = replace(bita(1.6, "medusa"), facts={"pair": "user", "trained": {"heads": {"heads": 3}}})
    rows_of = [rows.released_or_trained(one) for one in (bita(), bita(1.7, "medusa"), ours)]
    assert rows_of == ["bita", "medusa", "medusa, trained here"]
