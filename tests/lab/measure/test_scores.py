"""The scores of finished texts: those they were decoded with, without NaN, and their
log-probability.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.trace import StageTrace, Trace
from bild_lab.errors import UserError
from bild_lab.lab.measure import likelihood
from bild_lab.lab.measure.likelihood import (
    log_probabilities,
    log_probability,
    require_no_nan,
    text_logits,
)
from bild_lab.lab.measure.timing import Timed
from bild_lab.lab.point.decoder import BASELINE, METHOD
from bild_lab.lab.point.load import load
from tests.tiny import END


def broken(checkpoint: Path, copy: Path, row: int) -> Path:
    """The checkpoint with NaN for one token's embedding."""
    shutil.copytree(checkpoint, copy)
    tensors = load_file(copy / "model.safetensors")
    name = next(name for name in ("model.embed_tokens.weight", "shared.weight") if name in tensors)
    tensors[name][row] = torch.nan
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize("engine", ["native", "hf"])
@pytest.mark.parametrize("family", ["t5", "llama"])
def test_the_scores_of_a_text_are_those_it_was_decoded_with(
    family: str, engine: str, checkpoints: Path
) -> None:
    decoder = load(str(checkpoints / family), policy="vanilla", engine=engine)
    generated = decoder.generate("w5 w9 w12", max_new_tokens=10)
    request = decoder.request("w5 w9 w12", 10)
    logits = text_logits(decoder.target, request, generated.token_ids)
    assert logits.argmax(1).tolist() == generated.token_ids


@pytest.mark.parametrize("engine", ["kernels", "native", "hf"])
def test_a_long_prompt_is_not_scored_with_the_text(engine: str, checkpoints: Path) -> None:
    target = load(str(checkpoints / "llama"), policy="vanilla", engine=engine).target
    prompt, emitted = (5, 9, 12) * 100, [7, 11, 8]
    request = Request(Source(prompt), Limits(len(prompt), 10))
    logits = text_logits(target, request, emitted)
    with torch.inference_mode():
        every_row = target.text_logits(Source((*prompt, *emitted[:-1])))
    assert torch.allclose(logits, every_row[-len(emitted) :], atol=1e-4)
    assert logits.untyped_storage().nbytes() == logits.nbytes  # no part of a larger tensor
    assert text_logits(target, request, []).shape == logits[:1].shape


@pytest.mark.parametrize("engine", ["kernels", "native", "hf"])
def test_a_text_has_no_more_scores_than_tokens(engine: str, checkpoints: Path) -> None:
    target = load(str(checkpoints / "llama"), policy="vanilla", engine=engine).target
    with torch.inference_mode():
        every_row, more = (target.text_logits(Source((5, 9, 12)), count) for count in (None, 7))
    assert more.shape == every_row.shape and torch.equal(more, every_row)


@pytest.mark.parametrize("policy", ["vanilla", "hf_generate"])
def test_a_token_that_breaks_a_model_is_found_in_the_text_that_has_it(
    policy: str, checkpoints: Path, tmp_path: Path
) -> None:
    path = broken(checkpoints / "llama", tmp_path / "llama", row=7)
    decoder = load(str(path), policy=policy)
    request, trace = (
        decoder.request("w5 w9", 10),
        StageTrace(log_probability=float("nan"), scored=3),
    )
    log_probabilities(decoder.running[0], [request], {METHOD: [Timed([5, 6, END], [0.1], Trace())]})
    # scored by a forward, and by the timed rounds
    for text, how in (([5, 7, END], Trace()), ([5, 6, END], trace)):
        with pytest.raises(UserError, match="/llama .*NaN in float32"):
            log_probabilities(decoder.running[0], [request], {METHOD: [Timed(text, [0.1], how)]})


def test_a_drafter_that_is_broken_is_the_one_named(checkpoints: Path, tmp_path: Path) -> None:
    path = broken(checkpoints / "t5-draft", tmp_path / "small", row=9)
    decoder = load(str(checkpoints / "t5"), str(path), policy="bild")
    with pytest.raises(UserError, match="/small .*NaN"):
        require_no_nan(decoder.running, decoder.request("w9 w5", 10))


KNOBS = {
    "vanilla": {},
    "speculative": {"window": 3},
    "bild": {"fallback": 0.1, "rollback": 3.0},
    "speculative_tree": {},
    "bild_early_exit": {"exit_layer": 1},
}
FAMILIES = [*(("llama", policy) for policy in KNOBS), ("t5", "bild")]


@pytest.mark.fast(
    "llama-vanilla-native-1.0",
    "llama-speculative-hf-0.0",
    "llama-bild-kernels-0.0",
    "llama-speculative_tree-native-1.0",
    "llama-bild_early_exit-kernels-0.0",
    "t5-bild-native-1.0",
)
@pytest.mark.parametrize(
    ("engine", "temperature"), [("kernels", 0.0), ("native", 1.0), ("hf", 0.0)]
)
@pytest.mark.parametrize(("family", "policy"), FAMILIES)
def test_the_rows_of_decoding_give_a_text_what_one_forward_gives(
    family: str, policy: str, engine: str, temperature: float, checkpoints: Path
) -> None:
    draft = (
        str(checkpoints / f"{family}-draft")
        if policy in ("speculative", "bild", "speculative_tree")
        else None
    )
    decoder = load(str(checkpoints / family), draft, policy=policy, engine=engine, **KNOBS[policy])
    request = decoder.request("w5 w9 w12", 12, Sampling(temperature), seed=3)
    trace = StageTrace(score=log_probability)
    tokens = decoder.method.decode(request, trace)[request.limits.prompt_length :]
    own = log_probability(text_logits(decoder.target, request, tokens), tokens)
    assert trace.scored == len(tokens) > 1 and trace.paused_s > 0
    assert trace.log_probability == pytest.approx(own, abs=1e-3)


def test_a_text_that_ends_in_unverified_tokens_is_not_scored_by_its_rounds(
    checkpoints: Path,
) -> None:
    pair = str(checkpoints / "llama"), str(checkpoints / "llama-draft")
    decoder = load(*pair, policy="bild", fallback=0.0, rollback=float("inf"), verify_tail=False)
    request, trace = decoder.request("w5 w9 w12", 10), StageTrace(score=log_probability)
    tokens = decoder.method.decode(request, trace)[request.limits.prompt_length :]
    assert trace.scored < len(tokens)
    found = log_probabilities(
        decoder.running[0], [request], {METHOD: [Timed(tokens, [0.1], trace)]}
    )[METHOD]
    assert found == [log_probability(text_logits(decoder.target, request, tokens), tokens)]


@pytest.mark.parametrize("engine", ["native", "hf"])
@pytest.mark.parametrize("family", ["t5", "llama"])
def test_it_is_the_sum_over_the_tokens_of_the_text(
    family: str, engine: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load(str(checkpoints / family), policy="vanilla", engine=engine)
    request = decoder.request("w5 w9 w12", 10)
    emitted = [7, 11, 8, 30]
    module = decoder.target.transformers.module
    expected = 0.0
    for place, token in enumerate(emitted):
        ids = torch.tensor([[*request.source.prompt, *emitted[:place]]])
        given = {"input_ids": ids} if family == "llama" else {"decoder_input_ids": ids}
        if family == "t5":
            given["input_ids"] = request.source.encoder_ids
        with torch.no_grad():
            expected += float(module(**given).logits[0, -1].log_softmax(-1)[token])
    monkeypatch.setattr(likelihood, "MOST_ROWS", 3)  # also across parts
    assert log_probability(text_logits(decoder.target, request, emitted), emitted) == pytest.approx(
        expected, abs=1e-3
    )
    assert log_probability(text_logits(decoder.target, request, []), []) == 0.0


def test_a_text_whose_value_is_known_is_not_scored_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        likelihood, "text_logits", lambda target, request, text: scored.append(text)
    )
    monkeypatch.setattr(likelihood, "log_probability", lambda logits, text: -len(text))

    def timed(*texts: list[int], known: float) -> list[Timed]:
        return [Timed(text, [0.1], StageTrace(log_probability=known, scored=3)) for text in texts]

    several = {METHOD: timed([1, 2], [4, 4, 4], [5, 5, 5], known=-0.5)}
    several[BASELINE] = timed([1, 2], [3], [5, 5, 5], known=-0.25)
    assert log_probabilities(None, [0, 1, 2], several) == {
        METHOD: [-2, -0.5, -0.25],
        BASELINE: [-2, -1, -0.25],
    }
    assert scored == [(1, 2), (3,)]
