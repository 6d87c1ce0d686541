"""Views of a target: they draft over its cache what their layers alone would, and leave the target as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import bild_lab
from bild_lab.errors import UserError
from bild_lab.models.native.attention import place_rows
from bild_lab.models.native.cache import KeyValueCache
from bild_lab.models.native.views import EarlyExit, LayerSkip, View
from bild_lab.request import Request
from bild_lab.trace import Trace

PROMPT = "ein Hund läuft im Wasser"


def target_of(checkpoints: Path, family: str) -> tuple[bild_lab.Decoder, Request]:
    decoder = bild_lab.load(str(checkpoints / family), policy="vanilla", dtype="float64", engine="native")
    return decoder, decoder.request(PROMPT, 20)


def alone(decoder, request: Request, tokens: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """Logits of the last token by these layers, nothing cached."""
    whole = [*request.source.prompt, *tokens]
    shape = decoder.cache_shape
    cache = KeyValueCache((shape[0], shape[1], len(whole), shape[2]), torch.float64, torch.device("cpu"))
    memory = () if request.source.encoder_ids is None else (decoder.encode(request.source.encoder_ids[0]),)
    rows = place_rows(0, len(whole), torch.device("cpu"))
    return decoder.logits(decoder.run(decoder.embed(torch.tensor(whole)), rows, cache, *memory, layers=layers)[-1:])


@pytest.mark.parametrize("family", ["t5", "llama"])
@torch.inference_mode()
def test_an_early_exit_scores_as_its_layers_alone(checkpoints: Path, family: str) -> None:
    loaded, request = target_of(checkpoints, family)
    session = loaded.target.start(request.source, 20)
    view = EarlyExit(loaded.target, 1).start(request.source, 20)
    first = view.extend([request.source.prompt[-1]]).logits
    torch.testing.assert_close(first, alone(session.decoder, request, [], (0,)))
    torch.testing.assert_close(view.extend([9]).logits, alone(session.decoder, request, [9], (0,)))
    session.extend([request.source.prompt[-1], 9, 10, 11])
    session.keep([0, 1, 2])
    view.rollback(session.length)
    torch.testing.assert_close(view.extend([12]).logits, alone(session.decoder, request, [9, 10, 12], (0,)))


@pytest.mark.parametrize("family", ["t5", "llama"])
@torch.inference_mode()
def test_a_layer_skip_reads_the_whole_targets_cache(checkpoints: Path, family: str) -> None:
    loaded, request = target_of(checkpoints, family)
    session = loaded.target.start(request.source, 20)
    session.prefill()
    scratch = session.cache.grown(session.cache.capacity)
    view = LayerSkip(loaded.target, [0]).start(request.source, 20)
    last = request.source.prompt[-1]
    rows = place_rows(scratch.length, 1, torch.device("cpu"))
    decoder = session.decoder
    x = decoder.run(decoder.embed(torch.tensor([last])), rows, scratch, *session.memory, layers=view._layers)
    torch.testing.assert_close(view.extend([last]).logits, decoder.logits(x))
    assert view._layers == tuple(range(1, len(decoder.layers)))


@pytest.mark.parametrize("family", ["t5", "llama"])
@pytest.mark.parametrize("policy", ["early_exit_speculative", "layer_skip"])
def test_what_a_view_drafts_leaves_the_targets_text_as_it_was(checkpoints: Path, family: str, policy: str) -> None:
    plain = bild_lab.load(str(checkpoints / family), policy="vanilla", dtype="float64")
    drafted = bild_lab.load(str(checkpoints / family), policy=policy, dtype="float64")
    made = drafted.generate(PROMPT, 40)
    assert made.token_ids == plain.generate(PROMPT, 40).token_ids
    assert made.trace.drafted > 0


def test_the_last_exit_is_the_target_and_every_draft_of_it_stands(checkpoints: Path) -> None:
    last = {"policy": "early_exit_speculative", "exit_layer": 2}
    drafted = bild_lab.load(str(checkpoints / "llama"), dtype="float64", **last)
    trace = drafted.generate(PROMPT, 40).trace
    assert trace.accepted == trace.drafted > 0


def test_a_view_computes_no_token_twice(checkpoints: Path) -> None:
    drafted = bild_lab.load(str(checkpoints / "llama"), policy="early_exit_speculative", dtype="float64")
    request = drafted.request(PROMPT, 30)
    trace = Trace()
    drafted.method.decode(request, trace)
    views = [each for each in trace.forwards if each.layers is not None]
    whole = [each for each in trace.forwards if each.layers is None]
    assert len(views) == trace.draft_calls
    assert {each.rows for each in views} == {1}
    prompt = whole[0]
    assert (prompt.rows, prompt.cached) == (len(request.source.prompt) - 1, 0)


@pytest.mark.parametrize("wrong", [0, 99, True, 1.5])
def test_an_exit_must_be_one_of_the_layers(checkpoints: Path, wrong: object) -> None:
    with pytest.raises(UserError, match="exit_layer must be a whole number from 1 to"):
        bild_lab.load(str(checkpoints / "t5"), policy="early_exit_speculative", exit_layer=wrong)


@pytest.mark.parametrize("wrong", [[], [99], [-1], 3, "all", [0, 1, 2, 3, 4, 5, 6, 7]])
def test_skipped_layers_must_be_some_of_the_layers(checkpoints: Path, wrong: object) -> None:
    with pytest.raises(UserError, match="skipped_layers must name some, not all"):
        bild_lab.load(str(checkpoints / "t5"), policy="layer_skip", skipped_layers=wrong)


def test_a_view_needs_the_native_engine(checkpoints: Path) -> None:
    with pytest.raises(UserError, match="needs the native engine"):
        bild_lab.load(str(checkpoints / "t5"), policy="early_exit_speculative", engine="hf")


def test_a_view_of_another_text_is_refused(checkpoints: Path) -> None:
    loaded, request = target_of(checkpoints, "llama")
    session = loaded.target.start(request.source, 20)
    other = loaded.request(PROMPT, 20)
    with pytest.raises(RuntimeError, match="on the same source"):
        EarlyExit(loaded.target, 1).start(other.source, 20)
    assert isinstance(EarlyExit(loaded.target, 1).start(request.source, 20), View)
    del session
