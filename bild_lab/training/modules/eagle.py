"""EAGLE: a layer learns to continue a frozen model's states (Li et al., 2024; EAGLE-3: Li et al.,
2025).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import smooth_l1_loss
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel

from bild_lab.engine.methods.eagle.module import (
    EAGLE,
    EAGLE3,
    VARIANTS,
    Eagle,
    EagleConfig,
    joined_states,
    spread_layers,
)
from bild_lab.engine.models.checkpoint.checkpoint import decoder_depth
from bild_lab.engine.models.hf.own_scores import scores_of_products
from bild_lab.engine.models.native import why_not_native
from bild_lab.engine.models.native.t5 import head_scale
from bild_lab.errors import require_choice, require_number, require_whole
from bild_lab.training.modules.layer_heads import own_head
from bild_lab.training.modules.predictors import (
    AnsweredPrompt,
    OwnLoss,
    Predictors,
    first_choices,
)
from bild_lab.training.modules.states import (
    DecoderStates,
    ModuleSpec,
    SmallModule,
    decoder_states,
    own_matrices,
    soft_loss,
)

TOKEN_WEIGHT = 0.1  # of EAGLE-1's loss on tokens, beside that on states (Li et al., 2024, §4.2)
DECAY = 0.8  # of EAGLE-3's loss, from one step of the test to the next, as in the released code
SPREAD = 0.02  # of the weights at first


@dataclass(frozen=True, kw_only=True)
class EagleSpec(ModuleSpec):
    """An EAGLE to train: the fields of `conf/module/eagle.yaml` and `eagle3.yaml`.

    steps: of the training-time test (EAGLE-3 §3.2); EAGLE-1 learns the first alone, and is scored
    on all. noise: added to the model's states, uniform within ± this, for EAGLE-1.
    draft_vocabulary: tokens of EAGLE-3's head, the most frequent of the answers; what has another
    label is not learned, as in the released code; None: all.
    """

    variant: str
    steps: int
    noise: float = 0.0
    draft_vocabulary: int | None = None

    skipped: ClassVar[int] = 1  # the first round of a text drafts nothing

    def __post_init__(self) -> None:
        require_choice("module.variant", self.variant, VARIANTS)
        require_whole("module.steps", self.steps, 1)
        require_number("module.noise", self.noise, 0, 1e6, remedy="0 adds none")
        if self.draft_vocabulary is not None:
            require_choice("module.variant with a draft vocabulary", self.variant, (EAGLE3,))
            require_whole(
                "module.draft_vocabulary", self.draft_vocabulary, 1, None, "null takes all"
            )

    @property
    def noun(self) -> str:
        return "EAGLE-3" if self.variant == EAGLE3 else "EAGLE"

    @property
    def predictors(self) -> Predictors:
        """Step i (from 0) after a context predicts the token i places after it, and reads the label
        of the step before.

        EAGLE-1's first step weighs as much as there are steps, because the loss is a mean over all
        labels.
        """
        weights = [DECAY**step for step in range(self.steps)]
        if self.variant == EAGLE:
            weights = [float(self.steps), *[0.0] * (self.steps - 1)]
        return Predictors.in_turn("step", 0, weights, skipped=self.skipped, ahead=self.steps - 1)

    def from_answers(self, rows: Sequence[AnsweredPrompt]) -> dict[str, Any]:
        """The tokens of EAGLE-3's head."""
        if self.draft_vocabulary is None:
            return {}
        answers = [
            row.tokens[row.prompt_length :] if row.learned is None else row.tokens[row.learned]
            for row in rows
        ]
        ids, counts = np.unique(np.concatenate(answers), return_counts=True)
        return {
            "tokens": np.sort(
                ids[np.argsort(-counts, kind="stable")[: self.draft_vocabulary]]
            ).tolist()
        }

    def build(
        self,
        base: PreTrainedModel,
        origin: Mapping[str, Any],
        seed: int,
        tokens: Sequence[int] | None = None,
    ) -> EagleModule:
        """A layer with random weights.

        EAGLE-3's norm and head start as the model's own. tokens: of EAGLE-3's head.
        """
        text = base.config.get_text_config(decoder=True)
        _, head = own_matrices(base)
        is_eagle3 = self.variant == EAGLE3
        known = torch.tensor(range(text.vocab_size) if tokens is None else tokens)
        config = EagleConfig(
            variant=self.variant,
            layer=layer_like(base.config),
            target_size=text.hidden_size,
            target_layers=spread_layers(decoder_depth(base.config)) if is_eagle3 else (),
            draft_vocabulary=len(known) if is_eagle3 else None,
            base=dict(origin),
        )
        eagle, generator = Eagle(config), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in eagle.parameters():
                if weight.ndim > 1:
                    weight.copy_(SPREAD * torch.randn(weight.shape, generator=generator))
            if is_eagle3:
                eagle.lm_head.weight.copy_(head[known.to(head.device)])
                eagle.d2t.copy_(known - torch.arange(len(known)))
                if why_not_native(base.config, torch.float32) is None:
                    eagle.norm.copy_(own_head(base).final_norm * head_scale(base.config))
        return EagleModule(base, eagle, self.steps, self.noise, seed)

    def words(self, folder: Path) -> list[str]:
        return [f"policy={self.variant}", f"policy.heads={folder}"]


def layer_like(config: PreTrainedConfig) -> LlamaConfig:
    """A Llama layer of the sizes of a model's decoder layers."""
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    inner = getattr(text, "intermediate_size", None) or getattr(text, "d_ff", 4 * text.hidden_size)
    return LlamaConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=max(inner) if isinstance(inner, list) else inner,  # Gemma 3n's by layer
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None)
        or getattr(text, "d_kv", None)
        or text.hidden_size // heads,
        rms_norm_eps=getattr(text, "rms_norm_eps", None)
        or getattr(text, "layer_norm_epsilon", 1e-6),
    )


class EagleModule(SmallModule):
    """Runs the layer as decoding does: on the frozen model's states, then step by step on its own
    (EAGLE-3 §3.2).

    A step's tokens are the answer's own. So where all first choices are right, these are the tokens
    that would have been drafted, and `accepted` is what a chain of first choices gains.
    """

    reads_labels = True

    def __init__(
        self, base: PreTrainedModel, eagle: Eagle, steps: int, noise: float, seed: int
    ) -> None:
        super().__init__(base, eagle)
        self._steps, self._noise, self._seed = steps, noise, seed
        embedding, head = own_matrices(base)
        eagle.attach(embedding, head, scores_of_products=partial(scores_of_products, base))
        # the rows of the model's head for the tokens that the layer's head knows
        own = slice(eagle.config.vocabulary) if eagle.tokens is None else eagle.tokens
        self._head = head[own]

    def forward(
        self,
        input_ids: Int[Tensor, "batch n"],
        contexts: Int[Tensor, "batch contexts"],
        target_tokens: Int[Tensor, "batch contexts steps"] | None = None,
    ) -> OwnLoss:
        config, eagle = self.weights.config, self.weights
        # 1. the frozen model's states of the text
        run, states = self._states_of_text(input_ids, contexts)
        # 2. the module over the whole text, once; pair i ends with token i + 1
        places, pairs = run.places, (run.places - 1).clamp(min=0)
        embedded = eagle.embed(run.tokens)
        batch_rows = torch.arange(len(places), device=places.device)[:, None]
        count = last_place = run.tokens.shape[1] - 1
        cache: list[tuple[Tensor, Tensor]] = []
        outputs = eagle(
            embedded[:, 1:],
            eagle.fused(states)[:, :-1],
            torch.arange(count, device=places.device),
            keeping(cache),
            torch.ones(count, count, dtype=torch.bool, device=places.device).tril()[None, None],
        )[batch_rows, pairs]
        # 3. what it drafts after each context, step by step over its own outputs
        logits, choices, losses = [], [], []
        steps = self._steps if config.variant == EAGLE3 or not self.training else 1
        for step in range(steps):
            if step:
                outputs = eagle(
                    embedded[batch_rows, (places + step).clamp(max=last_place)],
                    outputs,
                    pairs + step,
                    keeping(cache),
                    visible_pairs(pairs, count, step),
                )
            scores = eagle.head_logits(outputs)
            target = run.final[batch_rows, (places + step).clamp(max=last_place)]
            losses.append(self._losses(outputs, scores, target))
            if eagle.tokens is None:
                logits.append(scores)
            elif not torch.is_grad_enabled():
                choices.append(eagle.tokens[first_choices(scores)])
        step_losses = torch.stack(losses, 2)  # [batch, contexts, steps]
        if eagle.tokens is None:
            return OwnLoss(torch.stack(logits, 2), step_losses)
        if target_tokens is not None:
            step_losses = step_losses * torch.isin(target_tokens[..., :steps], eagle.tokens)
        return OwnLoss(None, step_losses, torch.stack(choices, 2) if choices else None)

    @torch.no_grad()
    def _states_of_text(
        self, input_ids: Int[Tensor, "batch n"], contexts: Int[Tensor, "batch contexts"]
    ) -> tuple[DecoderStates, Tensor]:
        """The frozen model's run over the text, and what the module reads of it, with noise in
        training.
        """
        config = self.weights.config
        run = decoder_states(
            self.base, input_ids, contexts, config.target_layers, EagleSpec.skipped
        )
        layer_states = [run.hidden[layer] for layer in config.target_layers]
        states = joined_states(config.variant, run.final, layer_states)
        if self.training and self._noise:
            states = states + self._drawn(states, input_ids)
        return run, states

    def _losses(
        self, outputs: Tensor, logits: Tensor, target: Tensor
    ) -> Float[Tensor, "batch contexts"]:
        """Cross-entropy with the model's own distribution; EAGLE-1 also learns the state itself,
        which is `target`.
        """
        products = target @ self._head.mT
        own_scores = scores_of_products(self.base, products, self.weights.tokens)
        tokens = soft_loss(logits, own_scores)
        if self.weights.config.variant == EAGLE3:
            return tokens
        missed = smooth_l1_loss(outputs.float(), target.float(), reduction="none").mean(-1)
        return missed + TOKEN_WEIGHT * tokens

    def _drawn(self, states: Tensor, input_ids: Tensor) -> Tensor:
        """Noise that depends on the seed and the batch alone, so that a resumed training draws the
        same.
        """
        places = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)
        generator = torch.Generator().manual_seed(self._seed + int((input_ids * places).sum()))
        drawn = 2 * torch.rand(states.shape, generator=generator) - 1
        return self._noise * drawn.to(states)


def keeping(
    cache: list[tuple[Tensor, Tensor]],
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Keys and values after those of the steps before, which grow by them."""

    def store(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        cache.append((keys, values))
        return torch.cat([step_keys for step_keys, _ in cache], 2), torch.cat(
            [step_values for _, step_values in cache], 2
        )

    return store


def visible_pairs(
    pairs: Int[Tensor, "batch contexts"], count: int, step: int
) -> Bool[Tensor, "batch 1 contexts n"]:
    """What a step's rows attend to: the text's pairs up to their own, and their own rows of the
    steps so far.
    """
    text = torch.arange(count, device=pairs.device) <= pairs[..., None]  # [batch, contexts, count]
    step_rows = torch.eye(pairs.shape[1], dtype=torch.bool, device=pairs.device).repeat(1, step)
    return torch.cat([text, step_rows.expand(len(pairs), -1, -1)], -1)[:, None]
