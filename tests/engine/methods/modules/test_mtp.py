"""Layers of multi-token prediction: their drafts beside Transformers' own, and in the loop beside a
target.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    MellumConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
)
from transformers.cache_utils import MtpCache

import bild_lab
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.methods import mtp
from bild_lab.engine.methods.mtp import MtpDrafter, MtpHeads, layer_names, load_mtp
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.checkpoint.weights import StoredWeights
from bild_lab.engine.models.hf.slot_cache import SlotCache
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from tests.engine.loops import NEVER, autoregressive, finished
from tests.engine.methods.drafters.naive import texts_before
from tests.engine.methods.modules.tiny import write_mtp
from tests.policies import in_memory, load
from tests.stubs import uncached
from tests.tiny import DECODER_SIZES, START, tiny_llama, tiny_tokenizer

LENGTH = 14
EXPERTS = {
    **DECODER_SIZES,
    "num_hidden_layers": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "glm": Glm4MoeConfig(**EXPERTS, head_dim=8),
    "deepseek": DeepseekV3Config(
        **{**EXPERTS, "num_key_value_heads": 4},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "qwen3.5": Qwen3_5TextConfig(
        **DECODER_SIZES,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
}
WITH_EXPERTS = ("glm", "deepseek")
CASES = [("llama", 1), ("llama", 3), ("glm", 1), ("deepseek", 2), ("qwen3.5", None)]


def random_model(kind: str, seed: int = 0) -> PreTrainedModel:
    if kind == "llama":
        return tiny_llama(seed).double()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]).float().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.5)
    # experts multiply by groups, which PyTorch does not in double precision
    return model.requires_grad_(False).to(torch.float32 if kind in WITH_EXPERTS else torch.float64)


def states_of(module: PreTrainedModel, text: list[int]) -> Tensor:
    """The states after the final norm of each token but the last."""
    return module.model(torch.tensor([text[:-1]])).last_hidden_state


def transformers_draft(heads: MtpHeads, states: Tensor, text: list[int]) -> list[int]:
    """One token by each layer, by Transformers' own forward over the whole text."""
    positions = torch.arange(1, len(text))[None]
    cache = MtpCache(config=heads.config)
    drafted, _, _ = heads.model(
        torch.tensor([text[1:]]), states, None, positions, cache, full_input_ids=None
    )
    return drafted[0].tolist()


def expected_draft(heads: MtpHeads, states: Tensor, text: list[int], count: int) -> list[int]:
    """One token by each layer, and then by the last one, which reads its own outputs; without
    anything cached.
    """
    text, drafted, outputs = list(text), [], states
    for step in range(count):
        repeats = step >= heads.depth
        states = torch.cat([states, outputs[:, -1:]], 1) if repeats else outputs
        rows = states.shape[1]
        outputs = heads.model.forward_layer(
            min(step, heads.depth - 1),
            states,
            torch.arange(len(text) - rows, len(text))[None],
            MtpCache(config=heads.config),
            input_ids=torch.tensor([text[-rows:]]),
        )
        drafted.append(int(heads.model.shared_head(outputs[0, -1]).argmax()))
        text.append(drafted[-1])
    return drafted


@torch.inference_mode()
@pytest.mark.parametrize(("kind", "layers"), CASES)
def test_drafts_are_those_of_transformers_and_the_text_is_the_targets_own(
    kind: str, layers: int | None, tmp_path: Path
) -> None:
    module = random_model(kind, seed=4)
    module.config.attention_dropout = 0.9  # of trainings
    # from a prompt of one token on, so that later layers have nothing to read at first
    prompt = (START, 5, 9, 12) if kind != "llama" else (START,)
    target, source = in_memory(module), Source(prompt, None)
    heads = load_mtp(target, write_mtp(module.config, tmp_path / "mtp", layers))
    heads.model.embed_tokens = module.get_input_embeddings()
    heads.model.shared_head = module.get_output_embeddings()
    for window in sorted({1, heads.depth, heads.depth + 2}):
        trace, request = Trace(), Request(source, Limits(len(source.prompt), LENGTH, NEVER))
        drafter = MtpDrafter(target, heads, window)
        actual = DraftThenVerify(target, drafter, ExactMatch()).decode(request, trace)
        assert actual == autoregressive(
            uncached(module, source), source.prompt, finished(source, LENGTH, NEVER)
        )
        assert trace.rounds[0].drafted == ()
        for text, drafted in texts_before(trace.rounds, actual, len(source.prompt)):
            states, room = states_of(module, text), len(source.prompt) + LENGTH - len(text)
            expected = expected_draft(heads, states, text, window)
            if window == heads.depth:
                assert expected == transformers_draft(heads, states, text)
            assert list(drafted.drafted) == expected[:room]
            assert drafted.draft_calls == len(drafted.drafted)
        steps = [one for one in trace.forwards if one.config is heads.config]
        assert {(one.layers, one.scored) for one in steps} == {(1, 1)}
        if window == 1:  # each row runs once
            ends = [one.cached + one.rows for one in steps]
            assert [one.cached for one in steps] == [0, *ends[:-1]]


@pytest.mark.parametrize("layer", [0, 2])
def test_a_rows_position_is_that_of_the_token_that_it_reads(
    layer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotations are relative, so that no draft shows it but of a model that scales them by length."""
    module = tiny_llama(4)
    heads = load_mtp(in_memory(module), write_mtp(module.config, tmp_path / "mtp", 3))
    asked: list[Tensor] = []

    def noting(*given: object, **_: object) -> Tensor:
        asked.append(given[2])
        return given[1]

    monkeypatch.setattr(heads.model, "forward_layer", noting)
    states = torch.zeros(2, module.config.hidden_size)
    heads.run(layer, torch.tensor([5, 9]), states, SlotCache(heads.config), start=3)
    # rows 3 and 4 read the tokens that are layer + 1 places behind theirs
    assert asked[0].tolist() == [[4 + layer, 5 + layer]]


@pytest.mark.parametrize(
    ("names", "layers"),
    [
        (["model.layers.1.a", "model.layers.2.a", "model.layers.3.b", "lm_head.weight"], 2),
        (["model.language_model.layers.2.a", "language_model.layers.3.a"], 2),
        (["layers.2.a"], 1),
        (["mtp.layers.0.a", "mtp.layers.1.a", "mtp.fc.weight"], 2),
        (["mtp.fc.weight"], 1),
        (["model.layers.0.a", "visual.mtp.layers.0.a", "model.vision.layers.7.a"], 0),
    ],
)
def test_layers_are_found_by_the_names_that_checkpoints_give_them(
    names: list[str], layers: int
) -> None:
    stored = StoredWeights({name: [1] for name in names}, lambda *_: torch.ones(1))
    found, depth = layer_names(stored, target_depth=2)
    others = {"model.layers.1.a", "lm_head.weight"}
    assert depth == layers
    assert found == [name for name in names if layers and name not in others]


def test_no_id_without_a_token_is_drafted(tmp_path: Path) -> None:
    module = tiny_llama(4)
    folder = write_mtp(module.config, tmp_path / "mtp")
    state = torch.randn(module.config.hidden_size, generator=torch.Generator().manual_seed(0))
    likely = load_mtp(in_memory(module), folder).most_likely(state)
    padded = in_memory(module)
    vars(padded.checkpoint)["ids_without_token"] = (int(likely),)
    assert load_mtp(padded, folder).most_likely(state) != likely


def test_a_layer_keeps_the_kind_that_its_configuration_names(tmp_path: Path) -> None:
    config = MellumConfig(
        **DECODER_SIZES,
        num_hidden_layers=2,
        layer_types=["full_attention", "sliding_attention"],
        mlp_layer_types=["sparse", "sparse"],
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        sliding_window=8,
        num_mtp_layers=1,
    )
    torch.manual_seed(0)
    target = in_memory(AutoModelForCausalLM.from_config(config).float().eval())
    heads = load_mtp(target, write_mtp(config, tmp_path / "mtp"))
    assert heads.config.layer_types == ["sliding_attention"]


def with_layers(checkpoints: Path, folder: Path) -> Path:
    """A tiny Llama whose file brings a layer along."""
    llama = checkpoints / "llama"
    config = AutoConfig.from_pretrained(llama)
    tensors = load_file(write_mtp(config, folder) / "model.safetensors")
    save_file(
        {**load_file(llama / "model.safetensors"), **tensors},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    tiny_tokenizer(False).save_pretrained(folder)
    return folder


def test_the_targets_own_layers_and_those_of_another_checkpoint_draft_alike(
    checkpoints: Path, tmp_path: Path
) -> None:
    folder = with_layers(checkpoints, tmp_path / "own")
    own = bild_lab.load(str(folder), policy="mtp", window=3)
    named = load(checkpoints, "llama", "mtp", heads=str(folder), window=3)
    rounds = [decoder.generate("w5 w9 w12", 12).trace.rounds for decoder in (own, named)]
    assert rounds[0] == rounds[1]
    assert {len(one.drafted) for one in rounds[0][1:-2]} == {3}
    vanilla = load(checkpoints, "llama", "vanilla").generate("w5 w9 w12", 12)
    assert own.generate("w5 w9 w12", 12).token_ids == vanilla.token_ids


def test_the_targets_weights_are_read_for_the_first_text_not_for_the_check(
    checkpoints: Path, tmp_path: Path
) -> None:
    decoder = bild_lab.load(str(with_layers(checkpoints, tmp_path / "own")), policy="mtp")
    assert "decoder" not in vars(decoder.target)
    decoder.generate("w5 w9", 2)
    assert "decoder" in vars(decoder.target)


def test_what_a_round_reads_of_the_target_is_made_before_a_text(tmp_path: Path) -> None:
    """Rounded weights are blocks, of which a table is made, for which no clock runs."""
    module = tiny_llama(4)
    target = in_memory(module)
    heads = load_mtp(target, write_mtp(module.config, tmp_path / "mtp"))
    assert "vocabulary" not in vars(heads)
    MtpDrafter(target, heads).prepare(Request(Source((START,)), Limits(1, 4)))
    assert "vocabulary" in vars(heads)


def test_copies_of_the_targets_table_and_head_are_left_out_without_a_word(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module = tiny_llama(4)
    folder, depth = write_mtp(module.config, tmp_path / "mtp", 1), module.config.num_hidden_layers
    tensors = load_file(folder / "model.safetensors")
    table = torch.ones(module.config.vocab_size, module.config.hidden_size)
    for name in ("embed_tokens", "shared_head.head"):
        tensors[f"model.layers.{depth}.{name}.weight"] = table.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    heads = load_mtp(in_memory(module), folder)
    assert heads.depth == 1 and torch.equal(heads.vocabulary[1], module.lm_head.weight)
    assert capfd.readouterr().err == ""


def test_layers_on_the_hub_are_read_at_the_commit_of_their_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tiny_llama(4)
    target, folder = in_memory(module), write_mtp(module.config, tmp_path / "mtp")
    assert not target.checkpoint.in_folder
    stored = Checkpoint(str(folder)).weight_files
    monkeypatch.setattr(Checkpoint, "weight_files", property(lambda _: stored))
    vars(target.checkpoint)["weightless"] = lambda: module
    read: list[str] = []
    monkeypatch.setattr(
        "transformers.modeling_layers.MtpModel.from_pretrained",
        lambda outline: read.append(outline.config.name_or_path) or torch.nn.Linear(2, 2),
    )
    monkeypatch.setattr(Checkpoint, "files", property(lambda _: tmp_path / "snapshots" / "commit"))
    with pytest.raises(UserError, match="hold .* numbers"):
        load_mtp(target)
    assert read == [str(tmp_path / "snapshots" / "commit")]


def test_each_layer_has_a_kind_where_a_configuration_names_none() -> None:
    config = copy.deepcopy(CONFIGS["qwen3.5"])
    config.mlp_layer_types = ["dense", "dense"]
    mtp._describe_layers(config, 3)
    described = config.get_mtp_config()
    assert described.layer_types == ["full_attention"] * 3
    assert described.mlp_layer_types == ["sparse"] * 3  # experts, whatever the first layers have


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_layers_of_another_checkpoint_with_its_own_code_are_read_where_it_is_trusted(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.syspath_prepend(tmp_path / "modules")
    folder = with_layers(checkpoints, tmp_path / "own")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own"}))
    (folder / "own.py").write_text(OWN_CODE)
    knobs = {"policy": "mtp", "heads": str(folder)}
    decoder = bild_lab.load(str(folder), trust_remote_code=True, **knobs)
    assert {len(one.drafted) for one in decoder.generate("w5 w9", 8).trace.rounds[1:-1]} == {1}
    with pytest.raises(UserError, match="trust_remote_code=true"):
        bild_lab.load(str(folder), **knobs)


@torch.inference_mode()
def test_a_layer_that_passes_the_token_on_drafts_what_the_target_says(tmp_path: Path) -> None:
    """Where neither model nor layer mixes tokens, what comes next depends on the last one alone."""
    module = tiny_llama(1)
    for layer in module.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    folder, dim = write_mtp(module.config, tmp_path / "mtp"), module.config.hidden_size
    tensors = load_file(folder / "model.safetensors")
    for name, value in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value.zero_()
        elif value.ndim == 1:
            value.fill_(1)
    tensors["mtp.norm.weight"].copy_(module.model.norm.weight)
    tensors["mtp.fc.weight"].copy_(torch.cat([torch.eye(dim), torch.zeros(dim, dim)], 1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    target, source, trace = in_memory(module), Source((START, 5, 9)), Trace()
    drafter = MtpDrafter(target, load_mtp(target, folder), window=3)
    request = Request(source, Limits(len(source.prompt), 17, NEVER))
    DraftThenVerify(target, drafter, ExactMatch()).decode(request, trace)
    assert [one.accepted for one in trace.rounds] == [0, 3, 3, 3, 3]


@pytest.mark.parametrize("error", [AttributeError, KeyError, TypeError, ValueError, RuntimeError])
def test_what_transformers_cannot_build_is_refused_in_a_sentence(
    error: type[Exception], checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*_: object) -> None:
        raise error("no such layer")

    monkeypatch.setattr("transformers.modeling_layers.MtpModel.from_pretrained", refusing)
    folder = with_layers(checkpoints, tmp_path / "own")
    with pytest.raises(UserError, match=r"own \(llama\): .*no such layer.*; choose a target"):
        bild_lab.load(str(folder), policy="mtp")


def test_what_is_not_there_or_does_not_fit_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    folder = with_layers(checkpoints, tmp_path / "own")
    tensors = load_file(folder / "model.safetensors")
    layers = {name: value for name, value in tensors.items() if name.startswith("mtp.")}

    def refused(message: str, changed: dict[str, Tensor], **knobs: object) -> None:
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match=message):
            load(checkpoints, "llama", "mtp", **{"heads": str(folder), **knobs})

    refused("policy.window must be .*1, got 0", layers, window=0)
    refused(
        "own has no layers of multi-token prediction; choose a target",
        {"lm_head.weight": tensors["lm_head.weight"]},
    )
    with pytest.raises(UserError, match="llama has no layers of multi-token prediction"):
        load(checkpoints, "llama", "mtp", heads=None)
    without = {name: value for name, value in layers.items() if name != "mtp.fc.weight"}
    refused("transformers cannot read .* missing.*eh_proj", without)
    more = {**layers, "mtp.layers.0.mlp.extra.weight": torch.ones(3)}
    refused("hold .* numbers, and those that transformers builds", more)
    wider = {**layers, "mtp.fc.weight": torch.ones(32, 96)}
    refused("transformers cannot read", wider)
    config = json.loads((folder / "config.json").read_text())
    others = {"hidden_size": 64, "num_hidden_layers": 9, "vocab_size": 7, "model_type": "mistral"}
    for name, value in others.items():
        (folder / "config.json").write_text(json.dumps({**config, name: value}))
        refused(f"whose {name} is {value}, but that of .* is {config[name]}", layers)
    with pytest.raises(UserError, match="needs a decoder-only target"):
        load(checkpoints, "t5", "mtp")
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="own has no safetensors files, from which layers"):
        load(checkpoints, "llama", "mtp", heads=str(folder))
    scaled = AutoConfig.from_pretrained(checkpoints / "gemma3")
    heads = write_mtp(scaled, tmp_path / "scaled")
    with pytest.raises(UserError, match="are no plain table"):
        load(checkpoints, "gemma3", "mtp", heads=str(heads))
