"""Bi-directional tuning: what mask rows see, that decoding sees the same, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import FalconConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from bild_lab.engine.methods.bita import BitaAdapter, BitaTarget
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.hf.model import HuggingFaceModel
from bild_lab.engine.models.native.model import NativeModel
from bild_lab.engine.request import Source
from bild_lab.errors import UserError
from bild_lab.training.modules.bita import BitaModule, BitaSpec, visible_rows
from bild_lab.training.modules.predictors import PredictionLoss
from tests import tiny_architectures
from tests.tiny import DECODER_SIZES, VOCABULARY, save, tiny_llama, untied

PROMPTS = ("deep", "shallow", "none")


def tiny_qwen(seed: int) -> PreTrainedModel:
    """A Qwen2 with grouped-query attention and biases."""
    torch.manual_seed(seed)
    config = Qwen2Config(**DECODER_SIZES, num_hidden_layers=3)
    return untied(Qwen2ForCausalLM(config), 3.0)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("bases")
    models = {"llama": tiny_llama(1), "qwen2": tiny_qwen(2)}
    return {name: Checkpoint(str(save(model, folder / name))) for name, model in models.items()}


def adapter_for(base: Checkpoint, prompt: str, rank: int = 0) -> BitaAdapter:
    """Of the size of the model's own embeddings, so that prompt and masks make a difference."""
    adapter = BitaAdapter.fresh(base.config, {}, prompt, 4, 3, 0, rank)
    with torch.no_grad():
        for weight in adapter.parameters():
            weight *= 25
        if rank:
            adapter.markov.after.normal_(generator=torch.Generator().manual_seed(0))
    return adapter


def rows_beside(base: Checkpoint, adapter: BitaAdapter) -> BitaModule:
    return BitaModule(base.weights(torch.float32).requires_grad_(False).eval(), adapter)


def texts(count: int, length: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.fast("llama-deep", "qwen2-none")
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_masks_predict_in_training_what_they_predict_in_decoding(
    kind: str, prompt: str, bases: dict[str, Checkpoint]
) -> None:
    base, (text,) = bases[kind], texts(1, 11)
    adapter = adapter_for(base, prompt, 4 if kind == "llama" else 0)
    trained = rows_beside(base, adapter)(text[None], torch.tensor([[4, 9, 11]]))
    target = NativeModel(HuggingFaceModel(base, torch.device("cpu"), torch.float32))
    masks = [VOCABULARY + mask for mask in range(3)]
    for group, length in enumerate((4, 9, 11)):
        context = text[:length].tolist()
        session = BitaTarget(target, adapter.requires_grad_(False)).start(Source(tuple(context)), 8)
        decoded = session.extend([context[-1], *masks]).logits[1:]
        before = text[[min(length + mask, 10) for mask in range(3)]]
        bias = 0 if adapter.markov is None else adapter.markov(before)
        torch.testing.assert_close(trained[0, group], decoded + bias, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_groups_of_one_forward_do_not_see_each_other(
    prompt: str, bases: dict[str, Checkpoint]
) -> None:
    rows, text = rows_beside(bases["llama"], adapter_for(bases["llama"], prompt)), texts(2, 12)
    # the second sample has two, and two that pad
    contexts = torch.tensor([[3, 7, 8, 12], [5, 6, 1, 1]])
    together = rows(text, contexts)
    for sample, group in ((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)):
        length = int(contexts[sample, group])
        alone = rows(text[sample : sample + 1, :length], torch.tensor([[length]]))
        torch.testing.assert_close(together[sample, group], alone[0, 0], rtol=1e-4, atol=1e-4)


def test_the_attention_mask_is_that_of_the_papers_figure() -> None:
    drawn = """
        . . . . . p . . . .
        D D t . . p m . . .
        D D t . . p m m . .
        D D t t t p . . m .
        D D t t t p . . m m
    """
    wanted = [[mark != "." for mark in line.split()] for line in drawn.strip().splitlines()]
    visible = visible_rows(torch.tensor([[1, 3]]), deep=2, tokens=3, shallow=1, masks=2)
    assert visible[0].tolist() == wanted


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_adapter_learns_and_nothing_else(prompt: str, bases: dict[str, Checkpoint]) -> None:
    adapter = BitaAdapter.fresh(bases["llama"].config, {}, prompt, 4, 3, seed=0)
    rows = rows_beside(bases["llama"], adapter)
    loss = PredictionLoss((1.0, 1.0, 1.0))(
        rows(texts(2, 8), torch.tensor([[4], [6]])), texts(6, 1).view(2, 1, 3)
    )
    loss.backward()
    assert all(bool(weight.grad.abs().sum() > 0) for weight in adapter.parameters())
    assert set(rows.state_dict()) == {f"weights.{name}" for name in adapter.state_dict()}
    assert all(weight.grad is None for weight in rows.base.parameters())


REFUSED = {
    "mask_tokens": (0, "bita.mask_tokens must be a whole number >= 1, got 0"),
    "markov_rank": (-1, "bita.markov_rank must be a whole number >= 0, got -1"),
    "splits": (0, "bita.splits must be a whole number >= 1, got 0"),
    "consecutive": ("yes", "bita.consecutive must be true or false, got 'yes'"),
    "prompt": ("wide", "bita.prompt must be one of deep, shallow, none, got 'wide'"),
    "prompt_tokens": (0, "bita.prompt_tokens must be a whole number >= 1, got 0"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_an_adapter_that_cannot_be_meant_is_refused(key: str, bases: dict[str, Checkpoint]) -> None:
    value, message = REFUSED[key]
    values = {
        "prompt": "deep",
        "prompt_tokens": 4,
        "mask_tokens": 3,
        "splits": 2,
        "consecutive": False,
        key: value,
    }
    with pytest.raises(UserError, match=message):
        BitaSpec(**values).check(bases["llama"].config)


def test_a_deep_prompt_that_does_not_fit_the_keys_is_refused() -> None:
    spec = BitaSpec(prompt="deep", prompt_tokens=1, mask_tokens=1, splits=1, consecutive=False)
    latent = tiny_architectures.configuration("minicpm3")
    with pytest.raises(UserError, match=r"4 heads with 4 dim.* a minicpm3 .*bita.prompt=shallow"):
        spec.check(latent)
    replace(spec, prompt="shallow").check(latent)
    for name in ("qwen2_5_vl", "gpt2"):  # one reads images too, one looks for padding by values
        spec.check(tiny_architectures.configuration(name))


def test_attention_that_cannot_be_given_a_prompt_is_refused(bases: dict[str, Checkpoint]) -> None:
    config = FalconConfig(vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    spec = BitaSpec(prompt="none", prompt_tokens=0, mask_tokens=1, splits=1, consecutive=False)
    with pytest.raises(
        UserError,
        match=r"cannot reach into a falcon model: its attention does not go .*Llama or Qwen",
    ):
        spec.check(config)  # before weights are read
    windowed = bases["llama"].weights(torch.float32)
    windowed.config.sliding_window = 4
    for attempt in (lambda: spec.check(windowed.config), lambda: spec.build(windowed, {}, seed=0)):
        with pytest.raises(
            UserError, match="a llama model: its layers see only a window of the text"
        ):
            attempt()
