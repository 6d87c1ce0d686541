"""The loss over layers, against models that have fewer layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MT5Config,
    MT5ForConditionalGeneration,
    PreTrainedModel,
)

from bild_lab.errors import UserError
from bild_lab.training.losses import LayerLoss, layer_weights
from tests import tiny_architectures
from tests.tiny import tiny_llama, tiny_t5

LABELS = torch.tensor([[7, 8, 9, 1], [5, 1, -100, -100]])


def tiny_mt5(seed: int, layers: int) -> PreTrainedModel:
    """A T5's weights in an mT5, whose configuration has no scale for the head's input (Transformers
    5.23).
    """
    model = tiny_t5(seed, layers)
    own = {"model_type", "architectures", "scale_decoder_outputs", "tie_word_embeddings"}
    values = {key: value for key, value in model.config.to_dict().items() if key not in own}
    other = MT5ForConditionalGeneration(MT5Config(**values, tie_word_embeddings=False))
    other.load_state_dict(model.state_dict())
    other.lm_head.weight.data *= model.config.d_model**-0.5  # in the scale's place
    return other.eval()


MODELS = {"t5": tiny_t5, "llama": tiny_llama}


def forward(model: PreTrainedModel, **options: bool) -> object:
    """The model over a batch whose labels are LABELS, a decoder's after two tokens of prompt."""
    if model.config.is_encoder_decoder:
        ids = torch.tensor([[4, 6, 1], [3, 1, 0]])
        shifted = torch.tensor([[0, 7, 8, 9], [0, 5, 1, 0]])
        return model(
            input_ids=ids, attention_mask=(ids > 0).long(), decoder_input_ids=shifted, **options
        )
    return model(input_ids=torch.tensor([[2, 4, 7, 8, 9, 1], [2, 3, 5, 1, 0, 0]]), **options)


def labels_of(model: PreTrainedModel) -> Tensor:
    if model.config.is_encoder_decoder:
        return LABELS
    return torch.cat([torch.full((2, 2), -100), LABELS], dim=1)


def literal_loss(model: PreTrainedModel, smoothing: float = 0.0) -> float:
    """Token by token: smoothing mixes the label with the uniform distribution."""
    logits = forward(model).logits
    if not model.config.is_encoder_decoder:
        logits = logits[:, 1:-1]  # the rows that predict the answer
    total = count = 0
    for row, answer in zip(logits, LABELS.tolist(), strict=True):
        for scores, label in zip(row, answer, strict=True):
            if label != -100:
                log_probabilities = torch.log_softmax(scores, -1)
                uniform = log_probabilities.mean()
                total += -((1 - smoothing) * log_probabilities[label] + smoothing * uniform)
                count += 1
    return float(total / count)


def cut(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """The same model with its first decoder layers only."""
    shorter = copy.deepcopy(model)
    if model.config.is_encoder_decoder:
        shorter.decoder.block = shorter.decoder.block[:layers]
    else:
        shorter.model.layers = shorter.model.layers[:layers]
        shorter.model.config.num_hidden_layers = layers
    return shorter


def test_weights_are_those_of_the_paper() -> None:
    assert layer_weights("last", 8) == {8: 1.0}
    assert layer_weights("early_exit", 8) == {1: 0.5, 8: 0.5}
    assert layer_weights("calm", 3) == {1: 1 / 6, 2: 2 / 6, 3: 3 / 6}
    for loss in ("early_exit", "calm"):
        with pytest.raises(UserError, match="averages over layers, but the model has one"):
            layer_weights(loss, 1)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_last_layers_loss_is_the_cross_entropy_of_the_answer(
    name: str, smoothing: float
) -> None:
    model = MODELS[name](1)
    loss = LayerLoss(model, layer_weights("last", 2), smoothing, bfloat16=False)
    assert not loss.inner
    assert float(loss(forward(model), labels_of(model))) == pytest.approx(
        literal_loss(model, smoothing), abs=1e-5
    )


@pytest.mark.fast("early_exit-t5", "calm-mt5")
@torch.no_grad()
@pytest.mark.parametrize("name", [*MODELS, "mt5"])
@pytest.mark.parametrize("kind", ["early_exit", "calm"])
def test_an_inner_layers_loss_is_that_of_the_model_cut_there(name: str, kind: str) -> None:
    model = {**MODELS, "mt5": tiny_mt5}[name](1, layers=3)
    weights = layer_weights(kind, 3)
    loss = LayerLoss(model, weights, 0.0, bfloat16=False)
    outputs = forward(model, output_hidden_states=True)
    wanted = {layer: literal_loss(cut(model, layer)) for layer in weights}
    sums = loss.sums(outputs, labels_of(model))
    assert {layer: float(total) / 6 for layer, total in sums.items()} == pytest.approx(
        wanted, abs=1e-5
    )
    average = sum(weights[layer] * wanted[layer] for layer in weights)
    assert float(loss(outputs, labels_of(model))) == pytest.approx(average, abs=1e-5)
    assert len(set(wanted.values())) == len(weights)


@torch.no_grad()
@pytest.mark.parametrize("name", ["granite", "cohere", "gemma2"])
def test_what_a_model_makes_of_its_heads_scores_holds_after_every_layer(name: str) -> None:
    """A part of them in a Granite and a Cohere, and no more than a cap in a Gemma 2."""
    model = tiny_architectures.build(name)
    model.config.logits_scaling, model.config.final_logit_softcapping = 8.0, 1.0
    model.get_output_embeddings().weight.data *= 30
    loss = LayerLoss(model, {1: 0.5, 4: 0.5}, 0.0, bfloat16=False)
    sums = loss.sums(forward(model, output_hidden_states=True), labels_of(model))
    assert float(sums[1]) / 6 == pytest.approx(literal_loss(cut(model, 1)), abs=1e-4)
    assert float(sums[4]) / 6 == pytest.approx(literal_loss(model), abs=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_t5_scales_its_heads_input_after_every_layer(tied: bool) -> None:
    model = tiny_t5(1)
    model.config.scale_decoder_outputs = tied
    loss = LayerLoss(model, {1: 0.5, 2: 0.5}, 0.0, bfloat16=False)
    sums = loss.sums(forward(model, output_hidden_states=True), LABELS)
    assert float(sums[1]) / 6 == pytest.approx(literal_loss(cut(model, 1)), abs=1e-5)


@torch.no_grad()
def test_tokens_of_the_whole_step_divide_the_loss() -> None:
    model = tiny_t5(1)
    loss = LayerLoss(model, {2: 1.0}, 0.0, bfloat16=False)
    outputs = forward(model)
    assert float(loss(outputs, LABELS, 12)) == pytest.approx(float(loss(outputs, LABELS)) / 2)


@torch.no_grad()
def test_heads_of_inner_layers_run_in_the_models_precision() -> None:
    model = tiny_t5(1)
    outputs = forward(model, output_hidden_states=True)
    exact, rounded = (
        LayerLoss(model, {1: 0.5, 2: 0.5}, 0.0, bfloat16).sums(outputs, LABELS)
        for bfloat16 in (0, 1)
    )
    assert rounded[1] != exact[1] and rounded[2] == exact[2]
    assert float(rounded[1]) == pytest.approx(float(exact[1]), rel=0.02)


def test_an_architecture_without_a_known_head_is_refused_for_inner_layers_alone() -> None:
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_positions=16, n_embd=8, n_layer=2, n_head=2)
    )
    with pytest.raises(
        UserError, match="works for T5, mT5 and decoders shaped like Llama's, got gpt2"
    ):
        LayerLoss(model, {1: 0.5, 2: 0.5}, 0.0, bfloat16=False)
    LayerLoss(model, {2: 1.0}, 0.0, bfloat16=False)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["last", "early_exit"])
def test_soft_targets_take_the_place_of_the_labels(name: str, kind: str) -> None:
    """Token by token: each layer's cross-entropy with the teacher's shares, over the learned tokens
    alone.
    """
    model = MODELS[name](3)
    generator = torch.Generator().manual_seed(0)
    labels = labels_of(model)
    ids = torch.randint(0, 20, (*labels.shape, 3), generator=generator)
    probs = torch.rand(*labels.shape, 3, generator=generator).softmax(-1)
    weights = layer_weights(kind, 2)
    loss = LayerLoss(model, weights, 0.0, bfloat16=False)
    found = loss(forward(model, output_hidden_states=True), labels, soft_ids=ids, soft_probs=probs)
    total = 0.0
    for layer, weight in weights.items():
        rows = forward(cut(model, layer)).logits.log_softmax(-1)
        behind = 0 if name == "t5" else 1  # a decoder's row predicts the next token
        for row, column in (labels != -100).nonzero().tolist():
            chosen = rows[row, column - behind][ids[row, column]]
            total -= weight * float(probs[row, column] @ chosen.detach())
    assert found.item() == pytest.approx(total / 6, rel=1e-5)
    sure = torch.stack([labels.clamp_min(0)] * 3, -1)
    hard = loss(forward(model, output_hidden_states=True), labels)
    assert torch.allclose(
        loss(forward(model, output_hidden_states=True), labels, soft_ids=sure, soft_probs=probs),
        hard,
    )
