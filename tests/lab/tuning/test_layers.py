"""The search of blocks to skip: sets and parameters, and the script as a whole on a target with silent blocks."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from bild_lab.errors import UserError
from bild_lab.lab.tuning.layers import SearchSpec, Skips, even_skips, names, params_of, random_skips, skips_of
from scripts import search_layers as script
from tests.engine.models.test_views import ZEROED
from tests.lab.tuning.test_search import Command, base  # noqa: F401 (a fixture)
from tests.tiny import TINY, tiny_tokenizer

SILENT = Skips((1, 2), (2,))


def test_a_set_is_told_as_whole_layers_where_both_blocks_are_skipped() -> None:
    assert SILENT.knobs() == {"skipped_layers": [2], "skipped_attention": [1], "skipped_feed_forward": []}
    assert Skips((), (3,)).knobs() == {"skipped_layers": [], "skipped_attention": [], "skipped_feed_forward": [3]}


def test_parameters_are_sets_and_back() -> None:
    for skips in (SILENT, *even_skips(4), *random_skips(4, 5, 0)):
        params = params_of(skips, 4)
        assert list(params) == names(4)
        assert skips_of(params, 4) == skips


@pytest.mark.parametrize("depth", [1, 2, 3, 10])
def test_sets_to_begin_with_are_neither_nothing_nor_everything(depth: int) -> None:
    for skips in (*even_skips(depth), *random_skips(depth, 8, 1)):
        assert set(skips.attention) | set(skips.feed_forward) <= set(range(depth))
        assert 0 < len(skips.attention) + len(skips.feed_forward) < 2 * depth


def test_values_that_cannot_be_are_refused() -> None:
    with pytest.raises(UserError, match="search.trials must be a whole number >= 1, got 0"):
        SearchSpec(0, False)
    with pytest.raises(UserError, match="search.live must be true or false, got 1"):
        SearchSpec(1, 1)


@pytest.fixture
def silent(tmp_path: Path) -> Path:
    """A checkpoint of a target in which the blocks of SILENT add nothing."""
    module = TINY["llama"](3, layers=4)
    for kind in ("attention", "feed_forward"):
        for name, weight in module.named_parameters():
            if name.startswith(tuple(f"model.layers.{at}." for at in getattr(SILENT, kind))):
                weight.data *= not name.endswith(ZEROED[kind])
    module.save_pretrained(tmp_path / "silent")
    tiny_tokenizer(False).save_pretrained(tmp_path / "silent")
    return tmp_path / "silent"


@pytest.mark.slow
def test_the_search_finds_blocks_that_add_nothing_and_goes_on_where_it_was(
    command_of: Command,
    silent: Path,
    base: list[str],  # noqa: F811
) -> None:
    words = [word for word in base if not word.startswith(("pair.", "name="))]
    words += [f"pair.target={silent}", "name=layers", "decoding.max_new_tokens=24", "dataset.limit=2"]
    code, printed = command_of(*words, "search.trials=30")
    assert code == 0, printed
    found = json.loads(Path("outputs/layers/layers.json").read_text())
    assert found["trials"] == 30
    skips = Skips(*(tuple(found["skips"][kind]) for kind in ("attention", "feed_forward")))
    assert skips.knobs() == found["knobs"]
    assert 0 < found["acceptance_rate"] <= 1
    told = shlex.split(re.search(r"measure it: python run.py (.*)", " ".join(printed.split())).group(1))
    assert f"policy.skipped_attention={json.dumps(found['knobs']['skipped_attention'])}".replace(" ", "") in told
    code, printed = command_of(*words, "search.trials=31")
    assert code == 0 and json.loads(Path("outputs/layers/layers.json").read_text())["trials"] == 31, printed


@pytest.mark.slow
def test_another_policy_and_sampled_texts_are_refused(command_of: Command, base: list[str]) -> None:  # noqa: F811
    for word, message in (("policy=vanilla", "got policy=vanilla"), ("decoding=sample", "replays greedy decoding")):
        code, printed = command_of(*base, word, "search.trials=2")
        assert code == 2 and message in " ".join(printed.split()), printed


@pytest.fixture
def command_of(command: Command) -> Command:
    """Runs scripts/search_layers.py in an empty folder; returns its exit code and everything it printed."""
    return lambda *words: command(script, *words, config="search_layers")
