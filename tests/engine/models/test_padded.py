"""Models with ids beyond their tokenizer: no text has one, in any engine and by any method."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import bild_lab
from bild_lab.engine.methods.medusa import MedusaHeads
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.hf.model import HuggingFaceModel
from bild_lab.engine.request import Source
from tests.tiny import (
    TINY,
    VOCABULARY,
    padded,
    relative_of,
    save,
    tiny_llama,
    tiny_tokenizer,
)

ENGINES = ("kernels", "native", "hf")
FAMILIES = ("llama", "t5")
PROMPTS = ["w5 w9 w30", "w20 w21 w20 w21 w22", "w7"]
LOSSLESS = {
    "speculative": {},
    "speculative_tree": {},
    "prompt_lookup": {},
    "early_exit_speculative": {"exit_layer": 1},
    "token_recycling": {},
    "ppd": {},
    "hf_generate": {},
    "hf_assisted": {},
    "hf_prompt_lookup": {},
}
LOSSY = {"bild": {}, "bild_tree": {}, "calm": {}}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of both families: a target of 48 rows and drafters of 44 and 40, with one tokenizer of 40
    tokens.
    """
    folder = tmp_path_factory.mktemp("padded")
    for family in FAMILIES:
        target = TINY[family](1)
        save(relative_of(target, 2, noise=0.2), folder / f"{family}-draft40")
        save(padded(relative_of(target, 2, noise=0.2), 44), folder / f"{family}-draft44")
        save(padded(target, 48), folder / family)
    return folder


@pytest.mark.fast("llama")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_id_that_would_win_is_never_emitted_and_greedy_texts_agree(
    pairs: Path, family: str
) -> None:
    target = str(pairs / family)
    auto = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
    ids = Checkpoint(target).tokenizer(PROMPTS[1], return_tensors="pt")["input_ids"]
    plain = (
        auto.from_pretrained(target).generate(ids, max_new_tokens=12, do_sample=False)[0].tolist()
    )
    assert max(plain) >= VOCABULARY, "a test in which no padded id would win shows nothing"
    expected = None
    for engine in ENGINES:
        decoder = bild_lab.load(target, policy="vanilla", engine=engine)
        texts = [each.token_ids for each in decoder.generate(PROMPTS, max_new_tokens=12)]
        expected = expected or texts
        assert texts == expected
    assert max(map(max, expected)) < VOCABULARY


@pytest.mark.fast("llama-44")
@pytest.mark.parametrize("width", [40, 44])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_method_runs_where_both_models_are_padded_differently(
    pairs: Path, family: str, width: int
) -> None:
    target, draft = str(pairs / family), str(pairs / f"{family}-draft{width}")
    expected = [
        each.token_ids for each in bild_lab.load(target, policy="vanilla").generate(PROMPTS, 12)
    ]
    for policy, knobs in {**LOSSLESS, **LOSSY}.items():
        decoder = bild_lab.load(target, draft, policy, **knobs)
        found = decoder.generate(PROMPTS, max_new_tokens=12)
        sampled = (
            decoder.generate(PROMPTS[1], 12, temperature=1.5).token_ids if policy != "ppd" else []
        )
        drafted = [token for each in found for one in each.trace.rounds for token in one.drafted]
        assert (
            max([*sampled, *drafted, *(token for each in found for token in each.token_ids)])
            < VOCABULARY
        ), policy
        if policy in LOSSLESS:
            assert [each.token_ids for each in found] == expected, policy


@pytest.mark.fast("kernels")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_chain_and_a_tree_drafted_in_one_go_have_no_padded_id(pairs: Path, engine: str) -> None:
    for policy in ("speculative", "speculative_tree"):
        decoder = bild_lab.load(
            str(pairs / "llama"), str(pairs / "llama-draft44"), policy, engine=engine
        )
        rounds = [
            one for each in decoder.generate(PROMPTS, 12, batch=1) for one in each.trace.rounds
        ]
        assert max(token for one in rounds for token in one.drafted) < VOCABULARY


@pytest.mark.fast("llama-kernels", "t5-hf")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", FAMILIES)
def test_probabilities_are_those_of_the_tokens_that_there_are(
    pairs: Path, family: str, engine: str
) -> None:
    """So is what a target gives to a text: its rows are normalized over the tokens, in every
    engine.
    """
    model = bild_lab.load(str(pairs / family), policy="vanilla", engine=engine).target
    encoded = torch.tensor([[5, 9, 30, 1]]) if family == "t5" else None
    with torch.inference_mode():
        logits = model.text_logits(Source((0, 5, 9) if family == "t5" else (2, 5, 9), encoded))
    assert logits.shape[1] == 48
    assert (
        logits[:, VOCABULARY:].eq(float("-inf")).all() and logits[:, :VOCABULARY].isfinite().all()
    )
    session = model.start(Source((0,) if family == "t5" else (2,), encoded), 4)
    rows = session.extend([0 if family == "t5" else 2, 5, 9]).logits
    assert torch.allclose(rows.float(), logits.float(), atol=1e-4)


def test_ids_between_the_tokens_are_padding_too_and_end_tokens_are_not(tmp_path: Path) -> None:
    model = padded(tiny_llama(1), 48)
    words = [f"w{index}" for index in range(3, VOCABULARY)]
    save(model, tmp_path)
    tokenizer = tiny_tokenizer(False, words)
    backend = tokenizer.backend_tokenizer
    vocabulary = {
        piece: token for piece, token in tokenizer.get_vocab().items() if token not in (10, 11)
    }
    backend.model = type(backend.model)(vocabulary, unk_token="w3")
    tokenizer.save_pretrained(tmp_path)
    checkpoint = Checkpoint(str(tmp_path))
    assert checkpoint.ids_without_token == (10, 11, *range(40, 48))
    checkpoint = Checkpoint(str(tmp_path))
    checkpoint.generation.eos_token_id = [1, 45]
    assert 45 not in checkpoint.ids_without_token
    for engine in ENGINES:
        emitted = (
            bild_lab.load(str(tmp_path), policy="vanilla", engine=engine)
            .generate("w5 w9", 12)
            .token_ids
        )
        assert not {10, 11, *range(40, 48)} & set(emitted)


def test_heads_of_a_padded_target_draft_no_padded_id(pairs: Path, tmp_path: Path) -> None:
    target = HuggingFaceModel(Checkpoint(str(pairs / "llama")), torch.device("cpu"), torch.float32)
    head = target.module.lm_head.weight
    MedusaHeads.fresh(target.checkpoint.config, head, {}, heads=2).save(tmp_path)
    for engine in ENGINES:
        decoder = bild_lab.load(
            str(pairs / "llama"), policy="medusa", heads=str(tmp_path), engine=engine
        )
        rounds = [
            one for each in decoder.generate(PROMPTS, 12, batch=1) for one in each.trace.rounds
        ]
        drafted = [token for one in rounds for token in one.drafted]
        assert drafted and max(drafted) < VOCABULARY
