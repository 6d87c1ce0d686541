"""How often a small model says what the target said."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bild_lab.engine.models.hf import HuggingFaceModel
from bild_lab.training.alignment.answers import greedy_answers, tensors

DECODED_AT_ONCE = 16  # texts; small models only

Said = Sequence[tuple[str, list[int]]]  # prompts, each with the target's tokens


def agreement(
    model: HuggingFaceModel, said: Said, max_source_tokens: int | None, max_new_tokens: int
) -> tuple[dict[str, float], list[str]]:
    """The shares of the target's tokens and of its whole texts that the model chooses too, and its own greedy texts."""
    checkpoint = model.checkpoint
    sources = [checkpoint.source(prompt, max_source_tokens) for prompt, _ in said]
    own = greedy_answers(model, sources, max_new_tokens, DECODED_AT_ONCE)
    same = sum(tokens == theirs for tokens, (_, theirs) in zip(own, said, strict=True))
    shares = {
        "token_agreement": token_agreement(model, said, max_source_tokens),
        "text_agreement": same / len(said),
    }
    return shares, [checkpoint.tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in own]


@torch.inference_mode()
def token_agreement(model: HuggingFaceModel, said: Said, max_source_tokens: int | None) -> float:
    """The share of the target's tokens that the model would have chosen after the same text."""
    agreed = total = 0
    for start in range(0, len(said), DECODED_AT_ONCE):
        prompts, answers = zip(*said[start : start + DECODED_AT_ONCE], strict=True)
        sources = [model.checkpoint.source(prompt, max_source_tokens) for prompt in prompts]
        fed = [[*source.prompt, *answer[:-1]] for source, answer in zip(sources, answers, strict=True)]
        ids, mask = (tensor.to(model.device) for tensor in tensors(fed, 0, "right"))
        if model.encoder_decoder:
            read = tensors([source.encoder_ids[0].tolist() for source in sources], 0, "right")
            read_ids, read_mask = (tensor.to(model.device) for tensor in read)
            out = model.module(input_ids=read_ids, attention_mask=read_mask, decoder_input_ids=ids)
        else:
            out = model.module(input_ids=ids, attention_mask=mask)
        for chosen, source, answer in zip(out.logits.argmax(-1).tolist(), sources, answers, strict=True):
            first = len(source.prompt) - 1  # the row that predicts the first token of the answer
            agreed += sum(ours == theirs for ours, theirs in zip(chosen[first:], answer, strict=False))
            total += len(answer)
    return agreed / total
