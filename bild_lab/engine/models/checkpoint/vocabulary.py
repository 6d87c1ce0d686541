"""The vocabularies of checkpoints: how a draft model's differs from the target's, and ids without a
token.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint

# share of the target's ordinary tokens: a draft model that lacks more reads them better in its own
MAX_LACKING_SHARE = 0.25


def same_vocabulary(target: Checkpoint, draft: Checkpoint) -> bool:
    """Whether both tokenizers map the same pieces to the same ids."""
    return target.vocabulary == draft.vocabulary


def shares_token_ids(target: Checkpoint, draft: Checkpoint) -> bool:
    """Whether a text's tokens have the same ids in both vocabularies.

    They are equal; or one holds the other, with equal ids; or they differ in added and special
    tokens alone. What begins and ends a text must be in both, and most of the target's ordinary
    tokens in the draft model's.
    """
    target_ids, draft_ids = target.vocabulary, draft.vocabulary
    if target_ids == draft_ids:
        return True
    # 1. the tokens that one of the two has alone, or under another id
    target_only = {
        piece: token for piece, token in target_ids.items() if draft_ids.get(piece) != token
    }
    draft_only = {
        piece: token for piece, token in draft_ids.items() if target_ids.get(piece) != token
    }
    ordinary_target_only = target_only.keys() - set(target.tokenizer.get_added_vocab())
    ordinary_draft_only = draft_only.keys() - set(draft.tokenizer.get_added_vocab())
    # 2. one holds the other, or the differing tokens are added ones
    if target_only and draft_only and (ordinary_target_only or ordinary_draft_only):
        return False
    # 3. the draft model has what begins and ends a text, and most of the ordinary tokens
    framing = {*target.end_tokens, target.tokenizer.bos_token_id}
    if target.encoder_decoder:
        framing.add(target.decoder_start)
    has_most = len(ordinary_target_only) <= MAX_LACKING_SHARE * len(target_ids)
    return framing.isdisjoint(target_only.values()) and has_most


def tokens_without_embedding(target: Checkpoint, draft: Checkpoint) -> list[int]:
    """The target's tokens that the draft model has no embedding for."""
    rows = min(draft.rows, draft.source_rows)
    return sorted(token for token in target.vocabulary.values() if rows <= token < target.rows)


def head_bias(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, " vocab"] | None:
    """What is added to a head's scores: −inf for ids without a token, so that a padded model never
    emits or drafts one, 0 for all others; None if all have one.
    """
    if not checkpoint.ids_without_token:
        return None
    bias = torch.zeros(checkpoint.columns, dtype=dtype)
    bias[list(checkpoint.ids_without_token)] = float("-inf")
    return bias.to(device)


def biased(
    logits: Float[Tensor, "*n vocab"], bias: Float[Tensor, " vocab"] | None
) -> Float[Tensor, "*n vocab"]:
    """The scores with this bias, if there is one."""
    return logits if bias is None else logits + bias
