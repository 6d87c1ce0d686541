"""Decoders with one fault each, which a certificate must find, and sound ones, on chains and trees.

python -m tests.lab.measure.controls FILE.csv runs them on the trained pairs of shared/, for
docs/results/kernels.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from omegaconf import OmegaConf
from torch import Tensor

import bild_lab
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import ROOT, Draft, Tree, Verdict, ancestors
from bild_lab.engine.methods.speculative.combined_drafters import HybridDrafter
from bild_lab.engine.methods.speculative.draft_model import ModelDrafter
from bild_lab.engine.methods.speculative.draft_tree import ModelTreeDrafter
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.methods.speculative.sampling import SpeculativeSampling, acceptance
from bild_lab.engine.methods.speculative.tree_acceptance import (
    PerNode,
    PerRow,
    judged_nodes,
    output_of_trials,
)
from bild_lab.engine.methods.vanilla import target_alone
from bild_lab.engine.models.cached_session import CachedSession, ForwardPass, Layers
from bild_lab.engine.protocols import Acceptance, Drafter
from bild_lab.engine.request import Request, Source
from bild_lab.engine.sampling import Sampling, pick
from bild_lab.engine.session import (
    ALL_LOGITS,
    DEFAULT_OPTIONS,
    LoadedModel,
    Model,
    OutputSpec,
    Rows,
    Scores,
    Session,
    SessionOptions,
)
from bild_lab.engine.trace import Trace
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.data.examples import load_examples
from bild_lab.lab.measure.certificate import count_verdicts
from bild_lab.lab.measure.greedy_certificate import certify
from bild_lab.lab.measure.recorder import RowByRow
from bild_lab.lab.measure.sampled_certificate import certify_sampled
from tests.checkpoints import SHARED

WINDOW = 3


@dataclass(frozen=True)
class Unmasked(Tree):
    """Every row sees every other, whatever the order.

    On PyTorch: the kernels read parents alone.
    """

    @cached_property
    def ancestors(self) -> Bool[Tensor, "m m"]:
        return torch.ones(len(self), len(self), dtype=torch.bool)

    @cached_property
    def depths(self) -> Int[Tensor, " m"]:
        return ancestors(self.parents).sum(-1) - 1


@dataclass(frozen=True)
class Shifted(Tree):
    """Every row is one position too far. On PyTorch, too."""

    @cached_property
    def depths(self) -> Int[Tensor, " m"]:
        return self.ancestors.sum(-1)


def shape_of(work: ForwardPass) -> Int[Tensor, " m"]:
    return torch.arange(-1, work.count - 1) if work.tree is None else work.tree.parents


@dataclass
class FaultyLayers:
    """An engine's layers with a fault in the forward. rejected: whether a row has been dropped so
    far.
    """

    layers: Layers
    fault: str
    rejected: bool = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layers, name)

    def run(self, work: ForwardPass) -> Scores:
        if self.fault == "no causal mask" and work.count > 1 and not work.prompt:
            work = replace(work, tree=Unmasked(shape_of(work)))
        if self.fault == "shifted positions" and self.rejected:
            work = replace(work, tree=Shifted(shape_of(work)))
        scores = self.layers.run(work)
        if self.fault == "shifted targets" and work.logits > 1:
            scores = replace(scores, logits=scores.logits.roll(1, 0))
        return scores


class FaultySession(CachedSession):
    """A session over faulty layers.

    With a stale cache it keeps the first rejected row after the accepted ones.
    """

    def extend(
        self, rows: Rows | Sequence[int] | Tensor, output_spec: OutputSpec = ALL_LOGITS
    ) -> Scores:
        self._rows = len(rows.tokens if isinstance(rows, Rows) else rows)
        return super().extend(rows, output_spec)

    def keep(self, path: Sequence[int]) -> None:
        dropped = [row for row in range(self._rows) if row not in path]
        self.layers.rejected |= bool(dropped)
        super().keep([*path, *dropped[:1]] if self.layers.fault == "stale cache" else path)


@dataclass
class FaultyModel:
    """A loaded model whose sessions have a fault."""

    model: LoadedModel
    fault: str

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def start(
        self, source: Source, room: int, session_options: SessionOptions = DEFAULT_OPTIONS
    ) -> Session:
        sound = self.model.start(source, 3 * room + 32)  # a stale cache grows
        return FaultySession(
            FaultyLayers(sound.layers, self.fault), source.prompt, session_options.forwards
        )


class SampledTree(Drafter):
    """Two tokens after the text and two after the first of them, drawn one after another without
    replacement.
    """

    drafts_trees = True

    def __init__(self, draft: Model) -> None:
        self._draft = draft

    def begin(self, request: Request, target: Session) -> None:
        self._request, self._model = request, RowByRow(self._draft, request)

    def propose(self, tokens: list[int]) -> Draft:
        generator = self._request.generator
        first = self._siblings(tokens, torch.rand(2, dtype=torch.float64, generator=generator))
        if self._request.limits.room(tokens) == 1:
            return replace(first, parents=torch.tensor([ROOT, ROOT]))
        below = self._siblings(
            [*tokens, first.token_list[0]], torch.rand(2, dtype=torch.float64, generator=generator)
        )
        return Draft(
            torch.cat([first.tokens, below.tokens]),
            torch.tensor([ROOT, ROOT, 0, 0]),
            torch.cat([first.probs, below.probs]),
            uniforms=torch.cat([first.uniforms, below.uniforms]),
            drawn_from=self._draft,
        )

    def _siblings(self, tokens: list[int], uniforms: Float[Tensor, " 2"]) -> Draft:
        q = self._request.sampling.probs(self._model.after(tokens)[None])
        one = pick(q, uniforms[:1])
        without = q.clone()
        without[0, one] = 0.0
        without = without / without.sum()
        return Draft(
            torch.cat([one, pick(without, uniforms[1:])]),
            None,
            torch.cat([q, without]),
            uniforms=uniforms,
            drawn_from=self._draft,
        )


class Misdeclared(Drafter):
    """Gives another distribution than the one its tokens were drawn from: as at half the
    temperature.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.drafts_trees = drafter, drafter.drafts_trees

    def begin(self, request: Request, target: Session) -> None:
        self._drafter = self._drafter.start(request, target)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        self._drafter.observe(draft, scores, verdict)

    def propose(self, tokens: list[int]) -> Draft:
        draft = self._drafter.propose(tokens)
        if draft.probs is None:
            return draft
        colder = draft.probs**2
        return replace(draft, probs=colder / colder.sum(-1, keepdim=True))


class Undrawn(Misdeclared):
    """The first token of each draft is the most likely, and counts as drawn."""

    def propose(self, tokens: list[int]) -> Draft:
        draft = self._drafter.propose(tokens)
        if draft.probs is None or not len(draft):
            return draft
        swapped = draft.tokens.clone()
        swapped[-1] = draft.probs[-1].argmax()
        return replace(draft, tokens=swapped)


class Dropping(HybridDrafter):
    """Asks the second drafter where the first has drawn too few tokens, and drops these."""

    def _is_confident(self, draft: Draft) -> bool:
        return draft.depth >= self._min_depth


class FromTarget(SpeculativeSampling):
    """Draws from p after a rejection, where it must draw from what q leaves of p."""

    def __call__(
        self, draft: Draft, logits: Float[Tensor, "n+1 vocab"], request: Request
    ) -> Verdict:
        verdict = super().__call__(draft, logits, request)
        row = verdict.path[-1] + 1 if verdict.path else 0
        if not judged_nodes(draft)[row]:
            return verdict
        return replace(
            verdict, next_token=int(request.sampling.choose(logits[row][None], request.generator))
        )

    def output_distribution(
        self, draft: Draft, logits: PerRow, request: Request, drawn: PerNode
    ) -> PerRow:
        p, q = self.distributions(draft, logits, request)
        return output_of_trials(
            lambda left, node: (acceptance(left, q[node]), left), draft, p, drawn
        )


TARGET_FAULTS = ("no causal mask", "stale cache", "shifted positions", "shifted targets")
OTHER_FAULTS: dict[str, Callable[[Drafter, Acceptance], tuple[Drafter, Acceptance]]] = {
    "misdeclared draft": lambda drafter, rule: (Misdeclared(drafter), rule),
    "undrawn draft": lambda drafter, rule: (Undrawn(drafter), rule),
    "no residual": lambda drafter, rule: (drafter, FromTarget()),
}


def decoder(
    target: LoadedModel, draft: Model, trees: bool, fault: str | None, greedy: bool = False
) -> DraftThenVerify:
    """Speculative decoding by chains or trees, with this fault, or sound."""
    rule: Acceptance = ExactMatch() if greedy else SpeculativeSampling()
    if not trees:
        drafter: Drafter = ModelDrafter(draft, WINDOW)
    else:
        drafter = ModelTreeDrafter(draft, 6, WINDOW, 2, 2) if greedy else SampledTree(draft)
    if fault in OTHER_FAULTS:
        drafter, rule = OTHER_FAULTS[fault](drafter, rule)
    return DraftThenVerify(
        FaultyModel(target, fault) if fault in TARGET_FAULTS else target, drafter, rule
    )


PAIRS = {
    "t5": ("t5-large", "t5-tiny", "{source}"),
    "llama": ("llama-large", "llama-small", "German: {source} English:"),
}
TEXTS, LENGTH = 4, 24


def on_trained_models(family: str) -> Iterator[dict[str, object]]:
    """What the certificates say of each control and of the sound decoder, on texts of a trained
    pair in float32.
    """
    large, small, template = PAIRS[family]
    paths = [str(SHARED / "models" / name) for name in (large, small)]
    decoded_by = bild_lab.load(*paths, "speculative", dtype="float32", engine="native")
    words = [
        "dataset=multi30k",
        f"dataset.path={SHARED / 'data' / 'multi30k'}",
        f"dataset.limit={TEXTS}",
    ]
    spec = OmegaConf.to_container(
        compose_config([*words, f"dataset.prompt_template='{template}'"]).dataset
    )
    prompts = [example.prompt for example in load_examples(DatasetSpec(**spec))]
    decoded_by.load_weights()
    target, draft = decoded_by.models
    for shape in ("chains", "trees"):
        vanilla = target_alone(target)
        for fault in (None, *TARGET_FAULTS, *OTHER_FAULTS):
            sampled, greedy = [], []
            for index, prompt in enumerate(prompts):
                request = decoded_by.request(prompt, LENGTH, Sampling(1.0))
                method = decoder(target, draft, shape == "trees", fault)
                text = emitted(method, request.seeded(0, index))
                sampled.append(
                    certify_sampled(method, method.target, request.seeded(0, index), text)
                )
                if fault in (None, *TARGET_FAULTS):
                    request = decoded_by.request(prompt, LENGTH)
                    method = decoder(target, draft, shape == "trees", fault, greedy=True)
                    text, own = emitted(method, request), emitted(vanilla, request)
                    greedy.append(certify(method.target, request, text, own, method))
            counts = [count_verdicts(several, claimed=True) for several in (sampled, greedy)]
            checks = {found.check for found in sampled if found.check is not None}
            yield {
                "control": fault or "none",
                "family": family,
                "shape": shape,
                "texts": len(prompts),
                "caught": counts[0].defects,
                "check": " and ".join(sorted(checks)),
                "caught_greedy": counts[1].defects if greedy else None,
            }


def emitted(method: DraftThenVerify, request: Request) -> list[int]:
    return method.decode(request, Trace())[request.limits.prompt_length :]


if __name__ == "__main__":  # python -m tests.lab.measure.controls FILE.csv
    torch.set_num_threads(1)
    pd.DataFrame([row for family in PAIRS for row in on_trained_models(family)]).to_csv(
        sys.argv[1], index=False
    )
