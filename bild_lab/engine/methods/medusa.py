"""Medusa-1 (Cai et al., 2024): heads that predict further ahead than the target's own head, and the
drafter that makes a tree of their candidates.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedConfig

from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.draft_vocabulary import DraftVocabulary
from bild_lab.engine.methods.candidate_trees import TreeFile
from bild_lab.engine.methods.candidates import CandidateDrafter
from bild_lab.engine.methods.markov import MarkovHead
from bild_lab.engine.methods.module_folder import (
    FolderKind,
    SavedModule,
    base_sizes,
    describe_shapes,
    described_in,
    read_tensors,
    released_folder,
    shapes,
)
from bild_lab.engine.methods.state_layers import as_they_are
from bild_lab.engine.models.checkpoint.vocabulary import biased, head_bias
from bild_lab.engine.models.native.cpu import PackedHeads
from bild_lab.engine.models.native.cpu.library import runs_by_cpu_kernels
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import precise
from bild_lab.engine.session import OutputSpec, Scores, Session
from bild_lab.engine.trace import Forward
from bild_lab.errors import UserError, require_flag, require_whole
from bild_lab.files import FilePath

if TYPE_CHECKING:
    from bild_lab.engine.session import LoadedModel

TRAIN = (
    "python scripts/train_module.py module=medusa name=medusa model.path=DIR dataset=NAME"
    " dataset.path=DIR"
)
KIND = FolderKind(
    weights="heads.safetensors",
    config="heads_config.json",
    noun="folder of Medusa heads",
    remedy=f"make one with: {TRAIN} and give policy.heads=outputs/medusa/heads",
)
RELEASED = FolderKind(  # the folders that FasterDecoding releases
    weights="medusa_lm_head.safetensors",
    config="config.json",
    noun="release of Medusa heads",
    remedy=(
        "give a release such as policy.heads=FasterDecoding/medusa-vicuna-7b-v1.3, or train your"
        " own: "
    )
    + TRAIN,
)
RELEASED_WEIGHTS = (RELEASED.weights, "medusa_lm_head.pt")


@dataclass(frozen=True)
class MedusaConfig:
    """The shapes of the heads, and the model they were trained for.

    heads: how many tokens are predicted beyond the target's own next token.
    layers: residual blocks in each head.
    hidden_size, vocabulary: the base model's.
    base: its path and the fingerprint of its weights.
    shared: all heads end in the target's own matrix to the vocabulary, instead of one each.
    markov_rank: of a `MarkovHead`, or 0.
    """

    heads: int
    layers: int
    hidden_size: int
    vocabulary: int
    base: Mapping[str, Any] = field(default_factory=dict)
    shared: bool = False
    markov_rank: int = 0

    def __post_init__(self) -> None:
        require_whole("module.heads", self.heads, 1)
        require_flag("module.shared", self.shared)
        require_whole("module.markov_rank", self.markov_rank, 0)
        alike = "heads without blocks that share a matrix are one" if self.shared else ""
        require_whole("module.layers", self.layers, 1 if self.shared else 0, None, alike)


class MedusaHeads(SavedModule):
    """Head i (from 0) predicts the token i + 2 positions ahead, from the input of the target's own
    head.

    Each head is `layers` residual blocks x + silu(W x + b), then a matrix to the vocabulary. W and
    b start at zero, so that the blocks are the identity at first. The heads are stacked: blocks
    [heads, layers, dim, dim], biases [heads, layers, dim], outputs [heads, vocab, dim]. With a
    shared matrix (Stern et al., 2018, §6) `attach` gives them the target's own, which is neither
    trained nor saved; there are no outputs then. Other matrices can be attached too, such as a part
    of their rows.
    """

    kind, config_class = KIND, MedusaConfig

    def __init__(self, config: MedusaConfig, seed: int = 0) -> None:
        super().__init__(config)
        dim = config.hidden_size
        self.blocks = nn.Parameter(torch.zeros(config.heads, config.layers, dim, dim))
        self.biases = nn.Parameter(torch.zeros(config.heads, config.layers, dim))
        if not config.shared:
            self.outputs = nn.Parameter(torch.zeros(config.heads, config.vocabulary, dim))
        self.markov = (
            MarkovHead(config.vocabulary, config.markov_rank, seed) if config.markov_rank else None
        )
        self._attached: tuple[Tensor, ...] = ()
        self._bias: Tensor | None = None
        self._scores_of_products: Callable[[Tensor], Tensor] = as_they_are

    @classmethod
    def fresh(
        cls,
        model_config: PreTrainedConfig,
        lm_head: Float[Tensor, "vocab dim"],
        base: Mapping[str, Any],
        heads: int,
        layers: int = 1,
        shared: bool = False,
        markov_rank: int = 0,
        seed: int = 0,
    ) -> MedusaHeads:
        """Untrained heads, each a copy of the model's own head.

        Raises UserError for an encoder–decoder.
        """
        config = MedusaConfig(
            heads=heads,
            layers=layers,
            hidden_size=base_sizes(model_config, "Medusa")["hidden_size"],
            vocabulary=lm_head.shape[0],
            base=dict(base),
            shared=shared,
            markov_rank=markov_rank,
        )
        heads_module = cls(config, seed)
        if shared:
            return heads_module.attach(lm_head[None])
        with torch.no_grad():
            heads_module.outputs.copy_(lm_head.detach())  # every head starts as the model's own
        return heads_module

    @classmethod
    def load(cls, folder: Path | str) -> Self:
        """Own heads, or released ones from a folder or the hub.

        Raises UserError for any other folder.
        """
        place = released_folder(str(folder), RELEASED, RELEASED_WEIGHTS)
        released = any((place / name).is_file() for name in RELEASED_WEIGHTS)
        return read_released(place) if released else super().load(place)

    def attach(
        self,
        matrices: Float[Tensor, "ends part dim"],
        bias: Float[Tensor, " part"] | None = None,
        scores_of_products: Callable[[Tensor], Tensor] = as_they_are,
    ) -> MedusaHeads:
        """End in these matrices: one that all heads share, or one for each. bias: −inf for ids
        without a token (`head_bias`). scores_of_products: what the target makes of a shared matrix's
        products.
        """
        self._attached, self._bias = (matrices.detach(),), bias
        self._scores_of_products = scores_of_products
        return self

    def forward(self, hidden: Float[Tensor, "*rows dim"]) -> Float[Tensor, "heads *rows vocab"]:
        rows = hidden.reshape(-1, hidden.shape[-1])  # [n, dim]
        logits = self._logits(rows, self.config.heads)
        return logits.view(self.config.heads, *hidden.shape[:-1], -1)

    def most_likely(
        self, hidden: Float[Tensor, " dim"], depth: int, count: int
    ) -> Int[Tensor, "depth count"]:
        """The first heads' most likely tokens."""
        return self.scores(hidden, depth).topk(count).indices

    def scores(self, hidden: Float[Tensor, " dim"], depth: int) -> Float[Tensor, "depth vocab"]:
        """The first heads' logits, without the bias of a Markov head."""
        return precise(self._logits(hidden[None], depth)[:, 0])

    def _logits(self, rows: Float[Tensor, "n dim"], depth: int) -> Float[Tensor, "depth n vocab"]:
        """The logits of the first `depth` heads."""
        x = rows.expand(depth, *rows.shape)
        for layer in range(self.config.layers):
            x = x + silu(x @ self.blocks[:depth, layer].mT + self.biases[:depth, layer, None])
        matrices = self._attached[0] if self._attached else self.outputs
        return biased(self._scores_of_products(x @ matrices[:depth].mT), self._bias)


def read_released(folder: Path) -> MedusaHeads:
    """Heads in the layout of FasterDecoding's releases (`MedusaModel` of
    medusa/model/medusa_model.py), on the CPU.

    A head i of n blocks has i.0.linear.weight, i.0.linear.bias … and the matrix i.n.weight. Their
    numbers are taken from the weights: the authors read them without asking whether config.json
    names as many. Raises UserError for weights that are no such heads, and for fewer heads than
    config.json names.
    """
    tensors = read_tensors(folder, RELEASED, RELEASED_WEIGHTS)
    with described_in(folder, RELEASED) as path:
        values = json.loads(path.read_text(encoding="utf-8"))
        named_heads, base_path = values["medusa_num_heads"], values["base_model_name_or_path"]
    config = _released_shapes(tensors, base_path)
    if config is None or config.heads < named_heads:
        raise UserError(
            f"{folder} must hold {named_heads} Medusa heads, got"
            f" {describe_shapes(shapes(tensors))}; {RELEASED.remedy}"
        )
    heads, layers = config.heads, config.layers

    def stacked(parameter: str) -> Tensor:
        """[heads, layers, …], of all residual blocks."""
        heads_stack = []
        for head in range(heads):
            names = [f"{head}.{layer}.linear.{parameter}" for layer in range(layers)]
            heads_stack.append(torch.stack([tensors[name] for name in names]))
        return torch.stack(heads_stack)

    heads_module = MedusaHeads(config).float()
    weights = {
        "outputs": torch.stack([tensors[f"{head}.{layers}.weight"] for head in range(heads)])
    }
    if layers:
        weights |= {"blocks": stacked("weight"), "biases": stacked("bias")}
    heads_module.load_state_dict(weights, strict=layers > 0)
    return heads_module


def _released_shapes(tensors: Mapping[str, Tensor], base_path: str) -> MedusaConfig | None:
    """The shapes of the heads in a release, as its weights show them; None where these are no such
    heads.
    """
    heads = sum(re.fullmatch(r"\d+\.\d+\.weight", name) is not None for name in tensors)
    matrices = [re.fullmatch(r"0\.(\d+)\.weight", name) for name in tensors]
    layers = max((int(matrix[1]) for matrix in matrices if matrix is not None), default=None)
    if layers is None:
        return None
    vocabulary, dim = tensors[f"0.{layers}.weight"].shape
    expected_shapes: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        for layer in range(layers):
            expected_shapes[f"{head}.{layer}.linear.weight"] = (dim, dim)
            expected_shapes[f"{head}.{layer}.linear.bias"] = (dim,)
        expected_shapes[f"{head}.{layers}.weight"] = (vocabulary, dim)
    if expected_shapes != shapes(tensors):
        return None
    return MedusaConfig(heads, layers, dim, vocabulary, {"path": base_path})


def load_medusa(
    target: LoadedModel, path: FilePath | None, vocabulary: DraftVocabulary | None = None
) -> MedusaHeads:
    """The heads in this folder, in the target's precision.

    Raises UserError as `SavedModule.load_for` does.
    """
    base = base_sizes(target.checkpoint.config, "Medusa")
    sizes = {name: base[name] for name in ("hidden_size", "vocabulary")}
    return MedusaHeads.load_for(target, path, vocabulary, **sizes)


class MedusaDrafter(CandidateDrafter):
    """A tree of the most likely tokens of each head.

    The heads read the hidden state of the last accepted token, from which the target's own head
    chose the next token. Head i (from 0) predicts the token i + 1 positions after that one. The
    first round drafts nothing.

    Each head's product with its vocabulary matrix is recorded as a forward without layers, that of
    heads with a shared matrix as one; residual blocks and a Markov head are not. Heads beyond the
    tree's depth do not run.

    tree: full_tree (the paper's Cartesian product), mc_sim_7b_63 (the authors' for the heads that
    they released), efficient_tree or narrowing_tree (BiTA's), or a file of `scripts/fit_tree.py`.
    top_k: candidates of each head, one number or one for each of the first heads; not for
    mc_sim_7b_63 or a file.
    """

    required_outputs = OutputSpec(head_input=True)

    def __init__(
        self, target: LoadedModel, heads: MedusaHeads, tree: TreeFile, top_k: int | Sequence[int]
    ) -> None:
        super().__init__(target, heads, tree, top_k, heads.config.heads)
        self._shared = heads.config.shared
        self._config = target.checkpoint.config
        # made once for all copies of this drafter
        self._heads = lru_cache(maxsize=1)(partial(heads_for_engine, target, heads))
        if not self._shared:  # a shared matrix needs the target's weights
            self._heads()

    def begin(self, request: Request, target: Session) -> None:
        super().begin(request, target)
        self._forwards = target.forwards

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Run the heads on the last accepted token for the next draft's candidates."""
        depth, width = self._trees.depth, self._trees.width
        if not width:
            return
        heads = self._heads()
        state = scores.head_input[verdict.rows[-1]]
        if self.markov is None:
            self.candidates = self._tokens_at(heads.most_likely(state, depth, width))
        else:
            self.candidates = heads.scores(state, depth)
        heads_per_forward = depth if self._shared else 1
        forward = Forward(
            self._config,
            rows=0,
            scored=heads_per_forward,
            layers=0,
            vocabulary=None if self._draft_vocabulary is None else self.vocabulary_size,
        )
        self._forwards += [forward] * (depth // heads_per_forward)


def heads_for_engine(target: LoadedModel, heads: MedusaHeads) -> MedusaHeads | PackedHeads:
    """The heads as they run on the target's engine. With a draft vocabulary their tokens are
    indices into it.
    """
    shared = heads.config.shared
    packed = runs_by_cpu_kernels(target, heads.blocks.dtype)
    if packed and shared and heads.draft_vocabulary is None:
        return PackedHeads(heads.blocks, heads.biases, target.packed)
    outputs = target.vocabulary_weights()[1][None] if shared else heads.outputs
    bias = head_bias(target.checkpoint, heads.blocks.dtype, target.device)
    tokens = None
    if heads.draft_vocabulary is not None:
        tokens = heads.draft_vocabulary.tokens
        outputs, bias = outputs[:, tokens], None
    if packed:
        return PackedHeads(heads.blocks, heads.biases, outputs, bias)
    scores = partial(target.scores_of_products, tokens=tokens) if shared else as_they_are
    return copy.copy(heads).attach(outputs, bias, scores)
