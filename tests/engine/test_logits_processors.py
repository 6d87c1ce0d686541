"""What a checkpoint says about generation: the same processors for target and drafter, the text of
`generate`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    PreTrainedModel,
)

from bild_lab.engine.models.native import why_no_kernels
from bild_lab.engine.session import ALL_LOGITS, OutputSpec, Rows, Scores
from bild_lab.lab.point.decoder import Decoder
from bild_lab.lab.point.load import load
from tests.policies import RUNNABLE, is_lossless, shipped
from tests.policies import load as load_tiny
from tests.stubs import StubSession
from tests.tiny import padded, save, tiny_llama
from tests.tiny import relative_of as relative_of_tiny
from tests.tiny_architectures import END, PAD, START, VOCABULARY, build, relative_of, word_tokenizer

FIRST, NEW = 21, 14
PROMPTS = ([5, 9, 12, 30, 7], [33, 8, 8, 20, 19, 4])
CHAINS = (
    "vanilla",
    "speculative",
    "prompt_lookup",
    "speculative_hierarchy",
    "hf_generate",
    "hf_assisted",
    "hf_prompt_lookup",
)
COMMON = {"eos_token_id": END, "pad_token_id": PAD, "decoder_start_token_id": START}
SAID = {
    "bart": {
        "forced_bos_token_id": 0,
        "forced_eos_token_id": END,
        "no_repeat_ngram_size": 2,
        "min_length": 9,
    },
    "mbart": {
        "forced_bos_token_id": FIRST,
        "suppress_tokens": [4, 6, 30],
        "begin_suppress_tokens": [12],
    },
    "m2m_100": {
        "forced_bos_token_id": FIRST,
        "bad_words_ids": [[7], [22, 9]],
        "repetition_penalty": 1.4,
    },
    "nllb-moe": {"forced_bos_token_id": FIRST, "min_new_tokens": 8, "repetition_penalty": 0.7},
    "marian": {
        "forced_eos_token_id": END,
        "bad_words_ids": [[PAD]],
        "encoder_no_repeat_ngram_size": 1,
    },
    "llama": {
        "min_new_tokens": 10,
        "repetition_penalty": 1.3,
        "exponential_decay_length_penalty": (4, 1.2),
    },
}
SUPPRESSED = [END, 9, 14]
LISTED = [
    {"_target_": "transformers.NoRepeatNGramLogitsProcessor", "ngram_size": 2},
    {"_target_": "transformers.RepetitionPenaltyLogitsProcessor", "penalty": 1.5},
    {"_target_": "transformers.SuppressTokensLogitsProcessor", "suppress_tokens": SUPPRESSED},
]


def saying(name: str, said: dict[str, Any]) -> PreTrainedModel:
    module = build(name)
    module.generation_config = GenerationConfig(**COMMON, **said)
    return module


def texts_of(decoder: Decoder, **sampling: Any) -> list[list[int]]:
    decoder.load_weights()
    return [decoder.generate(prompt, NEW, **sampling).token_ids for prompt in PROMPTS]


def texts_of_generate(
    module: PreTrainedModel, said: GenerationConfig, **options: Any
) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        module.generation_config = copy.deepcopy(said)
        out = module.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, **options
        )
        found.append(out[0, 1 if module.config.is_encoder_decoder else len(prompt) :].tolist())
    return found


def compare_with_generate(name: str, policies: Sequence[str]) -> None:
    module = saying(name, SAID[name])
    said = copy.deepcopy(module.generation_config)
    expected = texts_of_generate(module, said)
    without = texts_of_generate(module, GenerationConfig(**COMMON))
    assert expected != without, "the settings change nothing"
    target, draft, second = (
        (each, word_tokenizer()) for each in (module, relative_of(module), relative_of(module, 0.1))
    )
    for policy in policies:
        for processors, texts in (("checkpoint", expected), ("none", without)):
            module.generation_config = copy.deepcopy(said)
            decoder = load(
                target, draft, shipped(policy), second_draft=second, processors=processors
            )
            assert texts_of(decoder) == texts, (policy, processors)


@pytest.mark.fast("bart-policies0")
@pytest.mark.parametrize(
    ("name", "policies"),
    [
        ("bart", ("vanilla", "speculative")),
        ("mbart", ("hf_assisted",)),
        ("m2m_100", ("hf_generate",)),
        ("nllb-moe", ("speculative",)),
        ("marian", ("prompt_lookup",)),
        ("llama", ("vanilla", "speculative")),
    ],
)
def test_a_checkpoint_is_followed_as_by_generate(name: str, policies: tuple[str, ...]) -> None:
    compare_with_generate(name, policies)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
def test_every_policy_of_chains_follows_every_checkpoint(name: str) -> None:
    compare_with_generate(name, CHAINS)


@lru_cache
def texts_with_list(checkpoints: Path, family: str) -> list[list[int]]:
    vanilla = load_tiny(checkpoints, family, "vanilla", processors=LISTED)
    module, said = vanilla.target.transformers.module, vanilla.target.checkpoint.generation
    texts = texts_of_generate(
        module, said, logits_processor=LogitsProcessorList(vanilla.processors.added)
    )
    assert texts != texts_of_generate(module, said)
    return texts


def cases(lossless: bool) -> list[Any]:
    """All policies that can run; those on T5 are slow tests, but for a few that feed sessions in
    other ways.
    """
    runnable = [each for each in RUNNABLE if is_lossless(each[0]) == lossless]
    fast = ("speculative_tree", "ppd", "prompt_lookup", "calm")
    slow = [family == "t5" and policy not in fast for policy, family in runnable]
    marks = [[pytest.mark.slow] if each else [] for each in slow]
    return [pytest.param(*each, marks=mark) for each, mark in zip(runnable, marks, strict=True)]


@pytest.mark.fast(
    "early_exit_speculative-llama",
    "hf_generate-llama",
    "prompt_lookup-t5",
    "rejection_sampling-llama",
    "synthetic-llama",
    "truncation-llama",
)
@pytest.mark.parametrize(("policy", "family"), cases(lossless=True))
def test_every_lossless_policy_follows_a_list_as_generate_does(
    checkpoints: Path, policy: str, family: str
) -> None:
    decoder = load_tiny(checkpoints, family, policy, processors=LISTED)
    assert texts_of(decoder) == texts_with_list(checkpoints, family)


@pytest.mark.fast("bild-llama", "bild_tree-llama", "calm-t5", "mars-llama")
@pytest.mark.parametrize(("policy", "family"), cases(lossless=False))
def test_no_lossy_policy_writes_what_a_list_rules_out(
    checkpoints: Path, policy: str, family: str
) -> None:
    decoder = load_tiny(checkpoints, family, policy, processors=LISTED)
    for text in texts_of(decoder):
        pairs = list(pairwise(text))
        assert not set(SUPPRESSED) & set(text) and len(pairs) == len(set(pairs)), text


@pytest.mark.fast(
    "0.0-speculative-kernels", "1.0-speculative-hf", "1.0-early_exit_speculative-kernels"
)
@pytest.mark.parametrize("engine", ["kernels", "hf"])
@pytest.mark.parametrize(
    "policy", ["speculative", "speculative_tree", "speculative_hierarchy", "early_exit_speculative"]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_that_is_the_target_is_never_corrected(
    checkpoints: Path, policy: str, engine: str, temperature: float
) -> None:
    """Only if both pass through the same processors.

    A tree is made of certain tokens, and so is right if greedy.
    """
    if engine == "kernels" and why_no_kernels(torch.device("cpu"), torch.float32) is not None:
        pytest.skip("no compiler for the CPU kernels")
    own = str(checkpoints / "llama")
    node = copy.deepcopy(shipped(policy))
    if "exit_layer" in node:
        node.exit_layer = 2  # all layers
    decoder = load(own, own, node, second_draft=own, engine=engine, processors=LISTED)
    sampled = temperature > 0.0
    for prompt in PROMPTS:
        trace = decoder.generate(prompt, NEW, temperature=temperature, seed=3).trace
        if policy == "speculative_tree":
            assert trace.target_calls <= (NEW if sampled else 3)
        else:
            assert trace.drafted > 0 and trace.rollbacks == 0


class AnySession(StubSession):
    """Scores rows without a look at their tree."""

    def extend(self, rows: Rows, output_spec: OutputSpec = ALL_LOGITS) -> Scores:
        return Scores(torch.zeros(len(rows.tokens), VOCABULARY))


BAD_WORDS = [{"_target_": "transformers.NoBadWordsLogitsProcessor", "bad_words_ids": [[5], [7, 9]]}]


@pytest.mark.parametrize("engine", ["auto", "hf"])
def test_models_of_other_widths_have_processors_of_their_own(engine: str, tmp_path: Path) -> None:
    """Fault: one that prepares itself by the first scores that it gets failed at those of a drafter
    with spare rows.
    """
    model = tiny_llama(1)
    target = save(model, tmp_path / "target")
    drafter = relative_of_tiny(model, 2, noise=0.1)
    drafter.config = copy.deepcopy(drafter.config)
    draft = save(padded(drafter, VOCABULARY + 8), tmp_path / "draft")
    texts = [
        texts_of(load(target, draft, policy, engine=engine, processors=processors))
        for policy in ("vanilla", "speculative")
        for processors in (BAD_WORDS, "none")
    ]
    assert texts[0] == texts[2] != texts[1] == texts[3]


def test_processors_of_one_list_serve_decoders_of_other_widths(tmp_path: Path) -> None:
    """Fault: the texts of the first decoder had prepared them."""
    shared = [NoBadWordsLogitsProcessor([[5], [7, 9]])]
    narrow, wide = tiny_llama(1), tiny_llama(1)
    targets = [
        save(narrow, tmp_path / "narrow"),
        save(padded(wide, VOCABULARY + 8), tmp_path / "wide"),
    ]
    for target in targets:
        own = load(target, policy="hf_generate", processors=BAD_WORDS)
        decoder = load(target, policy="hf_generate", processors=shared)
        assert texts_of(decoder) == texts_of(own)
