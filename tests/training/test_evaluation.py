"""Evaluation during training decodes the same texts as our own loop."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from bild_lab.engine.request import Source
from bild_lab.engine.stop import before_stop
from bild_lab.lab.data.prompts import Example
from bild_lab.lab.metrics.quality import score
from bild_lab.lab.metrics.text_metrics import LOG_PROBABILITY
from bild_lab.training.batches import Collator, tokenize
from bild_lab.training.finetune import Evaluator, _evaluating, greedy_settings
from bild_lab.training.losses import LayerLoss
from tests.stubs import uncached
from tests.tiny import END, PAD, VOCABULARY, tiny_llama, tiny_t5, tiny_tokenizer
from tests.tiny_architectures import build

MODELS = {"t5": tiny_t5, "llama": tiny_llama}
PROMPTS = ["w5 w6 w7", "w8", "w9 w10 w11 w12 w13", "w3 w4", "w20 w21"]
EXAMPLES = tuple(
    Example(f"test-{i}", each, each, (each, "w3 w3 w3 w3")) for i, each in enumerate(PROMPTS)
)
LENGTH = 12


def evaluator(model: PreTrainedModel, batch_size: int) -> Evaluator:
    encoder_decoder = model.config.is_encoder_decoder
    tokenizer, start = tiny_tokenizer(encoder_decoder), PAD if encoder_decoder else None
    examples = tokenize(EXAMPLES, tokenizer, encoder_decoder, None, LENGTH)
    settings = greedy_settings(LENGTH, [END], PAD, start)
    references = [example.references for example in EXAMPLES]
    return Evaluator(
        references, examples, "bleu", tokenizer, Collator(PAD, start), batch_size, settings
    )


def greedy_text(model: PreTrainedModel, prompt: str) -> str:
    """Argmax after argmax, each from a forward pass over the whole text."""
    tokenizer = tiny_tokenizer(model.config.is_encoder_decoder)
    ids = tokenizer(prompt)["input_ids"]
    source = (
        Source((PAD,), torch.tensor([ids]))
        if model.config.is_encoder_decoder
        else Source(tuple(ids))
    )
    next_logits, tokens = uncached(model, source), list(source.prompt)
    for _ in range(LENGTH):
        tokens.append(int(next_logits(tokens).argmax()))
        if tokens[-1] == END:
            break
    return tokenizer.decode(tokens[len(source.prompt) :], skip_special_tokens=True).strip()


@pytest.mark.fast("llama")
@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_greedy_decoding_one_by_one(name: str) -> None:
    model = MODELS[name](1).double()
    model.generation_config.num_beams = 4  # a checkpoint's own, which is not used
    found = evaluator(model, batch_size=2)(model, LayerLoss(model, {2: 1.0}, 0.0, bfloat16=False))
    texts = [greedy_text(model, prompt) for prompt in PROMPTS]
    wanted = score("bleu", texts, [example.references for example in EXAMPLES])
    assert (found["bleu"], found["bleu_low"], found["bleu_high"]) == (
        wanted.value,
        wanted.low,
        wanted.high,
    )
    assert len({*texts}) == 5 and wanted.value > 0


@pytest.mark.fast("llama")
@pytest.mark.parametrize("name", MODELS)
def test_what_is_scored_of_a_text_ends_before_the_first_stop_string(name: str) -> None:
    model = MODELS[name](1).double()
    texts = [greedy_text(model, prompt) for prompt in PROMPTS]
    words = [text.split() for text in texts[:2]]
    cut = tuple(each[len(each) // 2] for each in words)
    found = replace(evaluator(model, 5), cut=cut)._texts(model)
    assert found == [before_stop(text, cut).strip() for text in texts] != texts


def test_texts_end_at_the_last_learned_position() -> None:
    """Fault: a prompt and the most new tokens together led beyond the table of positions."""
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": VOCABULARY}
    model = GPT2LMHeadModel(GPT2Config(n_positions=10, **sizes)).eval()
    found = replace(evaluator(model, 5), settings=greedy_settings(LENGTH, [], PAD, None))
    longest = 10 - len("<s> w9 w10 w11 w12 w13".split())
    assert [len(text.split()) for text in found._texts(model)] == [longest] * len(PROMPTS)


@pytest.mark.parametrize("name", ["rwkv", "llama"])
def test_texts_of_modules_that_read_the_padding_are_those_of_each_alone(name: str) -> None:
    """Fault: RWKV reads the padding as text, and was scored by other texts than it writes."""
    model = build(name)
    together, alone = (evaluator(model, size)._texts(model) for size in (5, 1))
    assert together == alone == [greedy_text(model, prompt) for prompt in PROMPTS]


def test_the_roundings_of_bfloat16_are_no_padding_that_was_read() -> None:
    """Fault: on a GPU every training in bfloat16 was evaluated text by text, as its batches were
    held to the digits of the weights, which are of float32.
    """
    model, rows = tiny_llama(1), []
    head = model.get_output_embeddings()

    def rounded(module: torch.nn.Module, inputs: object, logits: torch.Tensor) -> torch.Tensor:
        rows.append(len(logits))  # other products for other shapes
        return logits * (1 + 2**-8 * torch.cos(torch.arange(VOCABULARY))) ** len(logits)

    head.register_forward_hook(rounded)
    for dtype, largest in ((torch.bfloat16, len(PROMPTS)), (torch.float32, 2)):
        rows.clear()
        replace(evaluator(model, 5), dtype=dtype)._texts(model)
        assert max(rows) == largest  # two texts tell whether the padding is read


def test_texts_end_where_a_rotation_would_change() -> None:
    model = build("phi3/longrope")  # of 24 tokens
    unending = greedy_settings(40, [], PAD, None)
    found = replace(evaluator(model, 5), settings=unending)._texts(model)
    longest = 24 - len("<s> w9 w10 w11 w12 w13".split())
    assert max(len(text.split()) for text in found) <= longest


def test_texts_from_nothing_are_judged_by_their_likelihood_and_nothing_is_decoded() -> None:
    model = tiny_llama(1)
    model.generate = None  # cannot be called
    judge = replace(evaluator(model, 2), metric=LOG_PROBABILITY)
    found = judge(model, LayerLoss(model, {2: 1.0}, 0.0, bfloat16=False))
    assert found[LOG_PROBABILITY] == -found["loss"] < 0 and f"{LOG_PROBABILITY}_low" not in found


@pytest.mark.fast("llama")
@pytest.mark.parametrize("name", MODELS)
def test_the_validation_loss_is_the_mean_over_tokens_whatever_the_batches(name: str) -> None:
    model = MODELS[name](1)
    loss = LayerLoss(model, {1: 0.5, 2: 0.5}, label_smoothing=0.1, bfloat16=False)
    found = [evaluator(model, batch_size)(model, loss) for batch_size in (1, 5)]
    for key in ("loss", "loss_layer_1", "loss_layer_2"):
        assert found[0][key] == pytest.approx(found[1][key], abs=1e-5)
    assert found[0]["loss"] == found[0]["loss_layer_2"] != found[0]["loss_layer_1"]
    total = count = 0.0
    judge = evaluator(model, 1)
    for example in judge.examples:  # without smoothing, text by text
        batch = judge.collate([example])
        total += float(model(**batch).loss.detach()) * len(example.answer)
        count += len(example.answer)
    assert found[0]["loss"] == pytest.approx(total / count, abs=1e-5)


def test_evaluation_is_without_dropout_and_leaves_the_model_as_it_was() -> None:
    model = tiny_t5(1)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    loss, judge, own = (
        LayerLoss(model, {2: 1.0}, 0.0, bfloat16=False),
        evaluator(model, 2),
        model.generation_config,
    )
    still = judge(model.eval(), loss)
    training = judge(model.train(), loss)
    assert (training["loss"], training["bleu"]) == (still["loss"], still["bleu"])
    assert model.training and model.generation_config is own


@pytest.mark.slow
def test_weights_are_cast_once_a_block_in_half_precision() -> None:
    """Fault: at each token anew, as the Trainer's autocast is around one forward and forgets its
    casts at its end.
    """
    model, casts = tiny_llama(1), []
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    judge = evaluator(model, 5)
    prompts = judge.collate.prompts(judge.examples)
    for block in (nullcontext(), _evaluating(model, judge.settings)):
        with torch.profiler.profile() as profile, block:
            model.generate(**prompts, generation_config=judge.settings)
        casts.append(
            next(one.count for one in profile.key_averages() if one.key == "aten::_to_copy")
        )
    weights = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    assert casts[0] - casts[1] == weights * (LENGTH - 1)
