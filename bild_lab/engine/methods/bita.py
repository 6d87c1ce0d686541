"""BiTA: trained prompt and mask tokens beside the text (§3.1), a target with them, and the drafter
that makes a tree of the masks' candidates (§3.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.draft_vocabulary import DraftVocabulary
from bild_lab.engine.methods.candidate_trees import TreeFile
from bild_lab.engine.methods.candidates import STRAIGHTFORWARD, CandidateDrafter
from bild_lab.engine.methods.markov import MarkovHead
from bild_lab.engine.methods.module_folder import FolderKind, SavedModule, base_sizes
from bild_lab.engine.request import Source
from bild_lab.engine.sampling import precise
from bild_lab.engine.session import (
    DEFAULT_OPTIONS,
    LoadedModel,
    Prefix,
    Scores,
    Session,
    SessionOptions,
)
from bild_lab.errors import require_choice, require_whole
from bild_lab.files import FilePath

PROMPTS = ("deep", "shallow", "none")
INITIAL_STD = 0.02  # §4.1.2
TRAIN = "python scripts/train_bita.py name=bita model.path=DIR dataset=NAME dataset.path=DIR"
KIND = FolderKind(
    weights="adapter.safetensors",
    config="adapter_config.json",
    noun="BiTA adapter",
    remedy=f"make one with: {TRAIN} and give policy.adapter=outputs/bita/adapter",
)


@dataclass(frozen=True)
class BitaConfig:
    """The shapes of an adapter, and the model it was trained for.

    prompt: deep (keys and values in every layer), shallow (embeddings before the first layer) or
        none.
    prompt_tokens: P, 0 without a prompt.
    mask_tokens: M.
    layers, kv_heads, head_dim, hidden_size, vocabulary: the base model's.
    base: its path and the fingerprint of its weights.
    markov_rank: of a `MarkovHead`; 0: none.
    """

    prompt: str
    prompt_tokens: int
    mask_tokens: int
    layers: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    vocabulary: int
    base: Mapping[str, Any] = field(default_factory=dict)
    markov_rank: int = 0

    def __post_init__(self) -> None:
        require_choice("bita.prompt", self.prompt, PROMPTS)
        require_whole("bita.mask_tokens", self.mask_tokens, 1)
        require_whole("bita.markov_rank", self.markov_rank, 0)
        require_whole("bita.prompt_tokens", self.prompt_tokens, 0 if self.prompt == "none" else 1)


class BitaAdapter(SavedModule):
    """The trained parameters only. The base model is frozen and not part of this module.

    A deep prompt: prompt_keys and prompt_values, [layers, kv_heads, P, head_dim], in the layout of
    the KV cache, without rotary positions. A shallow prompt: prompt_embeddings, [P, dim]. masks:
    [M, dim], separate from the vocabulary's embeddings. Mask j (from 0) after n tokens has position
    n + j and predicts token n + j + 1; the last token's own row predicts token n.
    """

    kind, config_class = KIND, BitaConfig

    def __init__(self, config: BitaConfig, seed: int = 0) -> None:
        super().__init__(config)
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> nn.Parameter:
            return nn.Parameter(INITIAL_STD * torch.randn(shape, generator=generator))

        # drawn first: the same for every kind of prompt
        self.masks = normal(config.mask_tokens, config.hidden_size)
        if config.prompt == "deep":
            shape = (config.layers, config.kv_heads, config.prompt_tokens, config.head_dim)
            self.prompt_keys = normal(*shape)
            self.prompt_values = normal(*shape)
        elif config.prompt == "shallow":
            self.prompt_embeddings = normal(config.prompt_tokens, config.hidden_size)
        rank = config.markov_rank
        self.markov = MarkovHead(config.vocabulary, rank, seed, rank**-0.5) if rank else None

    @classmethod
    def fresh(
        cls,
        model_config: PreTrainedConfig,
        base: Mapping[str, Any],
        prompt: str,
        prompt_tokens: int,
        mask_tokens: int,
        seed: int,
        markov_rank: int = 0,
    ) -> BitaAdapter:
        """An untrained adapter for a model with this configuration. prompt=none ignores
        prompt_tokens.

        Raises UserError for an encoder–decoder, an unknown prompt, and fewer than one mask or
        prompt token.
        """
        config = BitaConfig(
            prompt=prompt,
            prompt_tokens=0 if prompt == "none" else prompt_tokens,
            mask_tokens=mask_tokens,
            **base_sizes(model_config, "a BiTA adapter"),
            base=dict(base),
            markov_rank=markov_rank,
        )
        return cls(config, seed)


def load_bita(
    target: LoadedModel, path: FilePath | None, vocabulary: DraftVocabulary | None = None
) -> BitaAdapter:
    """The adapter in this folder, in the target's precision.

    Raises UserError as `SavedModule.load_for` does.
    """
    sizes = base_sizes(target.checkpoint.config, KIND.noun)
    return BitaAdapter.load_for(target, path, vocabulary, **sizes)


class BitaTarget:
    """The target's own weights and, for probe rows only, an adapter's prompt and masks (BiTA §3.1).

    Text rows never attend to the prompt or to a mask, so their logits are the target's own. Token
    `vocab_size + j` is mask j. A shallow prompt runs through the layers once; its keys and values
    are then a prefix, like those of a deep prompt.

    prompt_tokens: use only this many of the adapter's prompt tokens, from the first; None: all.
    """

    cuda_graph_safe = False

    def __init__(
        self, target: LoadedModel, adapter: BitaAdapter, prompt_tokens: int | None = None
    ) -> None:
        trained_tokens = adapter.config.prompt_tokens
        count = trained_tokens if prompt_tokens is None else prompt_tokens
        require_whole(
            "prompt_tokens",
            count,
            0,
            trained_tokens,
            f"null uses all {trained_tokens} of the adapter",
        )
        self._target, self._adapter, self._prompt_tokens = target, adapter, count

    @property
    def device(self) -> torch.device:
        return self._target.device

    @property
    def engine(self) -> str:
        return self._target.engine

    def start(
        self, source: Source, room: int, session_options: SessionOptions = DEFAULT_OPTIONS
    ) -> Session:
        return self._target.start(source, room, replace(session_options, prefix=self._prefix))

    @cached_property
    def _prefix(self) -> Prefix:
        adapter, count = self._adapter, self._prompt_tokens
        if adapter.config.prompt == "shallow" and count:
            prompt = self._target.prompt_cache(adapter.prompt_embeddings[:count])
            return replace(prompt, masks=adapter.masks)
        if adapter.config.prompt == "deep":
            return Prefix(
                keys=adapter.prompt_keys[:, :, :count],
                values=adapter.prompt_values[:, :, :count],
                masks=adapter.masks,
            )
        shape = (adapter.config.layers, adapter.config.kv_heads, 0, adapter.config.head_dim)
        empty = adapter.masks.new_empty(shape)
        return Prefix(empty, empty, adapter.masks)


class MaskTokenDrafter(CandidateDrafter):
    """Streamlined generation and verification (BiTA §3.2, Appendix B, Algorithm 1), for a
    `BitaTarget`.

    Every forward runs the last committed token, the draft, and groups of masks. Take the group
    after the last accepted token. Its mask j (from 0) predicts the token j + 2 positions ahead; the
    target's own next token is 1 ahead. The most likely tokens of each mask are the candidates of
    the next draft. The first forward has no draft, and one group after the prompt.

    tree: efficient_tree (Figure 5) extends only each depth's most likely candidate; narrowing_tree
        is the same with one candidate fewer at each depth; full_tree extends every candidate. All
        have a group of masks after every token. straightforward (Figure 4) drafts a chain of each
        mask's most likely token, with a single group after the last committed token. A file of
        `scripts/fit_tree.py` has a tree for each number of candidates, and says after which tokens
        masks run, and how many.
    top_k: candidates of each mask, one number or one for each mask; straightforward always uses 1.
    adapter: of its weights the target runs all but those of a Markov head.
    mask_tokens: use only this many of the adapter's masks, from the first; None: all, or as many as
        there are widths.
    """

    hybrid_places = ()

    def __init__(
        self,
        target: LoadedModel,
        adapter: BitaAdapter,
        tree: TreeFile,
        top_k: int | Sequence[int],
        mask_tokens: int | None = None,
    ) -> None:
        trained_masks = adapter.config.mask_tokens
        masks = trained_masks if mask_tokens is None else mask_tokens
        require_whole(
            "mask_tokens", masks, 1, trained_masks, f"null uses all {trained_masks} of the adapter"
        )
        self._straightforward = tree == STRAIGHTFORWARD
        super().__init__(target, adapter, tree, top_k, masks, masks)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Take the next draft's candidates from the masks after the last accepted token."""
        accepted = len(verdict.path)
        row = 0 if self._straightforward else verdict.rows[-1]
        first_probe, count = self._layout.probe_groups[row]
        skipped_masks = accepted if self._straightforward else 0
        logits = scores.logits[first_probe + skipped_masks : first_probe + count]
        if self._draft_vocabulary is not None:
            logits = logits[:, self._draft_vocabulary.tokens]
        width = self._trees.width
        if not width:
            self.candidates = None
        elif self.markov is None:
            self.candidates = self._tokens_at(precise(logits).topk(width).indices)
        else:
            self.candidates = logits
