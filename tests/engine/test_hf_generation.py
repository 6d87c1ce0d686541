"""The peers run with the request's settings and nothing that another run left behind."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

import bild_lab
from bild_lab.engine.hf_generation import HuggingFaceEarlyExit, HuggingFaceGenerate, HuggingFacePromptLookup
from bild_lab.engine.models.hf import HuggingFaceModel
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from tests.engine.vocabularies.foreign import foreign_module
from tests.policies import DECODER_ONLY, FAMILIES, REFUSED, T5_ONLY, in_memory, load, shipped
from tests.tiny import END, PAD, START, relative_of, save, tiny_llama, tiny_t5
from tests.tiny_architectures import build, word_tokenizer


def test_a_fixed_window_of_assisted_generation_does_not_leak_into_runs_as_shipped(checkpoints: Path) -> None:
    target, draft = str(checkpoints / "llama"), str(checkpoints / "llama-draft")
    shipped = bild_lab.load(target, draft, "hf_assisted")
    fixed = bild_lab.load(target, draft, "hf_assisted", window=2)
    drafts_with = []
    for decoder in (shipped, fixed, shipped):
        decoder.generate("w5 w9", max_new_tokens=4)
        drafts_with.append(decoder.models[1].transformers.module.generation_config.num_assistant_tokens)
    assert drafts_with[1] == 2
    assert drafts_with[0] == drafts_with[2] != 2


def test_a_checkpoints_own_generation_settings_are_left_out(checkpoints: Path) -> None:
    decoder = bild_lab.load(str(checkpoints / "llama"), policy="hf_generate")
    expected = decoder.generate("w5 w9 w30", max_new_tokens=20).token_ids
    decoder.target.transformers.module.generation_config.repetition_penalty = 50.0
    decoder.target.checkpoint.generation.repetition_penalty = 50.0
    assert decoder.generate("w5 w9 w30", max_new_tokens=20).token_ids == expected


def test_a_drafter_of_another_vocabulary_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    module, words = foreign_module(relative_of(tiny_llama(1), 2, noise=0.05), seed=3)
    draft = str(save(module, tmp_path / "foreign", words))
    with pytest.raises(UserError, match=r"of the target's vocabulary, got .*foreign .*use policy=speculative"):
        bild_lab.load(str(checkpoints / "llama"), draft, "hf_assisted")


def repetitive(family: str) -> tuple[HuggingFaceModel, Request]:
    """A model that repeats itself, and a prompt."""
    module = tiny_t5(2) if family == "t5" else tiny_llama(2)
    source = Source((PAD,), torch.tensor([[5, 9, 5, 9, END]])) if family == "t5" else Source((START, 5, 9, 5, 9))
    return in_memory(module), Request(source, Limits(len(source.prompt), 30))


def counting(model: HuggingFaceModel) -> Counter[int]:
    """How often each of the decoder's layers ran, by its place."""
    decoder = model.module.get_decoder()
    ran: Counter[int] = Counter()
    for place, layer in enumerate(decoder.block if model.checkpoint.encoder_decoder else decoder.layers):
        layer.register_forward_hook(lambda *_, place=place: ran.update([place]))
    return ran


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("window", "longest_match"), [(1, 1), (4, 2), (10, 3)])
def test_prompt_lookup_gives_the_text_of_generate_in_fewer_forwards(
    family: str, window: int, longest_match: int
) -> None:
    target, request = repetitive(family)
    expected = HuggingFaceGenerate(target).decode(request, Trace())
    ran = counting(target)
    assert HuggingFacePromptLookup(target, window, longest_match).decode(request, Trace()) == expected
    assert ran[0] < 30


def test_early_exit_drafts_with_the_first_layers_and_gives_the_text_of_generate() -> None:
    target = in_memory(tiny_llama(4, layers=3))
    request = Request(Source((START, 5, 9, 30)), Limits(4, 30))
    expected = HuggingFaceGenerate(target).decode(request, Trace())
    ran = counting(target)
    for exit_layer in (1, 2):
        ran.clear()
        assert HuggingFaceEarlyExit(target, exit_layer).decode(request, Trace()) == expected
        assert [ran[layer] > ran[2] for layer in range(2)] == [True, exit_layer == 2]


def test_an_interrupted_draft_leaves_the_model_whole() -> None:
    target = in_memory(tiny_llama(4, layers=3))
    request = Request(Source((START, 5, 9, 30)), Limits(4, 30))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook = target.module.get_decoder().layers[0].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        HuggingFaceEarlyExit(target, 1).decode(request, Trace())
    hook.remove()
    ran = counting(target)
    HuggingFaceGenerate(target).decode(request, Trace())
    assert ran[2] == ran[0] > 0


@pytest.mark.parametrize(("policy", "family"), sorted(REFUSED - DECODER_ONLY - T5_ONLY))
def test_what_transformers_cannot_do_is_refused_at_construction(checkpoints: Path, policy: str, family: str) -> None:
    with pytest.raises(UserError, match=r"cannot exit early from .* \(t5\).*use policy=early_exit_speculative"):
        load(checkpoints, family, policy)


@pytest.mark.parametrize("policy", ["hf_assisted", "hf_early_exit", "hf_prompt_lookup"])
def test_drafts_are_refused_where_the_state_cannot_go_back(policy: str) -> None:
    stateful = (build("mamba"), word_tokenizer())
    with pytest.raises(
        UserError, match=r"needs a model with a key-value cache, got MambaForCausalLM \(mamba\); use policy"
    ):
        bild_lab.load(stateful, stateful, shipped(policy))
    attentive = (build("llama"), word_tokenizer())
    if policy == "hf_assisted":
        with pytest.raises(UserError, match="assisted generation of transformers needs a model with a key-value cache"):
            bild_lab.load(attentive, stateful, shipped(policy))
