"""Texts up to the last position that a model has are exact; longer ones are refused in words."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)

from bild_lab.engine.draft import Draft
from bild_lab.engine.models.hf.positions import (
    changing_rotation,
    learned_positions,
    max_session_positions,
    original_context,
    trained_positions,
)
from bild_lab.engine.request import Limits
from bild_lab.engine.sampling import Sampling
from bild_lab.errors import UserError
from bild_lab.lab.point.load import Loaded, load
from tests.engine.methods.modules.tiny import files_of
from tests.policies import shipped
from tests.tiny_architectures import DECODER, build, configuration, relative_of, word_tokenizer

PROMPT = [5, 9, 12, 30, 7, 9, 12]
POSITIONS = 20


def short_gpt2(positions: int = POSITIONS) -> PreTrainedModel:
    config = configuration("gpt2")
    config.n_positions, config.eos_token_id, config.num_key_value_heads = (
        positions,
        None,
        config.n_head,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def loaded(module: PreTrainedModel) -> Loaded:
    tokenizer = word_tokenizer()
    tokenizer.eos_token = None  # nothing ends a text early
    return module, tokenizer


FILLING = ("vanilla", "hf_generate", "hf_assisted", "speculative", "prompt_lookup", "synthetic")
TREES = ("speculative_tree", "bild_tree", "bita", "medusa", "ppd", "eagle3")


@pytest.mark.fast("bild", "medusa")
@pytest.mark.parametrize(
    "policy",
    [*FILLING, "speculative_hierarchy", "early_exit_speculative", "bild", *TREES],
)
def test_a_text_fills_every_position(policy: str, tmp_path: Path) -> None:
    module = short_gpt2()
    pair = {"draft": loaded(relative_of(module)), "second_draft": loaded(relative_of(module, 0.1))}
    wanted = POSITIONS + 1 - len(PROMPT)  # the last token is never read
    files = files_of(policy, module.config, tmp_path)
    decoder = load(loaded(module), policy=policy if files else shipped(policy), **pair, **files)
    found = decoder.generate(PROMPT, wanted).token_ids
    assert len(found) <= wanted
    if decoder.method.lossless(Sampling()):
        assert len(found) == wanted
        assert (
            found
            == load(loaded(module), policy=shipped("hf_generate"))
            .generate(PROMPT, wanted)
            .token_ids
        )
    message = (
        "GPT2LMHeadModel .gpt2. reads at most 20 tokens, got a prompt of 7 and 15 new tokens; lower"
    )
    with pytest.raises(UserError, match=message):
        decoder.generate(PROMPT, wanted + 1)


OFFSET = ("roberta", "xlm-roberta", "camembert", "roberta-prelayernorm", "data2vec-text")


@pytest.mark.fast("speculative-roberta")
@pytest.mark.parametrize("name", OFFSET)
@pytest.mark.parametrize("policy", ["vanilla", "speculative"])
def test_positions_that_are_counted_after_the_padding_are_fewer(policy: str, name: str) -> None:
    """Fault: the last two positions of RoBERTa's relatives ended in an error of the module."""
    config = AutoConfig.for_model(
        name,
        **{**DECODER, "max_position_embeddings": POSITIONS + 2, "pad_token_id": 1},
        is_decoder=True,
    )
    config.eos_token_id = None
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config).eval()
    assert learned_positions(module, config) == POSITIONS
    decoder = load(loaded(module), loaded(relative_of(module)), policy=shipped(policy))
    wanted = POSITIONS + 1 - len(PROMPT)
    assert len(decoder.generate(PROMPT, wanted).token_ids) == wanted
    with pytest.raises(UserError, match=f"reads at most {POSITIONS} tokens, got a prompt of 7 and"):
        decoder.generate(PROMPT, wanted + 1)


def test_a_decoder_that_also_reads_the_position_after_each_row_has_one_less() -> None:
    """Fault: the last position of ProphetNet, whose row reads the one behind it, ended in an
    IndexError. Its row for padding is no position either.
    """
    config = configuration("prophetnet")
    config.max_position_embeddings, config.eos_token_id = POSITIONS + 2, None
    torch.manual_seed(0)
    module = AutoModelForSeq2SeqLM.from_config(config).eval()
    assert learned_positions(module.get_decoder(), config) == POSITIONS
    assert learned_positions(module.get_encoder(), config) == POSITIONS + 1
    decoder = load(loaded(module), policy=shipped("hf_generate"))
    assert len(decoder.generate(PROMPT, POSITIONS).token_ids) == POSITIONS
    with pytest.raises(UserError, match=f"reads at most {POSITIONS} tokens, got a prompt of 1 and"):
        decoder.generate(PROMPT, POSITIONS + 1)


def test_prompt_lookup_of_transformers_leaves_room_for_a_whole_draft() -> None:
    module = short_gpt2()
    repeated = [5, 9, 12] * 3
    policy = copy.deepcopy(shipped("hf_prompt_lookup"))
    policy.window = 4
    wanted = POSITIONS - len(repeated) - 4 + 2
    texts = [
        load(loaded(module), policy=each).generate(repeated, wanted)
        for each in (policy, shipped("vanilla"))
    ]
    assert texts[0].token_ids == texts[1].token_ids
    with pytest.raises(
        UserError, match="drafts 4 tokens .* may read 21 of the 20 .*; lower .* by 1, or"
    ):
        load(loaded(module), policy=policy).generate(repeated, wanted + 1)


def test_a_source_beyond_the_encoders_positions_is_refused() -> None:
    decoder = load(loaded(build("bart")), policy=shipped("vanilla"))
    with pytest.raises(
        UserError,
        match="the encoder of BartForConditionalGeneration .bart. reads at most 128 tokens, got a",
    ):
        decoder.generate([5] * 129, 4)


@pytest.mark.parametrize("name", ["llama/dynamic", "phi3/longrope"])
def test_a_rotation_that_changes_with_the_length_ends_a_session_but_not_generate(name: str) -> None:
    module = build(name)
    assert (
        len(load(loaded(module), policy=shipped("hf_generate")).generate(PROMPT, 30).token_ids) > 0
    )
    with pytest.raises(
        UserError,
        match="at most 24 tokens, as its rotation changes with longer texts, .* policy=hf_generate",
    ):
        load(loaded(module), policy=shipped("vanilla")).generate(PROMPT, 30)


@pytest.mark.parametrize(
    ("name", "decoder", "whole"),
    [
        ("gpt2", 128, 128),
        ("opt", 128, 128),
        ("ctrl", 128, 128),
        ("mpt", 128, 128),
        ("llama", None, None),
        ("phi3/longrope", None, 24),
    ],
)
def test_positions_are_those_of_tables_or_of_a_changing_rotation(
    name: str, decoder: int | None, whole: int | None
) -> None:
    module = build(name)
    assert learned_positions(module, module.config) == decoder
    assert max_session_positions(module) == whole


@pytest.mark.parametrize(("rows", "positions"), [(16, 16), (18, 16), (19, None), (15, None)])
def test_a_table_of_other_rows_than_positions_bounds_no_text(
    rows: int, positions: int | None
) -> None:
    """Such as one of types, or of a resampled image, whose name has `pos` in it, too."""
    module = torch.nn.Module()
    module.wpe = torch.nn.Embedding(rows, 4)
    config = configuration("gpt2")
    config.n_positions = 16
    assert learned_positions(module, config) == positions


def test_a_rotation_that_was_scaled_tells_what_it_was_made_from() -> None:
    plain, scaled = (
        {"rope_type": "default"},
        {"rope_type": "yarn", "original_max_position_embeddings": 24},
    )
    changing = {"rope_type": "dynamic", "original_max_position_embeddings": 16}
    longer = {"original_max_position_embeddings": 32}
    for settings, made_from, unchanged in (
        (None, None, None),
        (plain, None, None),
        (scaled, 24, None),
        (changing, 16, 16),
        ({"full_attention": scaled, "sliding_attention": plain}, 24, None),
        ({"full_attention": changing, "sliding_attention": scaled}, 24, 16),
        ({"full_attention": changing, "sliding_attention": {**changing, **longer}}, 32, 16),
    ):
        config = SimpleNamespace(rope_parameters=settings)
        assert (original_context(config), changing_rotation(config)) == (made_from, unchanged)


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        (None, None),
        ({"rope_type": "default"}, 100),
        ({"rope_type": "linear", "factor": 4.0}, 400),
        ({"rope_type": "dynamic", "factor": 2.5}, 250),
        ({"rope_type": "dynamic", "factor": 2.5, "original_max_position_embeddings": 20}, 250),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 50}, 200),
        # which it gives as scaled
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 20}, 100),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 50}, 100),
        (
            {
                "full_attention": {"rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_type": "default"},
            },
            100,
        ),
    ],
)
def test_a_rotary_model_is_trained_for_its_configured_length_times_its_scaling(
    settings: dict | None, length: int | None
) -> None:
    config = SimpleNamespace(rope_parameters=settings, max_position_embeddings=100)
    config.get_text_config = lambda decoder: config
    assert trained_positions(config) == length
    config.alibi = True
    assert trained_positions(config) is None


def test_texts_beyond_what_a_rotary_model_was_trained_for_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = build("llama")
    module.config.max_position_embeddings = POSITIONS
    decoder = load(loaded(module), policy=shipped("vanilla"))
    wanted = POSITIONS + 1 - len(PROMPT)
    decoder.requests([PROMPT, PROMPT[:3]], wanted)
    assert "trained for" not in caplog.text
    decoder.requests([PROMPT[:3], [*PROMPT, 9], PROMPT], wanted)
    decoder.generate(PROMPT, wanted + 2)
    first, second = [line for line in caplog.messages if "trained for texts of 20 tokens" in line]
    assert "1 of 3 here may be longer" in first and "max_source_tokens" in first
    assert "1 of 1 here may be longer" in second


@pytest.mark.fast("bild")
@pytest.mark.parametrize("policy", ["speculative", "bild", "hf_assisted"])
def test_a_drafter_may_have_fewer_positions_than_the_target(policy: str) -> None:
    target, short = short_gpt2(64), short_gpt2(POSITIONS)
    wanted = POSITIONS + 1 - len(PROMPT)
    decoder = load(loaded(target), loaded(short), shipped(policy))
    own = load(loaded(target), policy=shipped("vanilla")).generate(PROMPT, wanted).token_ids
    assert decoder.generate(PROMPT, wanted).token_ids == own or policy == "bild"
    with pytest.raises(
        UserError, match=f"reads at most {POSITIONS} tokens, got a prompt of 7 and {wanted + 1} new"
    ):
        decoder.generate(PROMPT, wanted + 1)


def test_a_draft_loses_the_nodes_after_the_last_position() -> None:
    limits = Limits(prompt_length=2, max_new_tokens=9, positions=5)
    chain = Draft(torch.tensor([4, 5, 6]), probs=torch.eye(3))
    cut = chain.up_to_depth(limits.positions_left([1, 2, 3]))
    assert cut.tokens.tolist() == [4, 5] and cut.probs.shape == (2, 3)
    assert chain.up_to_depth(limits.positions_left([1, 2])) is chain
    assert chain.up_to_depth(Limits(2, 9).positions_left([1, 2, 3, 4, 5])) is chain
    #  4    5
    #  |   / \\
    #  6  7   8
    tree = Draft(torch.tensor([4, 6, 5, 7, 8]), parents=torch.tensor([-1, 0, -1, 2, 2]))
    assert tree.up_to_depth(limits.positions_left([1, 2, 3])) is tree
    cut = tree.up_to_depth(limits.positions_left([1, 2, 3, 4]))
    assert (cut.token_list, cut.parent_list, cut.tree.parents.tolist()) == (
        [4, 5],
        [-1, -1],
        [-1, 0, 0],
    )
    deeper = Draft(torch.tensor([4, 6, 5, 7, 8]), parents=torch.tensor([-1, 0, 1, 0, 3]))
    cut = deeper.up_to_depth(limits.positions_left([1, 2, 3]))
    assert (cut.token_list, cut.parent_list) == ([4, 6, 7], [-1, 0, 0])
