"""EAGLE's training: its steps are those of decoding, what they learn, and that a killed training
resumes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import smooth_l1_loss
from transformers import PreTrainedModel

from bild_lab.engine.methods.eagle.module import EAGLE, EAGLE3, read_eagle
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.errors import UserError
from bild_lab.training.modules.eagle import EagleModule, EagleSpec
from bild_lab.training.modules.frozen import train_beside_frozen
from bild_lab.training.modules.predictors import (
    AnsweredPrompt,
    PredictionEvaluator,
    PredictionLoss,
)
from bild_lab.training.modules.states import decoder_states
from tests import tiny_architectures
from tests.engine.methods.drafters.naive import eagle_behind
from tests.engine.methods.modules.tiny import random_eagle
from tests.engine.models.test_states import ENCODED
from tests.tiny import PAD, START, tiny_llama, tiny_t5
from tests.training.jobs import Kill, losses
from tests.training.modules.frozen_jobs import frozen_job

Command = Callable[..., tuple[int, str]]
TEXT = [7, 8, 9, 10, 11, 12, 13]


def spec(**changes: Any) -> EagleSpec:
    return EagleSpec(**{"variant": EAGLE, "steps": 3, "noise": 0.0, **changes})


@pytest.mark.parametrize("family", ["t5", "llama"])
@pytest.mark.parametrize("variant", [EAGLE, EAGLE3])
def test_the_steps_of_training_are_those_of_decoding(variant: str, family: str) -> None:
    module = (tiny_t5(4, layers=3) if family == "t5" else tiny_llama(4, layers=3)).double().eval()
    eagle = random_eagle(variant, module.config).double()
    prompt = [*ENCODED[0].tolist(), PAD] if family == "t5" else [START, 5, 9]
    rows = torch.tensor([[*prompt, *TEXT], [*prompt, *TEXT[::-1]]])
    first = len(prompt) + 1
    contexts = torch.tensor([[first, first + 2, first + 4], [first, first + 1, 1]])
    found = EagleModule(module, eagle, 3, 0.0, 0).eval()(rows, contexts).logits
    for sample, group in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
        length = int(contexts[sample, group])
        tokens = rows[sample].tolist()[len(prompt) - 1 if family == "t5" else 0 :]
        length -= len(prompt) - 1 if family == "t5" else 0
        behind = eagle_behind(eagle, module, tokens[:length])
        for step in range(3):
            expected = behind(tokens[length : length + step])
            torch.testing.assert_close(
                found[sample, group, step].detach(), expected, rtol=1e-5, atol=1e-5
            )


def model_of(name: str) -> PreTrainedModel:
    """A Llama, or one whose scores are a part of its head's products, capped ones or ones with a bias,
    or whose head reads a part of its states, so that it shows.
    """
    if name == "llama":
        return tiny_llama(4, layers=3).eval()
    return tiny_architectures.with_marked_head(name)


def outputs_of(variant: str, train: bool, name: str = "llama") -> tuple[EagleModule, Any, Tensor]:
    module = model_of(name)
    text = module.config.get_text_config(decoder=True)
    eagle = EagleModule(module, random_eagle(variant, text), 3, 0.0, 0).train(train)
    rows, contexts = torch.tensor([[START, 5, 9, *TEXT]]), torch.tensor([[4, 7]])
    labels = torch.tensor([[[8, 9, 10], [11, 12, 13]]])
    return eagle, eagle(rows, contexts), labels


UNUSUAL = ["granite", "cohere", "gemma2", "minicpm3", "phi", "llama4_text", "modernbert-decoder"]


@pytest.mark.parametrize("name", ["llama", *UNUSUAL])
def test_eagle_3_learns_the_models_own_distribution_at_every_step(name: str) -> None:
    eagle, found, labels = outputs_of(EAGLE3, train=True, name=name)
    with torch.no_grad():
        own = eagle.base(torch.tensor([[START, 5, 9, *TEXT]])).logits[0].softmax(-1)
    for group, context in enumerate((4, 7)):
        for step in range(3):
            q = found.logits[0, group, step].log_softmax(-1)
            torch.testing.assert_close(
                found.losses[0, group, step], -(own[context - 1 + step] * q).sum()
            )
    expected = (found.losses * torch.tensor([1.0, 0.8, 0.64])).sum() / 6
    torch.testing.assert_close(
        PredictionLoss(spec(variant=EAGLE3).predictors.weights)(found, labels), expected
    )


@torch.no_grad()
@pytest.mark.parametrize("name", [*UNUSUAL, "t5gemma", "marian"])
def test_eagle_1_learns_by_the_models_own_scores_of_its_states(name: str) -> None:
    eagle, *_ = outputs_of(EAGLE, train=False, name=name)
    text = torch.tensor([[START, 5, 9, *TEXT]])
    run = decoder_states(eagle.base, text, torch.tensor([[4, 7]]), (), skipped=1)
    inputs = {"input_ids": text}
    if eagle.base.config.is_encoder_decoder:
        inputs = {"input_ids": text[:, :2], "decoder_input_ids": run.tokens}
    torch.testing.assert_close(eagle.weights.head_logits(run.final), eagle.base(**inputs).logits)


def test_layers_with_several_states_of_a_token_are_refused_to_eagle_3() -> None:
    with pytest.raises(UserError, match="a gemma3n_text has several states of a token"):
        outputs_of(EAGLE3, train=True, name="gemma3n_text")
    outputs_of(EAGLE, train=True, name="gemma3n_text")
    built = spec().build(model_of("gemma3n_text"), {}, 0)  # which names the sizes layer by layer
    assert built.weights.config.layer.intermediate_size == 48


def test_eagle_3_learns_its_heads_own_tokens_alone_and_chooses_among_them() -> None:
    rows = [
        AnsweredPrompt(np.array(row), 4)
        for row in ([START, 4, 4, 4, *TEXT, 7, 7, 9], [4, 4, 4, 5, 9, 12, 3, 12])
    ]
    learned = np.array([False, True, False, True, True])  # the 4 between is a user's
    small = spec(variant=EAGLE3, draft_vocabulary=3)
    assert small.from_answers([*rows, AnsweredPrompt(np.array([4, 7, 4, 9, 12]), 1, learned)]) == {
        "tokens": [7, 9, 12]
    }
    assert spec(variant=EAGLE3).from_answers(rows) == {}
    base, known = tiny_llama(4, layers=3).eval(), [7, 9, 12]
    base.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, base.config.vocab_size))
    eagle = small.build(base, {}, 0, **small.from_answers(rows)).train()
    assert eagle.weights.tokens.tolist() == known
    torch.testing.assert_close(eagle.weights.lm_head.weight, base.lm_head.weight[known])
    text, contexts = torch.tensor([[START, 5, 9, *TEXT]]), torch.tensor([[4, 5]])
    wanted = torch.tensor([[[8, 9, 10], [9, 10, 11]]])
    found = eagle(text, contexts, wanted)
    with torch.no_grad():
        own = base(text).logits[0][:, known].softmax(-1)
        choices = eagle(text, contexts).choices
    assert found.choices is None
    assert (found.losses > 0).tolist() == (wanted == 9).tolist()  # the head cannot give 8, 10 or 11
    behind = eagle_behind(eagle.weights, base, text[0, :5].tolist())([])
    assert choices[0, 1, 0].tolist() == behind.topk(3).indices.tolist()
    torch.testing.assert_close(
        found.losses[0, 1, 0], -(own[4] * behind[known].log_softmax(-1)).sum()
    )


def test_an_eagle_3_with_a_part_of_the_vocabulary_is_trained_and_read_again(
    tmp_path: Path, checkpoints: Path
) -> None:
    part = spec(variant=EAGLE3, draft_vocabulary=5)
    metrics = train_beside_frozen(
        frozen_job(tmp_path, checkpoints / "llama", spec=part, max_steps=2, evaluate_every=1)
    )
    eagle = read_eagle(tmp_path / "heads", 2)
    assert eagle.config.draft_vocabulary == len(set(eagle.tokens.tolist())) == 5
    assert metrics["best"]["top_5_step_1"] > 0


def test_eagle_1_learns_states_and_a_tenth_of_the_tokens_at_the_first_step() -> None:
    eagle, found, labels = outputs_of(EAGLE, train=True)
    assert found.losses.shape == (1, 2, 1)
    base, rows = eagle.base, torch.tensor([[START, 5, 9, *TEXT]])
    with torch.no_grad():
        final = base.model(rows).last_hidden_state[0]
        own = base.lm_head(final).softmax(-1)
        logits = eagle_behind(eagle.weights, base, rows[0, :4].tolist())([])
        # the state that gives these scores
        drafted = torch.linalg.lstsq(base.lm_head.weight, logits[:, None]).solution[:, 0]
        expected = smooth_l1_loss(drafted, final[3]) - 0.1 * (own[3] * logits.log_softmax(-1)).sum()
    torch.testing.assert_close(found.losses[0, 0, 0], expected, rtol=1e-3, atol=1e-3)
    total = PredictionLoss(spec().predictors.weights)(found, labels)
    # whatever the number of steps it is scored on
    torch.testing.assert_close(total, found.losses.mean())


def test_eagle_1_is_scored_at_every_step_and_without_noise() -> None:
    noisy = spec(noise=0.5)
    eagle = noisy.build(tiny_llama(4, layers=3).eval(), {}, 0)
    rows = [AnsweredPrompt(np.array([START, 5, 9, *TEXT[start:]]), 3) for start in range(3)]
    evaluate = PredictionEvaluator(rows, noisy.predictors, batch_size=2)
    loss = PredictionLoss(noisy.predictors.weights)
    still, training = evaluate(eagle.eval(), loss), evaluate(eagle.train(), loss)
    assert {**training, "seconds": 0} == {**still, "seconds": 0}
    assert eagle.training  # as the training goes on


@pytest.mark.slow
@pytest.mark.parametrize("variant", [EAGLE, EAGLE3])
def test_a_training_leaves_an_eagle_that_learned(
    variant: str, tmp_path: Path, checkpoints: Path
) -> None:
    base = Checkpoint(str(checkpoints / "llama"))
    changes = {"spec": spec(variant=variant), "max_steps": 60, "evaluate_every": 20, "log_every": 5}
    metrics = train_beside_frozen(
        frozen_job(tmp_path, Path(base.path), **changes, learning_rate=0.02)
    )
    assert [path.name for path in tmp_path.iterdir()] == ["heads"]
    (_, first), *_, (_, last) = losses(metrics)
    assert last < 0.95 * first
    assert list(metrics["columns"]) == ["step_1", "step_2", "step_3"]
    eagle = read_eagle(tmp_path / "heads", 2)
    assert eagle.config.variant == variant and eagle.config.base["fingerprint"] == base.fingerprint


@pytest.mark.slow
def test_a_killed_training_resumes_with_the_same_noise(tmp_path: Path, checkpoints: Path) -> None:
    job = partial(frozen_job, base=checkpoints / "llama", spec=spec(noise=0.3))
    whole = train_beside_frozen(job(tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        train_beside_frozen(job(tmp_path / "killed", callbacks=(Kill(3),)))
    assert losses(train_beside_frozen(job(tmp_path / "killed"))) == losses(whole)
    ours, theirs = (
        load_file(tmp_path / name / "heads" / "model.safetensors") for name in ("killed", "whole")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    quiet = train_beside_frozen(job(tmp_path / "quiet", spec=spec()))
    assert losses(quiet) != losses(whole)


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(UserError, match="variant must be one of eagle, eagle3, got 'eagle2'"):
        spec(variant="eagle2")
    with pytest.raises(UserError, match="module.steps must be a whole number >= 1, got 0"):
        spec(steps=0)
    with pytest.raises(
        UserError,
        match="module.draft_vocabulary must be a whole number >= 1, got 0; null takes all",
    ):
        spec(variant=EAGLE3, draft_vocabulary=0)
    with pytest.raises(
        UserError, match="module.variant with a draft vocabulary must be one of eagle3, got 'eagle'"
    ):
        spec(draft_vocabulary=5)
    with pytest.raises(UserError, match="module.noise must lie in"):
        spec(noise=-1)
