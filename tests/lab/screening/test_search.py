"""Lists as those of a sweep, and points that are searched: made-up ones, and the command on tiny checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from omegaconf import OmegaConf

from bild_lab.errors import UserError
from bild_lab.lab.decoding.decoder import METHOD
from bild_lab.lab.measure.cost_model import CostModel
from bild_lab.lab.screening.candidates import Candidate, Grid, Space, read_lists
from bild_lab.lab.screening.found import objectives, search
from bild_lab.lab.screening.replay import Screened
from bild_lab.lab.screening.rows import Row
from bild_lab.lab.screening.screen import ScreenSpec
from tests.engine.models.test_views import ZEROED
from tests.lab.screening.test_screen import SPEC, Command, row
from tests.tiny import TINY, tiny_tokenizer


def test_lists_are_those_of_a_sweep_in_the_order_of_their_numbers() -> None:
    lists = read_lists(["policy.rollback=10,2,1", "policy.window=range(3,6)", "policy.rule=opt,chow", "policy=bild"])
    assert lists == {
        "policy.rollback": ("policy.rollback=1", "policy.rollback=2", "policy.rollback=10"),
        "policy.window": ("policy.window=3", "policy.window=4", "policy.window=5"),
        "policy.rule": ("policy.rule=opt", "policy.rule=chow"),
        "policy": ("policy=bild",),
    }
    assert read_lists(["policy.window=3,5", "policy.window=7"]) == {"policy.window": ("policy.window=7",)}
    (steps,) = read_lists(["policy.fallback=range(0.05,0.25,0.05)"]).values()
    assert [step.partition("=")[2] for step in steps] == ["0.05", "0.1", "0.15", "0.2"]  # not 0.15000000000000002


@pytest.mark.parametrize("word", ["policy.window=interval(1,5)", "policy=glob(*)"])
def test_what_is_no_list_of_values_is_refused(word: str) -> None:
    with pytest.raises(UserError, match=r"interval|glob"):
        read_lists([word])


class Bench:
    """A screening of made-up points: x saves time, y costs quality. broken: these x cannot be built."""

    def __init__(self, counts: tuple[int, int], broken: Sequence[int] = ()) -> None:
        lists = {
            f"policy.{key}": tuple(f"policy.{key}={number}" for number in range(count))
            for key, count in zip("xy", counts, strict=True)
        }
        self.grid = Grid((), (Space((), OmegaConf.create({"name": "made-up", "x": 0, "y": 0}), lists),))
        target = SimpleNamespace(depth=4)
        self.point = SimpleNamespace(seed=0, decoders={METHOD: SimpleNamespace(target=target)})
        self.asked: list[tuple[int, int]] = []
        self._broken = broken

    def decode(self, candidates: Sequence[Candidate], alone: bool = True) -> list[Screened]:
        for one in candidates:
            self.asked.append((one.knobs["x"], one.knobs["y"]))
            if one.knobs["x"] in self._broken:
                raise UserError("x cannot be that")
        return [*([Screened(None)] if alone else []), *map(Screened, candidates)]

    def rows(self, screened: Sequence[Screened], model: CostModel) -> list[Row]:
        return [self.row(one.candidate.knobs["x"], one.candidate.knobs["y"]) for one in screened[1:]]

    def row(self, x: int, y: int) -> Row:
        return row(1 + x / 4 - (y - 1) ** 2 / 20, 40 - x / 4 - y / 10, x=x, y=y)


def searched(bench: Bench, trials: int, max_loss: float | None = None) -> list[Row]:
    spec = ScreenSpec(**{**SPEC, "trials": trials, "max_loss": max_loss})
    screened, _ = search(bench, spec, lambda screened: CostModel({}))  # type: ignore[arg-type]
    return bench.rows(screened, CostModel({}))


@pytest.mark.parametrize("max_loss", [None, 1.0])
def test_a_search_ends_after_its_trials_and_decodes_no_point_twice(max_loss: float | None) -> None:
    bench = Bench((9, 9))
    assert len(searched(bench, 12, max_loss)) == 12
    assert len(set(bench.asked)) == len(bench.asked) == 12


def test_points_that_cannot_be_built_are_left_out_and_named(capsys: pytest.CaptureFixture) -> None:
    found = searched(Bench((3, 3), broken=[2]), 9)
    assert found and all(one.knobs["x"] < 2 for one in found)
    assert "left out: policy.x=2 policy.y=" in capsys.readouterr().err
    with pytest.raises(UserError, match="no point of the search"):
        searched(Bench((3, 3), broken=range(3)), 9)


def test_a_few_trials_find_nearly_the_best_within_a_loss() -> None:
    bench = Bench((8, 6))
    best = max(bench.row(x, y).predicted_speedup for x in range(8) for y in range(6) if x / 4 + y / 10 <= 1)
    within = [one.predicted_speedup for one in searched(bench, 24, 1.0) if one.quality_difference >= -1]
    assert max(within) >= 0.8 * best


def test_a_loss_is_worse_than_any_speedup_beyond_what_may_be_lost() -> None:
    found = [objectives(replace(row(speedup, 40 - lost)), 1.0) for speedup, lost in ((2, 1), (2, 1.5), (0.5, 1.5))]
    assert found == [[0.5], [1.5], [2.5]]
    assert objectives(row(2, 39), None) == [39, 0.5]


@pytest.mark.slow
def test_what_is_searched_on_one_split_is_measured_on_another(screen: Command) -> None:
    lists = ["policy=bild", "policy.fallback=0.2,0.6", "policy.rollback=0.69,5,50"]
    code, printed = screen(*lists, "screen.trials=4", "screen.max_loss=0", "screen.confirmations=1")
    assert code == 0, printed
    assert len(pd.read_csv("outputs/grid/screen.csv")) == 4
    (one,) = json.loads(Path("outputs/grid/screen.json").read_text())["confirmed"]
    assert one["selected_difference"] >= 0
    assert list(pd.read_csv("outputs/grid/sweep.csv").split) == ["test"]


@pytest.mark.slow
def test_blocks_are_searched_and_silent_ones_cost_no_acceptance(screen: Command, tmp_path: Path) -> None:
    module = TINY["llama"](3, layers=4)
    for kind, layers in (("attention", (1, 2)), ("feed_forward", (2,))):
        for name, weight in module.named_parameters():
            if name.startswith(tuple(f"model.layers.{at}." for at in layers)):
                weight.data *= not name.endswith(ZEROED[kind])
    module.save_pretrained(tmp_path / "silent")
    tiny_tokenizer(False).save_pretrained(tmp_path / "silent")
    blocks = [
        "policy=layer_skip",
        "policy.skipped_layers=[]",
        "policy.skipped_attention=[1]",
        "screen.subsets=[skipped_attention,skipped_feed_forward]",
    ]
    pair = [f"pair.target={tmp_path / 'silent'}", "pair.draft=null"]
    code, printed = screen(*pair, *blocks, "screen.trials=40", "screen.max_loss=0", "screen.confirmations=0")
    assert code == 0, printed
    frame = pd.read_csv("outputs/grid/screen.csv")
    columns = frame.skipped_attention, frame.skipped_feed_forward
    sets = [tuple(set(json.loads(cell)) for cell in cells) for cells in zip(*columns, strict=True)]
    assert ({1, 3}, {1, 3}) in sets and len(set(map(str, sets))) == len(sets) > 30
    assert set(frame.quality_difference) == {0.0}  # lossless, whatever is skipped
    silent = [attention <= {1, 2} and forward <= {2} for attention, forward in sets]
    assert all(rate == 1 for rate, one in zip(frame.acceptance_rate, silent, strict=False) if one)
    assert frame.acceptance_rate.min() < 1
