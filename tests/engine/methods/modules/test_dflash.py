"""DFlash in speculators' layout: its blocks beside that package's own forward, and in the loop beside
a target.

The package is installed as test_speculators.py says.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.methods.dflash import DFlash, DFlashDrafter, read_dflash
from bild_lab.engine.methods.eagle.module import read_eagle
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.models.native.attention import KeyValueCache
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from tests.engine.loops import NEVER, autoregressive, finished
from tests.engine.methods.drafters.naive import norm, texts_before, turned
from tests.engine.methods.modules.tiny import random_dflash, save_package_model, write_dflash
from tests.policies import in_memory, load
from tests.stubs import uncached
from tests.tiny import START, tiny_llama

WIDTH, VOCABULARY, KNOWN, BLOCK, LENGTH = 24, 40, 20, 4, 12
SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of a layer, of the drafter
    "full": ({}, {}),
    "bias": ({"attention_bias": True}, {}),
    "whole vocabulary": ({}, {"draft_vocab_size": VOCABULARY}),
    "sliding": (SLIDING, {}),
    "sliding both ways": (SLIDING, {"sliding_window_non_causal": True}),
}


def block_states(dflash: DFlash, states: Tensor, block: Tensor) -> Tensor:
    """The last states of a block after these states of the target, without anything cached."""
    layers = dflash.config.layers
    room = states.shape[0] + block.shape[0]
    shape = (layers.num_hidden_layers, layers.num_key_value_heads, room, layers.head_dim)
    cache = KeyValueCache(shape, states.dtype, states.device)
    return dflash(dflash.context(states), block, cache, 0)


def naive_block(dflash: DFlash, states: Tensor, block: Tensor) -> Tensor:
    """The same as the paper has it: row by row, head by head."""
    config, layers = dflash.config, dflash.config.layers
    heads, kept = layers.num_attention_heads, layers.num_key_value_heads
    context, start = norm(dflash.fc(states), dflash.hidden_norm), len(states)
    x = dflash._target[0][block]
    for layer, window in zip(dflash.layers, config.windows, strict=True):
        rows = torch.cat([context, norm(x, layer.input_layernorm)])
        queries = turned(norm(layer.q_proj(rows).unflatten(-1, (heads, -1)), layer.q_norm))
        keys = turned(norm(layer.k_proj(rows).unflatten(-1, (kept, -1)), layer.k_norm))
        values = layer.v_proj(rows).unflatten(-1, (kept, -1))
        mixed = []
        for place in range(start, len(rows)):
            seen = [
                other
                for other in range(len(rows))
                if window is None
                or (other >= start - window and (other <= place or not config.causal))
            ]
            for head in range(heads):
                own = head // (heads // kept)
                scores = keys[seen, own] @ queries[place, head] / layers.head_dim**0.5
                mixed.append(scores.softmax(0) @ values[seen, own])
        x = x + layer.o_proj(torch.stack(mixed).view(len(block), -1))
        fed = norm(x, layer.post_attention_layernorm)
        x = x + layer.down_proj(silu(layer.gate_proj(fed)) * layer.up_proj(fed))
    return x


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"windows": (3, 5), "causal": False},
        {"windows": (3, None), "bias": True},
    ],
)
@torch.no_grad()
def test_a_block_is_filled_as_it_is_defined(form: dict[str, Any]) -> None:
    module = tiny_llama(4, layers=3).double()
    dflash = random_dflash(module.config, **form).double()
    dflash.attach(module.model.embed_tokens.weight, module.lm_head.weight)
    states = torch.randn(7, 3 * 32, generator=torch.Generator().manual_seed(0)).double()
    block = torch.tensor([9, 39, 39, 39, 39])
    found, expected = block_states(dflash, states, block), naive_block(dflash, states, block)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    own = dflash.lm_head(norm(expected, dflash.norm)).argmax(-1)
    assert dflash.most_likely(found).tolist() == (2 * own).tolist()  # it knows every second token


@torch.no_grad()
def test_no_id_without_a_token_is_drafted_and_a_heads_bias_counts() -> None:
    module = tiny_llama(4, layers=3)
    dflash = random_dflash(module.config, known=None)
    states = torch.randn(20, 32, generator=torch.Generator().manual_seed(0))
    scores = norm(states, dflash.norm) @ module.lm_head.weight.mT
    without = torch.zeros(40).index_fill(0, scores.argmax(-1)[:3], -torch.inf)
    for bias, expected in ((None, scores), (without, scores + without)):
        dflash.attach(module.model.embed_tokens.weight, module.lm_head.weight, bias)
        assert dflash.most_likely(states).tolist() == expected.argmax(-1).tolist()
    module.lm_head = torch.nn.Linear(32, 40, bias=True)
    torch.nn.init.normal_(module.lm_head.bias)
    dflash.attach_to(in_memory(module, "hf"))
    expected = module.lm_head(norm(states, dflash.norm)).argmax(-1)
    assert dflash.most_likely(states).tolist() == expected.tolist()


def expected_draft(dflash: DFlash, states: Tensor, last_token: int) -> list[int]:
    config = dflash.config
    block = torch.tensor([last_token, *[config.mask_token] * (config.block - 1)])
    rows = block_states(dflash, states, block)[config.first_row :]
    return dflash.most_likely(rows).tolist()


@pytest.mark.parametrize("first_row", [0, 1])
@pytest.mark.parametrize("known", [20, None])
def test_proposals_are_those_of_a_block_without_a_cache_and_the_text_is_the_targets_own(
    known: int | None, first_row: int
) -> None:
    module = tiny_llama(4, layers=3).double()
    dflash = random_dflash(module.config, known, first_row=first_row)
    dflash = dflash.double().requires_grad_(False)
    target, source = in_memory(module, "native"), Source((START, 5, 9, 12))
    trace, request = Trace(), Request(source, Limits(len(source.prompt), LENGTH, NEVER))
    drafter = DFlashDrafter(target, dflash)
    actual = DraftThenVerify(target, drafter, ExactMatch()).decode(request, trace)
    assert actual == autoregressive(
        uncached(module, source), source.prompt, finished(source, LENGTH, NEVER)
    )
    assert trace.rounds[0].drafted == ()
    for text, drafted in texts_before(trace.rounds, actual, len(source.prompt)):
        with torch.no_grad():
            hidden = module(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        states = torch.cat([hidden[layer][0] for layer in dflash.config.target_layers], -1)
        room = len(source.prompt) + LENGTH - len(text)
        expected = expected_draft(dflash, states, text[-1])[:room]
        assert list(drafted.drafted) == expected and drafted.draft_calls == 1


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"known": None, "windows": (3, None), "bias": True},
        {"first_row": 0, "causal": False, "windows": (4, 4)},
    ],
)
def test_each_form_is_read_from_its_folder(form: dict[str, Any], tmp_path: Path) -> None:
    made = random_dflash(tiny_llama(0).config, **form)
    others = {"attention_bias": True} if made.config.bias else {}
    again = read_dflash(write_dflash(made, tmp_path / "dflash", layer=others))
    for name, value in made.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    for name in ("target_layers", "block", "mask_token", "draft_vocabulary"):
        assert getattr(again.config, name) == getattr(made.config, name)
    for name in ("first_row", "windows", "causal", "bias"):
        assert getattr(again.config, name) == getattr(made.config, name)


def test_a_copy_of_the_targets_head_is_not_read(tmp_path: Path) -> None:
    made = random_dflash(tiny_llama(0).config, known=None)
    folder = write_dflash(made, tmp_path / "dflash")
    copies = {"lm_head.weight": torch.zeros(40, 32), "d2t": torch.zeros(40, dtype=torch.long)}
    save_file({**load_file(folder / "model.safetensors"), **copies}, folder / "model.safetensors")
    assert set(read_dflash(folder).state_dict()) == set(made.state_dict())


def test_a_bias_that_the_configuration_denies_is_refused(tmp_path: Path) -> None:
    folder = write_dflash(random_dflash(tiny_llama(0).config, bias=True), tmp_path / "dflash")
    with pytest.raises(UserError, match="attention_bias=False"):
        read_dflash(folder)


def test_forwards_of_the_drafter_are_counted() -> None:
    module = tiny_llama(4, layers=3)
    dflash = random_dflash(module.config).requires_grad_(False)
    target, trace = in_memory(module, "native"), Trace()
    request = Request(Source((START, 5, 9)), Limits(3, 6, NEVER))
    DraftThenVerify(target, DFlashDrafter(target, dflash), ExactMatch()).decode(request, trace)
    ours = [one for one in trace.forwards if one.config is dflash.config.layers]
    # a block of five rows after the text but its last token; four masks predict
    lengths = [text - 1 for text in lengths_before(trace, 3)]
    assert [(one.rows, one.cached) for one in ours] == [(5, length) for length in lengths]
    assert [one.scored for one in ours] == [min(4, 9 - length - 1) for length in lengths]


def lengths_before(trace: Trace, prompt: int) -> list[int]:
    """The lengths of the text before every round but the first."""
    return [
        prompt + sum(one.accepted + 1 for one in trace.rounds[:place])
        for place in range(1, len(trace.rounds))
    ]


def test_the_cache_grows_where_a_block_has_no_room() -> None:
    module = tiny_llama(4, layers=3)
    dflash = random_dflash(module.config, block=80, windows=(None, None)).requires_grad_(False)
    target, source = in_memory(module, "native"), Source((START, 5, 9))
    request = Request(source, Limits(3, LENGTH, NEVER))
    drafter = DFlashDrafter(target, dflash)
    text = DraftThenVerify(target, drafter, ExactMatch()).decode(request, Trace())
    assert text == autoregressive(
        uncached(module, source), source.prompt, finished(source, LENGTH, NEVER)
    )


def test_a_folder_is_read_and_its_window_may_be_shorter(tmp_path: Path, checkpoints: Path) -> None:
    made = random_dflash(tiny_llama(0).config)
    folder = write_dflash(made, tmp_path / "dflash")
    before = torch.get_rng_state()
    again = read_dflash(folder)
    assert torch.equal(torch.get_rng_state(), before)
    for name, value in made.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    decoder = load(checkpoints, "llama", "dflash", heads=str(folder), window=2)
    rounds = decoder.generate("w5 w9 w12", 8).trace.rounds
    assert {len(one.drafted) for one in rounds[1:-1]} == {2}
    with pytest.raises(UserError, match="policy.window must be .*1, got 0"):
        load(checkpoints, "llama", "dflash", heads=str(folder), window=0)


REFUSED = [
    ({"speculators_model_type": "dflash2"}, "speculators_model_type dflash2, not dflash"),
    ({"mask_token_id": None}, "mask_token_id=None"),
    ({"mask_token_id": 40}, "mask_token_id=40"),
    ({"mask_token_id": True}, "mask_token_id=True"),
    ({"block_size": 1}, "block_size=1"),
    ({"block_size": "4"}, "block_size=4"),
    ({"block_size": None}, "block_size=None"),
    ({"draft_vocab_size": None}, "draft_vocab_size=None"),
    ({"draft_vocab_size": 40}, "draft_vocab_size=40"),  # its head has 20
    ({"sample_from_anchor": "false"}, "sample_from_anchor=false"),
    ({"projector_type": "domino"}, "projector_type=domino"),
    ({"projector_type": "dflash", "shift_label": True}, "shift_label=True"),
    ({"aux_hidden_state_scales": [1.0, 0.5, 0.5]}, r"aux_hidden_state_scales=\[1.0, 0.5, 0.5\]"),
    ({"sliding_window_non_causal": "false"}, "sliding_window_non_causal=false"),
    ({"base": "x"}, "base=x"),
    ({"aux_hidden_state_layer_ids": [-1, 0, 1]}, r"aux_hidden_state_layer_ids=\[-1, 0, 1\]"),
    ({"aux_hidden_state_layer_ids": ["0", 1, 1]}, r"aux_hidden_state_layer_ids=\['0', 1, 1\]"),
    ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids=None"),
    ({"aux_hidden_state_layer_ids": []}, r"aux_hidden_state_layer_ids=\[\]"),
    ({"target_hidden_size": 64}, "target_hidden_size=64"),
    ({"aux_hidden_state_layer_ids": [0, 1, 9]}, r"after the layers \[0, 1, 9\]"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_what_is_not_known_is_refused_by_its_field(
    values: dict, message: str, tmp_path: Path, checkpoints: Path
) -> None:
    folder = write_dflash(random_dflash(tiny_llama(0).config), tmp_path / "dflash", **values)
    with pytest.raises(UserError, match=message):
        load(checkpoints, "llama", "dflash", heads=str(folder))


@pytest.mark.parametrize(
    "layer",
    [
        {"hidden_act": "gelu"},
        {"layer_types": ["linear"] * 2},
        {"layer_types": ["full_attention"]},  # of two layers
        {"sliding_window": None},
        {"sliding_window": 0},
        {"sliding_window": "3"},
        {"attention_bias": True},
        {"num_hidden_layers": "2"},
        {"vocab_size": None},
        {"num_attention_heads": 0},
        {"head_dim": "6"},
        {"rms_norm_eps": "small"},
        {"rope_parameters": {"rope_type": "unheard"}},
    ],
)
def test_layers_that_are_not_known_are_refused(layer: dict, tmp_path: Path) -> None:
    folder = write_dflash(random_dflash(tiny_llama(0).config), tmp_path / "dflash")
    config = json.loads((folder / "config.json").read_text())
    config["transformer_layer_config"] |= layer
    (folder / "config.json").write_text(json.dumps(config))
    name = "rope_type" if "rope_parameters" in layer else next(iter(layer))
    with pytest.raises(UserError, match=name):
        read_dflash(folder)


@pytest.mark.parametrize("shift", [-100, 100])
def test_a_vocabulary_that_the_target_does_not_have_is_refused(shift: int, tmp_path: Path) -> None:
    dflash = random_dflash(tiny_llama(0).config)
    dflash.d2t += shift
    with pytest.raises(UserError, match="whose d2t gives tokens from"):
        read_dflash(write_dflash(dflash, tmp_path / "dflash"))


def test_vocabularies_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    dflash = random_dflash(tiny_llama(0).config)
    folder = write_dflash(dflash, tmp_path / "dflash")
    weights = load_file(folder / "model.safetensors")
    of_target = torch.zeros(dflash.config.vocabulary, dtype=torch.bool)
    of_target[dflash.d2t + torch.arange(len(dflash.d2t))] = True
    save_file(weights | {"t2d": of_target}, folder / "model.safetensors")
    read_dflash(folder)
    save_file(weights | {"t2d": of_target.roll(1)}, folder / "model.safetensors")
    with pytest.raises(UserError, match="whose d2t and t2d name different tokens"):
        read_dflash(folder)


@pytest.mark.parametrize(
    ("kind", "message"), [("dflash", "use policy=dflash"), ("mtp", "mtp is not known")]
)
def test_an_eagle_policy_refuses_other_drafters_by_their_type(
    kind: str, message: str, tmp_path: Path
) -> None:
    folder = write_dflash(
        random_dflash(tiny_llama(0).config), tmp_path / kind, speculators_model_type=kind
    )
    with pytest.raises(UserError, match=f"speculators_model_type.*{message}") as caught:
        read_eagle(folder, 3)
    assert "describes no" not in str(caught.value)  # a refusal is told once


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_those_of_the_packages_own_forward(kind: str, tmp_path: Path) -> None:
    package = package_model(pytest.importorskip("speculators.models.dflash"), *KINDS[kind])
    folder = tmp_path / "dflash"
    save_package_model(package, folder)
    dflash = read_dflash(folder).eval()
    dflash.attach(package.embed_tokens.weight, package.lm_head.weight)
    generator = torch.Generator().manual_seed(1)
    length = 11
    states = torch.randn(1, length, 3 * WIDTH, generator=generator)
    tokens = torch.randint(3, VOCABULARY, (1, length), generator=generator)
    anchors = length - BLOCK  # every place but the last ones begins a block
    with torch.no_grad():
        hidden, logits, *_ = package._backbone_forward(
            states,
            tokens,
            torch.ones(1, length),
            torch.zeros(1, length, WIDTH),
            torch.zeros(1, length, dtype=torch.long),
            max_anchors=anchors,
        )
        blocks = logits[0].unflatten(0, (anchors, BLOCK))
        for place in range(1, anchors):
            block = torch.tensor([int(tokens[0, place]), *[VOCABULARY - 1] * (BLOCK - 1)])
            rows = block_states(dflash, states[0, :place], block)
            chosen = blocks[place].argmax(-1)
            if package.d2t is not None:
                chosen = chosen + package.d2t[chosen]
            assert torch.equal(dflash.most_likely(rows), chosen)
            own = dflash._normed(rows, dflash.norm)
            shown = hidden[0].unflatten(0, (anchors, BLOCK))[place]
            torch.testing.assert_close(own, shown, atol=1e-5, rtol=1e-5)


def package_model(module: Any, layer: dict[str, Any], drafter: dict[str, Any]) -> torch.nn.Module:
    """A model of the package with random weights."""
    from transformers import Qwen3Config

    config = module.DFlashSpeculatorConfig(
        transformer_layer_config=Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=6,
            use_sliding_window="layer_types" in layer,
            attn_implementation="eager",
            **layer,
        ),
        block_size=BLOCK,
        aux_hidden_state_layer_ids=[1, 3, 5],
        mask_token_id=VOCABULARY - 1,
        **{"draft_vocab_size": KNOWN, **drafter},
    )
    torch.manual_seed(0)
    model = module.DFlashDraftModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.copy_((parameter.ndim == 1) + scale * torch.randn(parameter.shape))
        if model.d2t is not None:
            model.d2t.copy_(torch.arange(KNOWN))
    return model
