"""Rows of the text beside a prompt and masks that they must not notice, and mask rows, on both
engines.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from bild_lab.engine.methods.bita import PROMPTS, BitaTarget
from bild_lab.engine.request import Source
from bild_lab.engine.session import OutputSpec, Session, SessionOptions
from bild_lab.engine.trace import Forward
from tests.engine.methods.modules.oracle import uncached_masks
from tests.engine.methods.modules.tiny import random_adapter
from tests.policies import in_memory
from tests.sessions import tree_rows
from tests.stubs import uncached
from tests.tiny import START, VOCABULARY, tiny_llama

ENGINES = ("native", "hf")
PROMPT = (START, 5, 9, 12, 30)
SOURCE = Source(PROMPT)
MASK = VOCABULARY  # the id of mask 0
#     6          two groups of masks: below 6, and below its child 7
#    / \
#   7   8
TOKENS = [30, 6, 7, 8, MASK, MASK + 1, MASK + 2, MASK, MASK + 1]
PARENTS = [-1, 0, 1, 1, 1, 4, 5, 2, 7]

HEAD = OutputSpec(head_input=True)

prompts = pytest.mark.parametrize("prompt", PROMPTS)
engines = pytest.mark.parametrize("engine", ENGINES)


def adapted(
    module: PreTrainedModel, engine: str, prompt: str, prompt_tokens: int | None = None
) -> BitaTarget:
    adapter = random_adapter(module.config, prompt).to(module.dtype).requires_grad_(False)
    return BitaTarget(in_memory(module, engine), adapter, prompt_tokens)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.fast("deep-native", "none-hf")
@engines
@prompts
def test_rows_of_the_text_are_those_of_the_target_alone(engine: str, prompt: str) -> None:
    module = tiny_llama(0)
    plain: Session = in_memory(module, engine).start(SOURCE, 8)
    session = adapted(module, engine, prompt).start(SOURCE, 8)
    rows, parents = torch.tensor(TOKENS), torch.tensor(PARENTS)
    assert_same(
        session.extend(tree_rows(rows, parents)).logits[:4],
        plain.extend(tree_rows(rows[:4], parents[:4])).logits,
    )
    for each in (session, plain):
        each.keep([0, 1, 3])
    assert session.length == plain.length == len(PROMPT) + 2
    assert_same(session.extend([11, 12]).logits, plain.extend([11, 12]).logits)
    for each in (session, plain):
        each.rollback(len(PROMPT))
    assert session.length == plain.length == len(PROMPT)
    assert_same(session.extend([13]).logits, plain.extend([13]).logits)
    assert_same(session.extend([14], HEAD).head_input, plain.extend([14], HEAD).head_input)


@engines
@prompts
def test_each_group_of_masks_sees_the_prompt_what_is_above_it_and_its_own(
    engine: str, prompt: str
) -> None:
    module = tiny_llama(1).double()
    masks = uncached_masks(module, random_adapter(module.config, prompt))
    session = adapted(module, engine, prompt).start(SOURCE, 8)
    logits = session.extend(tree_rows(torch.tensor(TOKENS), torch.tensor(PARENTS))).logits
    assert_same(logits[4:7], masks([*PROMPT, 6]))
    assert_same(logits[7:], masks([*PROMPT, 6, 7])[:2])
    session.keep([0, 1, 3])
    later = session.extend(
        tree_rows(torch.tensor([11, MASK, MASK + 1]), torch.tensor([-1, 0, 1]))
    ).logits
    assert_same(later[1:], masks([*PROMPT, 6, 8, 11])[:2])
    assert float((logits[4] - logits[7]).abs().max()) > 0.1  # the same mask in another place


@engines
def test_every_prompt_says_something_else_and_fewer_tokens_of_it_do(engine: str) -> None:
    module = tiny_llama(1)
    rows, parents = torch.tensor([30, MASK, MASK + 1]), torch.tensor([-1, 0, 1])
    said = [
        adapted(module, engine, prompt, count)
        .start(SOURCE, 8)
        .extend(tree_rows(rows, parents))
        .logits[1:]
        for prompt, count in (
            ("deep", None),
            ("deep", 3),
            ("shallow", None),
            ("shallow", 3),
            ("none", None),
        )
    ]
    for index, one in enumerate(said):
        assert all(float((one - other).abs().max()) > 0.01 for other in said[:index])
    for prompt in ("deep", "shallow"):
        assert_same(
            adapted(module, engine, prompt, 0)
            .start(SOURCE, 8)
            .extend(tree_rows(rows, parents))
            .logits[1:],
            said[-1],
        )


@engines
def test_forwards_are_recorded_with_their_probe_rows_and_the_prompts_slots(engine: str) -> None:
    forwards: list[Forward] = []
    session = adapted(tiny_llama(0), engine, "deep").start(SOURCE, 8, SessionOptions(forwards))
    session.extend(tree_rows(torch.tensor(TOKENS), torch.tensor(PARENTS)))
    assert [(one.rows, one.cached, one.scored) for one in forwards] == [
        (4 + len(TOKENS), 4, len(TOKENS))
    ]


@engines
def test_a_prompt_has_no_place_in_a_sliding_window(engine: str) -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=4,
    )
    module = MistralForCausalLM(config).eval()
    text = [*PROMPT[:-1], *range(3, 12)]
    session = adapted(module, engine, "deep").start(replace(SOURCE, prompt=(START,)), 20)
    said = session.extend(
        tree_rows(torch.tensor([*text[1:], MASK]), torch.arange(-1, len(text) - 1))
    ).logits
    large = uncached(module, SOURCE)
    assert_same(said[-2], large([START, *text[1:]]))
    changed = adapted(module, engine, "none").start(replace(SOURCE, prompt=(START,)), 20)
    without = changed.extend(
        tree_rows(torch.tensor([*text[1:], MASK]), torch.arange(-1, len(text) - 1))
    ).logits
    # far from the prompt, a mask still sees it
    assert float((said[-1] - without[-1]).abs().max()) > 1e-3
