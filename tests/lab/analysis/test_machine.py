"""Seconds on declared machines, by hand, and from what a sweep stores."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig

from bild_lab.engine.trace import Forward, Round, Trace
from bild_lab.errors import UserError
from bild_lab.lab.analysis.cost import Machine, kinds_of, read_machine, total
from bild_lab.lab.analysis.prediction import PROFILE
from bild_lab.lab.decoding.decoder import Timed
from bild_lab.lab.measure.summary import work_of
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.schema.numbers import Work
from bild_lab.lab.schema.result import Result
from scripts import sweeps as script
from tests.report.sample import sample_baseline, sample_prediction, sample_result

LARGE = LlamaConfig(  # Llama 2 7B
    hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000
)
SMALL = LlamaConfig(
    hidden_size=768, intermediate_size=3072, num_hidden_layers=2, num_attention_heads=12, vocab_size=32000
)


def forward(rows: int, config: LlamaConfig = LARGE) -> Forward:
    return Forward(config, rows, cached=100, scored=rows)


def seconds(machine: Machine, *forwards: Forward, rounds: int = 0) -> float:
    return machine.seconds(kinds_of(forwards, 2), rounds, "bfloat16")


def test_a_forward_takes_as_long_as_its_traffic_or_its_operations() -> None:
    spent = total([forward(3)], 2)
    slow_memory = Machine("a", 1e9, {"bfloat16": 1e18})
    slow_cores = Machine("b", 1e18, {"bfloat16": 1e9})
    assert seconds(slow_memory, forward(3)) == spent.bytes_moved / 1e9
    assert seconds(slow_cores, forward(3)) == spent.flops / 1e9


def test_forwards_and_rounds_take_what_is_declared_besides() -> None:
    fixed = Machine("c", 1e18, {"bfloat16": 1e21}, forward_s=0.5, round_s=2.0)
    assert seconds(fixed, forward(1), forward(1), forward(4, SMALL), rounds=3) == pytest.approx(1.5 + 6.0)


@pytest.mark.parametrize(("name", "free"), [("h100_sxm", 295), ("a100_sxm", 153)])
def test_rows_are_nearly_free_up_to_operations_per_byte(name: str, free: int) -> None:
    """The ratio of the declared peaks, for two bytes a weight and two operations a row. Llama 2 7B by hand."""
    machine = read_machine(name)
    assert machine.flops_per_s["bfloat16"] / machine.bytes_per_s == pytest.approx(free, abs=1)
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    ends = 32 * (4 * 4096 + 2 * 4096 + (4096 + 2 * 11008) + (11008 + 4096))  # inputs and outputs of a layer's products
    # a row adds also the head's ends, queries and outputs of attention, its own keys and values, and its embedding
    row = ends + (4096 + 32000) + 32 * (2 + 2) * 4096 + 4096
    one = 2 * (weights + 32 * 100 * 2 * 4096 + row) / machine.bytes_per_s
    assert seconds(machine, forward(1)) == pytest.approx(one, rel=1e-12)
    for rows in (64, free // 2):
        more = 2 * (rows - 1) * row / machine.bytes_per_s
        assert seconds(machine, forward(rows)) == pytest.approx(one + more, rel=1e-12)
        assert more < 0.06 * one
    many = 3 * free
    flops = 2 * many * weights + 32 * 4 * many * (100 + many) * 4096
    assert seconds(machine, forward(many)) == pytest.approx(flops / machine.flops_per_s["bfloat16"], rel=1e-12)
    assert seconds(machine, forward(many)) > 2.5 * one


def timed(rounds: int, *forwards: Forward) -> list[Timed]:
    return [Timed([1, 2], [1.0], Trace(rounds=[Round()] * rounds, forwards=list(forwards)))]


def test_a_speedup_is_the_baselines_seconds_over_the_methods() -> None:
    work = work_of({"method": timed(1, forward(1, SMALL), forward(6)), "baseline": timed(5, *[forward(1)] * 5)}, 2)
    machine = read_machine("a100_sxm")
    expected = 5 * seconds(machine, forward(1)) / seconds(machine, forward(1, SMALL), forward(6))
    assert machine.speedup(work, "bfloat16") == pytest.approx(expected)
    assert expected > 4
    assert machine.speedup(Work(work.method, [], 1, 0), "bfloat16") is None
    assert work_of({"method": timed(1)}, 2) is None
    with pytest.raises(UserError, match="A100 SXM declares the operations of bfloat16, float16, float32, got float64"):
        machine.speedup(work, "float64")


def test_a_file_of_your_own_declares_a_machine(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nbytes_per_s: 2e11\nflops_per_s: {float32: 1e12}\nforward_s: 1e-5\n")
    assert read_machine(str(file)) == Machine("mine", 2e11, {"float32": 1e12}, 1e-5)
    file.write_text("name: mine\nbytes: 2e11\n")
    with pytest.raises(UserError, match="machine has no key 'bytes'"):
        read_machine(str(file))
    with pytest.raises(UserError, match="machine must be one of a100_sxm, h100_sxm, or a YAML file .*, got 'h200'"):
        read_machine("h200")


def stored(folder: Path, result: Result, number: int) -> None:
    place = folder / "points" / f"{number}"
    place.mkdir(parents=True)
    (place / "result.json").write_text(json.dumps(result.to_json()))


def test_a_finished_sweep_is_priced_without_running_anything(command: Callable[..., tuple[int, str]]) -> None:
    work = work_of({"method": timed(1, forward(1, SMALL), forward(6)), "baseline": timed(5, *[forward(1)] * 5)}, 2)
    bfloat16 = {"dtype": "bfloat16"}
    prediction = sample_prediction("bild", {"window": 5}, 1.4)
    drafted = replace(sample_result("bild", {"window": 5}, 1.4, setting=bfloat16, prediction=prediction), work=work)
    folder = Path("outputs/field")
    results = [drafted, sample_result("hf_assisted", {}, 1.1, setting=bfloat16), sample_baseline()]
    for number, one in enumerate(results):
        stored(folder, one, number)
    profile = {"measured": True, "accept_length_model": "chain_analytic", "marginal_accept_rates": [0.6, 0.1]}
    (folder / "points/0" / PROFILE).write_text(json.dumps(profile))
    assert len(Sweep(folder).results()) == 3
    code, out = command(script, *script.as_overrides(["predict", str(folder)]), config="sweeps")
    assert code == 0, out
    with (folder / "predicted.csv").open() as stream:
        rows = {row["policy"]: row for row in csv.DictReader(stream)}
    assert set(rows) == {"bild", "hf_assisted"}
    for name in ("h100_sxm", "a100_sxm"):
        machine = read_machine(name)
        found = float(rows["bild"][f"predicted_speedup {machine.name}"])
        assert found == pytest.approx(machine.speedup(work, "bfloat16"))
        assert rows["hf_assisted"][f"predicted_speedup {machine.name}"] == ""
    assert (rows["bild"]["best_window"], rows["hf_assisted"]["best_window"]) == ("1", "")  # of its profile
    assert "1 points recorded no forwards" in out and "predicted from declared figures, not measured" in out
    for words in ([], [str(folder), "machines=[none]"], ["outputs/nothing"]):
        assert command(script, *script.as_overrides(["predict", *words]), config="sweeps")[0] == 2
