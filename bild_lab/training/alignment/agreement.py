"""How often a drafter chooses what its target chose."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from bild_lab.engine.models.hf import HuggingFaceModel
from bild_lab.training.batches import padded_with_mask
from bild_lab.training.calibration.greedy_answers import greedy_answers

BATCH_SIZE = 16  # texts; the models are small

TargetAnswers = Sequence[tuple[str, list[int]]]  # prompts, each with the target's tokens


def agreement(
    model: HuggingFaceModel, answers: TargetAnswers, max_source_tokens: int | None, max_new_tokens: int
) -> tuple[dict[str, float], list[str]]:
    """The shares of the target's tokens and texts that the model chooses too, and the model's own greedy texts."""
    checkpoint = model.checkpoint
    sources = [checkpoint.source(prompt, max_source_tokens) for prompt, _ in answers]
    own = greedy_answers(model, sources, max_new_tokens, BATCH_SIZE)
    same = sum(tokens == theirs for tokens, (_, theirs) in zip(own, answers, strict=True))
    shares = {
        "token_agreement": token_agreement(model, answers, max_source_tokens),
        "text_agreement": same / len(answers),
    }
    return shares, [checkpoint.tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in own]


@torch.inference_mode()
def token_agreement(model: HuggingFaceModel, answers: TargetAnswers, max_source_tokens: int | None) -> float:
    """The share of the target's tokens that the model predicts from the target's text before each of them."""
    agreed = total = 0
    for start in range(0, len(answers), BATCH_SIZE):
        prompts, targets = zip(*answers[start : start + BATCH_SIZE], strict=True)
        sources = [model.checkpoint.source(prompt, max_source_tokens) for prompt in prompts]
        rows = [np.array([*source.prompt, *target[:-1]]) for source, target in zip(sources, targets, strict=True)]
        ids, mask = (tensor.to(model.device) for tensor in padded_with_mask(rows, 0))
        if model.checkpoint.encoder_decoder:
            encoded = padded_with_mask([source.encoder_ids[0].numpy() for source in sources], 0)
            encoder_ids, encoder_mask = (tensor.to(model.device) for tensor in encoded)
            out = model.module(input_ids=encoder_ids, attention_mask=encoder_mask, decoder_input_ids=ids)
        else:
            out = model.module(input_ids=ids, attention_mask=mask)
        for chosen, source, target in zip(out.logits.argmax(-1).tolist(), sources, targets, strict=True):
            first = len(source.prompt) - 1  # the row that predicts the answer's first token
            agreed += sum(ours == theirs for ours, theirs in zip(chosen[first:], target, strict=False))
            total += len(target)
    return agreed / total
