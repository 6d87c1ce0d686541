"""A session must give the module's own scores in every way it is fed, or is refused; each check
catches its fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedModel

from bild_lab.engine.draft import Tree
from bild_lab.engine.models.cached_session import CachedSession
from bild_lab.engine.models.checkpoint.checkpoint import decoder_depth
from bild_lab.engine.models.hf import admission, layer_control
from bild_lab.engine.models.hf import model as hf
from bild_lab.engine.models.hf.admission import (
    BRANCHING,
    KEPT,
    ROLLED_BACK,
    ROW_BY_ROW,
    TOGETHER,
    Outcome,
    check,
    uncached_logits,
)
from bild_lab.engine.models.hf.layer_control import decoder_layers
from bild_lab.engine.models.hf.model import open_session
from bild_lab.engine.models.hf.module_layers import ModuleLayers, cache_name
from bild_lab.engine.models.hf.slot_cache import SNAPSHOTS, SlotCache, Snapshots
from bild_lab.engine.models.placed_rows import PlacedRows
from bild_lab.engine.request import Source
from bild_lab.engine.session import DraftShape, OutputSpec, Rows, Scores
from bild_lab.errors import UserError
from bild_lab.lab.config.compose import compose_policy
from bild_lab.lab.point.load import load
from tests.models_tried import try_architecture
from tests.policies import shipped
from tests.stubs import uncached
from tests.tiny_architectures import ALL, BART, VOCABULARY, build, word_tokenizer

BY_LAYERS = {  # policies that run some of the layers, and emit the target's own text
    "early_exit_speculative": {"exit_layer": 3},
    "layer_skip": {"skipped_layers": [3]},
    "calm": {"measure": "softmax", "threshold": 1.0, "temperature": 0},
}
FEEDS = {
    "gemma3_text": DraftShape.TREES,  # two kinds of windows, each with its rotation
    "llama4_text": DraftShape.TREES,  # chunks
    "gpt2": DraftShape.TREES,  # learned positions
    "t5": DraftShape.TREES,
    "qwen2_5_vl": DraftShape.TREES,  # reads images too
    "bart": DraftShape.CHAINS,
    "bloom": DraftShape.CHAINS,  # attention biased by the distance in the cache
    "mamba": DraftShape.CHAINS,
    "mamba2": DraftShape.CHAINS,
    "lfm2": DraftShape.CHAINS,
    "qwen3_next": DraftShape.CHAINS,
    "bamba": DraftShape.CHAINS,  # counts positions from 0 in every forward
    "fsmt": DraftShape.ROWS,
}
REFUSED = {
    ("bloom", DraftShape.TREES): (BRANCHING, "they are off by"),
    ("bart", DraftShape.TREES): (
        BRANCHING,
        "tree drafts need a T5, mT5 or decoder-only target, got bart",
    ),
    ("mamba2", DraftShape.TREES): (
        BRANCHING,
        "its drafts cannot branch; use a policy that drafts chains",
    ),
    ("fsmt", DraftShape.CHAINS): (
        TOGETHER,
        "they are off by",
    ),  # drafted rows see those behind them
    ("switch_transformers/capacity", DraftShape.CHAINS): (TOGETHER, "they are off by"),
    # its state is in the module, for all sessions
    ("recurrent_gemma", DraftShape.ROWS): (ROW_BY_ROW, "they are off by"),
    ("openai-gpt", DraftShape.ROWS): (ROW_BY_ROW, "takes no cache"),
    ("minimax", DraftShape.ROWS): (
        ROW_BY_ROW,
        "it raises ValueError: MiniMax uses cache of its own",
    ),
}


def checked(module: PreTrainedModel, draft_shape: DraftShape) -> Outcome:
    return check(
        module,
        draft_shape,
        lambda source, one_by_one: open_session(module, source, one_by_one=one_by_one),
    )


@pytest.mark.fast("gemma3_text", "bart", "mamba", "lfm2", "bamba")
@pytest.mark.parametrize("name", FEEDS)
def test_a_module_that_scores_alike_however_it_is_fed_is_admitted(name: str) -> None:
    outcome = checked(build(name), FEEDS[name])
    assert (outcome.failed, outcome.problem) == (None, None)
    assert outcome.one_by_one == (name == "mamba")  # which begins several rows from an empty state


@pytest.mark.fast("bloom-2", "bart-2", "recurrent_gemma-0", "minimax-0")
@pytest.mark.parametrize(("name", "draft_shape"), REFUSED)
def test_a_module_that_does_not_is_refused_with_the_check_that_failed(
    name: str, draft_shape: DraftShape
) -> None:
    outcome = checked(build(name), draft_shape)
    assert outcome.failed == REFUSED[name, draft_shape][0]
    assert REFUSED[name, draft_shape][1] in outcome.problem


def without_visibility(
    rows: PlacedRows, own: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    return lambda b, h, row, key: own(
        b, h, rows.positions[row - rows.slots.start], rows.key_positions[key]
    )


def without_positions(
    rows: PlacedRows, own: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    return lambda b, h, row, key: own(b, h, row, key) & rows.visible[row - rows.slots.start, key]


STORED = ModuleLayers.stored.fget
FAULTS = {
    "a cache that keeps nothing": (
        "llama",
        (SlotCache, "get_seq_length", lambda *_: 0),
        ROW_BY_ROW,
    ),
    "rows that are lost": ("llama", (ModuleLayers, "stored", property(lambda _: {3})), ROW_BY_ROW),
    "rows that are lost later": (
        "llama",
        (ModuleLayers, "stored", property(lambda self: {min(8, *STORED(self))})),
        KEPT,
    ),
    "a rollback that drops nothing": (
        "llama",
        (CachedSession, "rollback", lambda *_: None),
        ROLLED_BACK,
    ),
    "a choice of rows that keeps all": ("llama", (CachedSession, "keep", lambda *_: None), KEPT),
    "rows that see other branches": (
        "llama",
        (layer_control, "along_branches", without_visibility),
        BRANCHING,
    ),
    "windows counted in cache slots": (
        "mistral/window",
        (layer_control, "along_branches", without_positions),
        BRANCHING,
    ),
    "a path that is not moved": ("llama", (ModuleLayers, "gather", lambda *_: None), BRANCHING),
    "a state that is not saved": ("mamba2", (Snapshots, "go_back", lambda *_: None), ROLLED_BACK),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_check_catches_a_fault_of_its_kind(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, (owner, part, planted), failing = FAULTS[fault]
    monkeypatch.setattr(owner, part, planted)
    assert checked(build(name), DraftShape.TREES).failed == failing


def test_the_prompt_of_the_check_reaches_beyond_the_window_if_that_is_affordable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = build("mistral/window")  # its window has 8 rows
    assert admission.prompt_length(module) == 10
    assert admission.prompt_length(build("llama/yarn")) == 26  # its original context has 24
    monkeypatch.setattr(admission, "AFFORDABLE_ELSEWHERE", 1.0)
    assert admission.prompt_length(module) == 4


def test_the_checks_tree_begins_where_a_chunk_ends() -> None:
    module = build("llama4_text")
    first_row = admission.prompt_length(module) + admission.FED
    assert (first_row + 1) % module.config.attention_chunk_size == 0


def test_the_checks_text_has_no_token_with_a_meaning_of_its_own() -> None:
    config = build("llama").config
    config.eos_token_id, config.pad_token_id = [3, 4], 5
    tokens = admission.plain_tokens(config, 200)
    assert len(tokens) == 200 and {3, 4, 5}.isdisjoint(tokens)


def test_an_encoder_may_have_a_smaller_vocabulary_than_its_decoder() -> None:
    values = {**BART, "vocab_size": 12, "decoder_vocab_size": VOCABULARY}
    apart = {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}
    module = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("marian", **values, **apart))
    assert checked(module.eval(), DraftShape.CHAINS) == Outcome()


def test_logits_that_are_no_numbers_are_no_verdict() -> None:
    module = build("llama")
    module.lm_head.weight.data[5] = torch.nan
    assert checked(module, DraftShape.ROWS) is None


def test_a_session_whose_logits_are_no_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module, extend = build("llama"), CachedSession.extend

    def with_a_nan(self: CachedSession, *arguments: object, **options: object) -> Scores:
        scores = extend(self, *arguments, **options)
        scores.logits[..., 5] = torch.nan
        return scores

    monkeypatch.setattr(CachedSession, "extend", with_a_nan)
    assert checked(module, DraftShape.ROWS).failed == ROW_BY_ROW


@pytest.mark.parametrize(
    ("off", "rows", "in_single", "in_half"),
    [
        (0.0, 9, True, True),
        (0.01, 9, False, True),
        (1.0, 9, False, False),
        (1.0, 1, False, True),  # of three: a rounding may send it to other experts
    ],
)
def test_scores_may_be_off_by_what_their_precision_rounds(
    off: float, rows: int, in_single: bool, in_half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    extend = CachedSession.extend

    def disturbed(self: CachedSession, *arguments: object, **options: object) -> Scores:
        scores = extend(self, *arguments, **options)
        logits = scores.logits.clone()
        if rows > 1 or len(logits) == 3:
            chosen = logits if rows > 1 else logits[1:2]
            noise = torch.randn(chosen.shape, generator=torch.Generator().manual_seed(0))
            chosen += off * logits.std() * noise.to(logits)
        return replace(scores, logits=logits)

    monkeypatch.setattr(CachedSession, "extend", disturbed)
    for dtype, admitted in ((torch.float32, in_single), (torch.bfloat16, in_half)):
        outcome = checked(build("llama").to(dtype), DraftShape.CHAINS)
        assert (outcome.failed is None) is admitted, dtype
        assert admitted or outcome.problem.startswith("they are off by ")


def test_tokens_that_a_module_never_gives_do_not_count_and_the_others_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = build("llama")
    module.lm_head.register_forward_hook(
        lambda *given: given[2].index_fill(-1, torch.tensor([5, 7]), float("-inf"))
    )
    assert checked(module, DraftShape.TREES) == Outcome()
    extend, noise = CachedSession.extend, torch.arange(module.config.vocab_size)
    monkeypatch.setattr(
        CachedSession,
        "extend",
        lambda *given: replace(scores := extend(*given), logits=scores.logits + noise),
    )
    assert checked(module, DraftShape.ROWS).failed == ROW_BY_ROW


@pytest.mark.parametrize("name", ["llama", "t5"])
@torch.inference_mode()
def test_the_last_scores_of_a_text_are_those_of_its_last_tokens(name: str) -> None:
    module = build(name)
    source_ids = torch.tensor([[5, 9, 12]]) if module.config.is_encoder_decoder else None
    text = Source((3, 9, 12, 7), source_ids)
    every = uncached_logits(module, text)
    torch.testing.assert_close(uncached_logits(module, text, 2), every[-2:])


def test_a_refusal_comes_before_any_text_and_names_what_would_be_exact() -> None:
    pair = (build("fsmt"), word_tokenizer())
    decoder = load(pair, policy=shipped("prompt_lookup"))
    with pytest.raises(
        UserError,
        match=r"FSMT.* \(fsmt\) must give the model's own logits, but several rows at once",
    ) as told:
        decoder.load_weights()
    assert "are off by 0." in str(told.value)
    assert "use policy=vanilla or policy=hf_generate" in str(told.value)
    assert load(pair, policy=shipped("vanilla")).generate([5, 9, 12], 4).token_ids
    # opens no session
    peer = load((build("openai-gpt"), word_tokenizer()), policy=shipped("hf_generate"))
    assert len(peer.generate([5, 9, 12], 4).token_ids) > 0


@pytest.mark.parametrize("name", ["mamba2", "jamba"])
def test_a_state_that_cannot_be_cut_goes_back_any_way(name: str) -> None:
    module = build(name)
    source = Source((5, 9, 12, 30))
    session, whole = (
        open_session(module, source, one_by_one=name == "jamba"),
        uncached(module, source),
    )
    text = [5, 9, 12, 30]
    session.extend([30])
    for token in range(3, 3 + SNAPSHOTS + 4):  # more forwards than states are kept
        session.extend([token])
    session.rollback(5)
    rows = [3, 21, 22]
    scores = session.extend(rows[1:]).logits
    expected = torch.stack([whole([*text, *rows[:2]]), whole([*text, *rows])])
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_layers_with_a_state_give_what_is_asked_for_of_the_new_rows(one_by_one: bool) -> None:
    module = build("mamba2")
    session = open_session(module, Source((5, 9, 12, 30)), one_by_one=one_by_one)
    session.extend([30])
    session.extend([7, 8, 20])
    session.rollback(5)
    scores = session.extend([21, 22], OutputSpec(logits=1, head_input=True, hidden=(1, 2, 4)))
    with torch.inference_mode():
        whole = module(torch.tensor([[5, 9, 12, 30, 7, 21, 22]]), output_hidden_states=True)
        normed = module.backbone.norm_f(scores.hidden[2])  # of the last layer
    found = torch.stack([normed, *scores.hidden[:2]])
    expected = [whole.hidden_states[index][0, -2:] for index in (4, 0, 1)]  # without embeddings
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scores.logits, whole.logits[0, -1:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scores.head_input, expected[0][-1:], atol=1e-4, rtol=1e-4)


def test_layers_with_a_state_run_all_together() -> None:
    session = open_session(build("mamba2"), Source((5, 9, 12)))
    session.extend([12])
    tree = Rows([7, 8, 9], Tree(torch.tensor([-1, 0, 0])))
    with pytest.raises(UserError, match="holds all rows that ran, so its drafts cannot branch"):
        session.extend(tree)
    states = session.extend([7], OutputSpec(hidden=(1,))).hidden[0]
    for rows, wanted in ((Rows([8]), OutputSpec(layers=(1,))), (Rows([8], states=states), None)):
        with pytest.raises(UserError, match="so they all run together"):
            session.extend(rows, wanted or OutputSpec())
    with pytest.raises(
        UserError, match="a mamba2 has layers whose state holds all rows that ran, so they all run"
    ):
        load((build("mamba2"), word_tokenizer()), policy="early_exit_speculative", exit_layer=2)


def test_layers_that_raise_one_by_one_are_refused() -> None:
    for name in ("umt5", "longt5", "gemma3n_text"):
        decoder = load(
            (build(name), word_tokenizer()), policy="early_exit_speculative", exit_layer=1
        )
        with pytest.raises(
            UserError, match=rf"\({name}\) do not give the same one by one as all together"
        ):
            decoder.load_weights()


@pytest.mark.fast("early_exit_speculative", "calm")
@pytest.mark.parametrize("policy", BY_LAYERS)
def test_a_decoder_may_be_less_deep_than_its_architecture_is_elsewhere(policy: str) -> None:
    """A Bart has 12 layers where its configuration names none."""
    config = AutoConfig.for_model("bart", **{**BART, "decoder_layers": 4})
    assert decoder_depth(config) == 4
    pair = (AutoModelForSeq2SeqLM.from_config(config).eval(), word_tokenizer())
    vanilla, by_layers = (
        load(pair, policy=composed)
        for composed in (shipped("vanilla"), compose_policy(policy, BY_LAYERS[policy]))
    )
    text = vanilla.generate([5, 9, 12], 8).token_ids
    assert by_layers.generate([5, 9, 12], 8).token_ids == text


@pytest.mark.fast("falcon/rotary", "led")
@pytest.mark.parametrize("name", ["falcon/rotary", "led", "bloom", "gptj", "gpt_neo", "mpt"])
def test_layers_that_answer_with_tuples_are_left_out(name: str) -> None:
    module, alone = build(name), build(name)
    del decoder_layers(alone)[1:]
    tokens, source = hf.probe_tokens(module)
    open_session(module, source).extend(tokens)  # by all layers
    rows = Rows(tokens, position=0)
    logits = open_session(module, source).extend(rows, OutputSpec(layers=(0,))).logits
    expected = admission.uncached_logits(alone, replace(source, prompt=tuple(tokens)))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_a_model_that_reads_images_decodes_text_from_its_files(tmp_path: Path) -> None:
    build("qwen2_5_vl").save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    texts = [
        load(tmp_path, policy=shipped(policy)).generate("w5 w9 w12", 8).token_ids
        for policy in ("hf_generate", "vanilla")
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_every_architecture_is_exact_or_refused(name: str) -> None:
    tried = try_architecture(name)
    assert tried.faults == {}


@pytest.mark.slow
def test_a_text_that_is_not_the_targets_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf.HuggingFaceModel, "admit", lambda *_: None)  # what the checks prevent
    assert try_architecture("fsmt").faults["speculative"].startswith("WRONG")


def test_rows_that_run_again_are_counted() -> None:
    module = build("mamba2")
    session = open_session(module, Source((5, 9, 12)))
    session.extend([12])
    session.extend([7, 8, 20, 21])
    session.keep([0, 1])
    session.extend([22, 23])  # after the two rows that were kept
    assert [(each.cached, each.rows) for each in session.forwards] == [(0, 3), (3, 4), (3, 4)]
    session = open_session(module, Source((5, 9, 12)), one_by_one=True)
    session.extend([12])
    session.extend([7, 8])
    assert [(each.cached, each.rows) for each in session.forwards] == [(0, 3), (3, 1), (4, 1)]


def test_a_cache_is_handed_over_by_the_name_of_each_transformers() -> None:
    def module_with(forward: Callable[..., None]) -> SimpleNamespace:
        return SimpleNamespace(forward=forward, config=SimpleNamespace(model_type="own"))

    assert cache_name(module_with(lambda input_ids, cache: None)) == "cache"  # from 5.24 on
    assert cache_name(module_with(lambda past_key_values: None)) == "past_key_values"
    assert cache_name(module_with(lambda cache_params: None)) == "cache_params"
    with pytest.raises(UserError, match="takes no cache"):
        cache_name(module_with(lambda input_ids: None))
