"""The peers run with the request's settings and nothing that another run left behind."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import bild_lab
from bild_lab.engine.methods import hf_generation
from bild_lab.engine.methods.hf_generation import (
    HuggingFaceGenerate,
    HuggingFacePromptLookup,
)
from bild_lab.engine.models.hf.generation import reads_padding
from bild_lab.engine.models.hf.model import HuggingFaceModel
from bild_lab.engine.request import Limits, Request
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from tests.engine.vocabularies.foreign import foreign_module
from tests.policies import FAMILIES, in_memory, shipped
from tests.tiny import relative_of, save, source_of, tiny_llama, tiny_t5
from tests.tiny_architectures import build, word_tokenizer


def test_a_fixed_window_of_assisted_generation_does_not_leak_into_runs_as_shipped(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = str(checkpoints / "llama"), str(checkpoints / "llama-draft")
    shipped = bild_lab.load(target, draft, "hf_assisted")
    fixed = bild_lab.load(target, draft, "hf_assisted", window=2)
    drafts_with, generate = [], hf_generation.generate

    def noted(*arguments: Any, assistant_model: Any, **options: Any) -> list[int]:
        tokens = generate(*arguments, assistant_model=assistant_model, **options)
        drafts_with.append(assistant_model.generation_config.num_assistant_tokens)
        return tokens

    monkeypatch.setattr(hf_generation, "generate", noted)
    for decoder in (shipped, fixed, shipped):
        decoder.generate("w5 w9", max_new_tokens=4)
    assert drafts_with[1] == 2
    assert drafts_with[0] == drafts_with[2] != 2


def test_a_checkpoints_own_generation_settings_are_left_out(checkpoints: Path) -> None:
    decoder = bild_lab.load(str(checkpoints / "llama"), policy="hf_generate")
    expected = decoder.generate("w5 w9 w30", max_new_tokens=20).token_ids
    decoder.target.transformers.module.generation_config.repetition_penalty = 50.0
    decoder.target.checkpoint.generation.repetition_penalty = 50.0
    assert decoder.generate("w5 w9 w30", max_new_tokens=20).token_ids == expected


@pytest.mark.parametrize("family", ["llama", "t5"])
@pytest.mark.parametrize("pad", [-1, 40, None])
def test_texts_of_a_batch_are_padded_with_a_token_that_the_model_has(
    pad: int | None, family: str, checkpoints: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoints / family, tmp_path / family)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pad_token_id": pad}))
    decoder = bild_lab.load(folder, policy="hf_generate")
    prompts = [[5, 9, 12, 30, 7], [8], [20, 11, 25]]
    alone, together = (
        [text.token_ids for text in decoder.generate(prompts, 12, batch=batch)] for batch in (1, 3)
    )
    assert together == alone


PADDED = [[5, 9], [8, 8, 20, 11, 25, 8, 8, 20, 31, 17, 9, 4], [30, 7, 12, 6, 5], [14]]


@pytest.mark.fast("rwkv-True", "mamba-False")
@pytest.mark.parametrize(
    ("name", "one_by_one"),
    [
        ("rwkv", True),
        ("xlnet", True),
        ("minimax", True),
        ("deepseek_v32", True),
        ("mamba", False),
        ("gpt2", False),
        ("t5", False),
    ],
)
def test_texts_of_a_padded_batch_are_those_of_each_alone(
    name: str, one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: modules that read the padding gave other texts, in calibration data too."""
    decoder = bild_lab.load((build(name), word_tokenizer()), policy="hf_generate")
    alone = [text.token_ids for text in decoder.generate(PADDED, 10, batch=1)]
    batches, stopping_options = [], hf_generation.stopping_options
    monkeypatch.setattr(
        hf_generation,
        "stopping_options",
        lambda requests, width: batches.append(len(requests)) or stopping_options(requests, width),
    )
    assert [text.token_ids for text in decoder.generate(PADDED, 10, batch=4)] == alone
    assert batches == ([1] * len(PADDED) if one_by_one else [len(PADDED)])
    batches.clear()
    same_length = [PADDED[0], [7, 7]]
    decoder.generate(same_length, 10, batch=2)
    assert batches == [2]


def test_a_rounding_that_chooses_another_token_is_no_padding_that_was_read() -> None:
    """Fault: where two scores are close, a batch was decoded text by text, with a warning that the
    module reads the padding.
    """
    model = tiny_llama(1)
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight[1::2] = head.weight[::2]

    def rounded(module: torch.nn.Module, inputs: object, logits: torch.Tensor) -> torch.Tensor:
        ahead = torch.arange(logits.shape[-1]) % 2 == len(logits) % 2  # of two equal scores
        return logits + 1e-5 * ahead

    head.register_forward_hook(rounded)
    assert not reads_padding(model, torch.float32)


def test_each_text_of_a_batch_has_its_own_length() -> None:
    target = in_memory(tiny_llama(3), "hf")
    asked = (([5, 9, 12], 3), ([8, 7, 20], 9), ([30, 4, 6], 6))  # the first is the shortest
    requests = [Request(source_of("llama", words), Limits(4, length)) for words, length in asked]
    alone = [hf_generation.generate(target, [request])[0] for request in requests]
    assert [len(text) for text in alone] == [4 + length for _, length in asked]
    assert hf_generation.generate(target, requests) == alone


def test_a_drafter_of_another_vocabulary_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    module, words = foreign_module(relative_of(tiny_llama(1), 2, noise=0.05), seed=3)
    draft = str(save(module, tmp_path / "foreign", words))
    with pytest.raises(
        UserError, match=r"of the target's vocabulary, got .*foreign .*use policy=speculative"
    ):
        bild_lab.load(str(checkpoints / "llama"), draft, "hf_assisted")


def repetitive(family: str) -> tuple[HuggingFaceModel, Request]:
    """A model that repeats itself, and a prompt."""
    module = tiny_t5(2) if family == "t5" else tiny_llama(2)
    source = source_of(family, [5, 9, 5, 9])
    return in_memory(module), Request(source, Limits(len(source.prompt), 30))


def counting(model: HuggingFaceModel) -> Counter[int]:
    """How often each of the decoder's layers ran, by its place."""
    decoder = model.module.get_decoder()
    ran: Counter[int] = Counter()
    for place, layer in enumerate(
        decoder.block if model.checkpoint.encoder_decoder else decoder.layers
    ):
        layer.register_forward_hook(lambda *_, place=place: ran.update([place]))
    return ran


@pytest.mark.fast("1-1-t5", "10-3-llama")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("window", "longest_match"), [(1, 1), (4, 2), (10, 3)])
def test_prompt_lookup_gives_the_text_of_generate_in_fewer_forwards(
    family: str, window: int, longest_match: int
) -> None:
    target, request = repetitive(family)
    expected = HuggingFaceGenerate(target).decode(request, Trace())
    ran = counting(target)
    assert (
        HuggingFacePromptLookup(target, window, longest_match).decode(request, Trace()) == expected
    )
    assert ran[0] < 30


@pytest.mark.parametrize("window", [0, "many", 1.5, {"a": 1}])
def test_a_window_of_assisted_generation_that_is_no_number_of_tokens_is_refused(
    window: object,
) -> None:
    model = (build("llama"), word_tokenizer())
    with pytest.raises(UserError, match="the draft window must be a whole number >= 1, got"):
        bild_lab.load(model, model, "hf_assisted", window=window)


@pytest.mark.parametrize("policy", ["hf_assisted", "hf_prompt_lookup"])
def test_drafts_are_refused_where_the_state_cannot_go_back(policy: str) -> None:
    stateful = (build("mamba"), word_tokenizer())
    with pytest.raises(
        UserError,
        match=r"needs a model with a key-value cache, got MambaForCausalLM \(mamba\); use policy",
    ):
        bild_lab.load(stateful, stateful, shipped(policy))
    attentive = (build("llama"), word_tokenizer())
    if policy == "hf_assisted":
        with pytest.raises(
            UserError,
            match="assisted generation of transformers needs a model with a key-value cache",
        ):
            bild_lab.load(attentive, stateful, shipped(policy))


@pytest.mark.fast("layers0")
@pytest.mark.parametrize("layers", [(1, 3), (3, 1)])
def test_encoders_and_decoders_of_two_depths_are_taken_by_every_method(
    tmp_path: Path, layers: tuple[int, int]
) -> None:
    """Of the target and of the drafter, whose caches Transformers would size by their encoders."""
    target = str(save(tiny_t5(1, *layers), tmp_path / "target"))
    draft = str(save(tiny_t5(1, *layers[::-1]), tmp_path / "draft"))
    prompts = ["w5 w9 w30 w12", "w7", "w20 w21"]
    expected = [
        each.token_ids for each in bild_lab.load(target, policy="vanilla").generate(prompts, 12)
    ]
    for policy in ("hf_generate", "hf_prompt_lookup", "hf_assisted"):
        for drafter in (draft, target):
            decoder = bild_lab.load(target, drafter, policy)
            assert [each.token_ids for each in decoder.generate(prompts, 12)] == expected, policy
    together = bild_lab.load(target, policy="hf_generate").generate(prompts, 12, batch=3)
    assert [each.token_ids for each in together] == expected
