"""EAGLE drafts what its layer says of the target's own states, and the text is the target's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import PreTrainedModel

from bild_lab.engine.acceptance import ExactMatch
from bild_lab.engine.adapters.eagle import EAGLE, EAGLE3, Eagle
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import ROOT
from bild_lab.engine.drafters import EagleDrafter
from bild_lab.engine.drafters.model_tree import grow
from bild_lab.engine.drafters.state_trees import named_nodes
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import EVERYTHING, Growth, Rows, Scores, Want, as_rows
from bild_lab.engine.trace import Trace
from tests.engine.adapters.tiny import random_eagle
from tests.engine.models.test_states import ENCODED
from tests.engine.test_decode import NEVER, autoregressive, finished
from tests.policies import in_memory
from tests.stubs import uncached
from tests.thinned import thinned
from tests.tiny import PAD, START, VOCABULARY, tiny_llama, tiny_t5

LENGTH = 12


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def turned(x: Tensor) -> Tensor:
    """Rotary positions of every row, [m, heads, dim]."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x))[:, None, None] * 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def layer(eagle: Eagle, tokens: list[int], states: list[Tensor]) -> Tensor:
    """The papers' layer over pairs, without a cache: the last pair's output."""
    config, m = eagle.config, len(tokens)
    heads, kept = config.layer.num_attention_heads, config.layer.num_key_value_heads
    embedded, state = eagle._target[0][torch.tensor(tokens)], torch.stack(states)
    if config.variant == EAGLE:
        residual = read = eagle.fc(torch.cat([embedded, state], -1))
    else:
        residual = state
        read = torch.cat([norm(embedded, eagle.input_layernorm), norm(state, eagle.hidden_norm)], -1)
    keys, values = turned(eagle.k_proj(read).view(m, kept, -1)), eagle.v_proj(read).view(m, kept, -1)
    query = turned(eagle.q_proj(read).view(m, heads, -1))[-1]
    mixed = []
    for head in range(heads):
        own = head // (heads // kept)
        scores = keys[:, own] @ query[head] / query.shape[-1] ** 0.5
        mixed.append(scores.softmax(0) @ values[:, own])
    x = residual[-1] + eagle.o_proj(torch.cat(mixed))
    fed = norm(x, eagle.post_attention_layernorm)
    return x + eagle.down_proj(silu(eagle.gate_proj(fed)) * eagle.up_proj(fed))


@torch.inference_mode()
def target_states(eagle: Eagle, module: PreTrainedModel, tokens: list[int]) -> list[Tensor]:
    """What EAGLE reads of the target at every token but the last."""
    ids, options = torch.tensor([tokens[:-1]]), {"output_hidden_states": True}
    if module.config.is_encoder_decoder:
        options["encoder_hidden_states"] = module.get_encoder()(ENCODED).last_hidden_state
    ran = module.get_decoder()(ids, **options)
    if eagle.config.variant == EAGLE:
        scaled = getattr(module.config, "scale_decoder_outputs", False)
        return list(ran.last_hidden_state[0] * (module.config.d_model**-0.5 if scaled else 1.0))
    return [eagle.fc(row) for row in torch.cat([ran.hidden_states[at] for at in eagle.config.target_layers], -1)[0]]


@dataclass
class NaiveSession:
    """The layer behind one text, without a cache, for `grow`."""

    eagle: Eagle
    tokens: list[int]
    states: list[Tensor]
    drafted: list[int] = field(default_factory=list)

    @torch.inference_mode()
    def extend(self, rows: Rows | Sequence[int], want: Want = EVERYTHING) -> Scores:
        rows = as_rows(rows)
        if rows.tree is None:
            return Scores(self.behind([])[None])
        self.drafted += [int(token) for token in rows.tokens]
        parents = rows.tree.parents.tolist()
        branches: list[list[int]] = []
        for token, parent in zip(self.drafted, parents, strict=True):
            branches.append([*([] if parent == ROOT else branches[parent]), token])
        return Scores(torch.stack([self.behind(branch) for branch in branches[-len(rows.tokens) :]]))

    @torch.inference_mode()
    def behind(self, branch: list[int]) -> Tensor:
        """Scores of the token behind the text and these drafted ones."""
        tokens, states = list(self.tokens[1:]), list(self.states)
        output = layer(self.eagle, tokens, states)
        for token in branch:
            tokens.append(token)
            states.append(output)
            output = layer(self.eagle, tokens, states)
        return self.eagle.logits(output)


def drafted(eagle: Eagle, module: PreTrainedModel, text: list[int], tree: str, room: int) -> list[int]:
    """The tokens of the tree behind this text."""
    naive = NaiveSession(eagle, text, target_states(eagle, module, text))
    if tree == "dynamic":
        growth = Growth(6, min(4, room), 2, 3, NEVER)
        return grow(naive, text, growth, Sampling()).tokens
    found: dict[int, list[int]] = {ROOT: []}
    nodes = [node for node in named_nodes(tree, 2, 4, VOCABULARY) if node.depth < min(4, room)]
    for at, node in enumerate(nodes):
        branch = found[node.parent]
        found[at] = [*branch, naive.behind(branch).topk(node.rank + 1).indices.tolist()[-1]]
    return [found[at][-1] for at in range(len(nodes))]


CASES = [
    (variant, family, engine, tree)
    for tree in ("chain", "dynamic", "eagle_tree")
    for engine in ("native", "hf")
    for variant, family in ((EAGLE3, "t5"), (EAGLE, "llama"), (EAGLE3, "llama"), (EAGLE, "t5"))
]


@pytest.mark.parametrize(("variant", "family", "engine", "tree"), thinned(CASES, 9))
def test_proposals_are_those_of_the_papers_layer_without_a_cache(
    variant: str, family: str, engine: str, tree: str
) -> None:
    module = (tiny_t5(4, layers=3) if family == "t5" else tiny_llama(4, layers=3)).double()
    eagle = random_eagle(variant, module.config, known=20 if variant == EAGLE3 else None).double().requires_grad_(False)
    source = Source((PAD,), ENCODED) if family == "t5" else Source((START, 5, 9, 12))
    trace, request = Trace(), Request(source, Limits(len(source.prompt), LENGTH, NEVER))
    drafter = EagleDrafter(in_memory(module, engine), eagle, tree, 4, nodes=6, width=2, children=3)
    actual = DraftThenVerify(in_memory(module, engine), drafter, ExactMatch()).decode(request, trace)
    expected = autoregressive(uncached(module, source), source.prompt, finished(source, LENGTH, NEVER))
    assert actual == expected
    tokens = list(source.prompt)
    assert trace.rounds[0].drafted == ()
    for before, each in zip(trace.rounds, trace.rounds[1:], strict=False):
        tokens = actual[: len(tokens) + before.accepted + 1]
        room = len(source.prompt) + LENGTH - len(tokens)
        assert list(each.drafted) == drafted(eagle, module, tokens, tree, room)
    assert trace.accepted > 0 or tree == "chain"


def test_forwards_of_the_layer_are_counted() -> None:
    module = tiny_llama(4)
    eagle = random_eagle(EAGLE, module.config).requires_grad_(False)
    target, trace = in_memory(module, "native"), Trace()
    drafter = EagleDrafter(target, eagle, "full_tree", 3, [2, 2])
    request = Request(Source((START, 5, 9)), Limits(3, 4, NEVER))
    DraftThenVerify(target, drafter, ExactMatch()).decode(request, trace)
    ours = [one for one in trace.forwards if one.config is eagle.config.layer]
    assert [(one.rows, one.cached, one.scored) for one in ours[:2]] == [(3, 0, 1), (2, 3, 2)]
    assert sum(each.draft_calls for each in trace.rounds) == len(ours)
