"""What EAGLE's layer drafts behind a text, without a cache: the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import PreTrainedModel

from bild_lab.engine.draft import ROOT
from bild_lab.engine.methods.eagle.module import EAGLE, JOINT_NORM, LAYER_NORMS, Eagle
from bild_lab.engine.methods.eagle.static_trees import named_nodes
from bild_lab.engine.methods.speculative.draft_tree import grow_tree
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import ALL_LOGITS, OutputSpec, Rows, Scores, TreeSpec, as_rows
from bild_lab.engine.trace import Round
from tests.engine.models.test_states import ENCODED
from tests.tiny import VOCABULARY

Behind = Callable[[list[int]], Tensor]  # scores of the token behind a text and these drafted ones


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def turned(x: Tensor) -> Tensor:
    """Rotary positions of every row, [m, heads, dim]."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x))[:, None, None] * 10000.0 ** (
        -torch.arange(half, dtype=x.dtype) / half
    )
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1
    )


def fused(eagle: Eagle, states: Tensor) -> Tensor:
    """The target's states of one token, as wide as the layer."""
    config = eagle.config
    if config.variant == EAGLE:
        return states
    if config.state_norm == JOINT_NORM:
        states = norm(states, eagle.input_norm)
    elif config.state_norm == LAYER_NORMS:
        parts = zip(states.split(config.target_size), eagle.fc_norm, strict=True)
        states = torch.cat([norm(part, weight) for part, weight in parts])
    return eagle.fc(states)


def layer(eagle: Eagle, tokens: list[int], states: list[Tensor]) -> Tensor:
    """The papers' layer over pairs, without a cache: the last pair's output."""
    config, m = eagle.config, len(tokens)
    heads, kept = config.layer.num_attention_heads, config.layer.num_key_value_heads
    table = eagle.embed_tokens if config.embeds else eagle._target[0]
    embedded, state = table[torch.tensor(tokens)], torch.stack(states)
    if config.variant == EAGLE:
        residual = read = eagle.fc(torch.cat([embedded, state], -1))
    else:
        normed = norm(state, eagle.hidden_norm)
        residual = normed if config.normed_residual else state
        read = torch.cat([norm(embedded, eagle.input_layernorm), normed], -1)
    queries = eagle.q_proj(read).view(m, heads, -1)
    keys, values = (part(read).view(m, kept, -1) for part in (eagle.k_proj, eagle.v_proj))
    if config.head_norms:
        queries, keys = norm(queries, eagle.q_norm), norm(keys, eagle.k_norm)
    query, keys = turned(queries)[-1], turned(keys)
    mixed = []
    for head in range(heads):
        own = head // (heads // kept)
        scores = keys[:, own] @ query[head] / query.shape[-1] ** 0.5
        mixed.append(scores.softmax(0) @ values[:, own])
    x = residual[-1] + eagle.o_proj(torch.cat(mixed))
    fed = norm(x, eagle.post_attention_layernorm)
    output = x + eagle.down_proj(silu(eagle.gate_proj(fed)) * eagle.up_proj(fed))
    return norm(output, eagle.norm) if config.feeds_normed else output


def head_scores(eagle: Eagle, output: Tensor) -> Tensor:
    """The scores of the target's tokens behind a pair with this output."""
    config = eagle.config
    if config.variant == EAGLE:
        scores = eagle._target[1] @ output
    else:
        scores = torch.full((config.vocabulary,), -torch.inf, dtype=output.dtype)
        read = output if config.feeds_normed else norm(output, eagle.norm)
        for own, score in enumerate(eagle.lm_head(read)):
            scores[own + eagle.d2t[own]] = score
    return scores if eagle._bias is None else scores + eagle._bias


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
    return [
        fused(eagle, row)
        for row in torch.cat([ran.hidden_states[at] for at in eagle.config.target_layers], -1)[0]
    ]


def eagle_behind(eagle: Eagle, module: PreTrainedModel, text: list[int]) -> Behind:
    """The layer's scores behind this text."""
    own = target_states(eagle, module, text)

    @torch.inference_mode()
    def behind(branch: list[int]) -> Tensor:
        tokens, states = list(text[1:]), list(own)
        output = layer(eagle, tokens, states)
        for token in branch:
            tokens.append(token)
            states.append(output)
            output = layer(eagle, tokens, states)
        return head_scores(eagle, output)

    return behind


@dataclass
class NaiveSession:
    """Scores behind one text, without a cache, for `grow_tree`."""

    behind: Behind
    drafted: list[int] = field(default_factory=list)

    def extend(self, rows: Rows | Sequence[int], output_spec: OutputSpec = ALL_LOGITS) -> Scores:
        rows = as_rows(rows)
        if rows.tree is None:
            return Scores(self.behind([])[None])
        self.drafted += [int(token) for token in rows.tokens]
        parents = rows.tree.parents.tolist()
        branches: list[list[int]] = []
        for token, parent in zip(self.drafted, parents, strict=True):
            branches.append([*([] if parent == ROOT else branches[parent]), token])
        return Scores(
            torch.stack([self.behind(branch) for branch in branches[-len(rows.tokens) :]])
        )


def grown(behind: Behind, tree_spec: TreeSpec) -> list[int]:
    """The tokens of the tree that grows."""
    return grow_tree(NaiveSession(behind), [0], tree_spec, Sampling()).tokens


def drafted(
    behind: Behind, tree: str, top_k: int | list[int], window: int, depth: int
) -> list[int]:
    """The tokens of a tree of a fixed shape, down to this depth."""
    found: dict[int, list[int]] = {ROOT: []}
    nodes = [node for node in named_nodes(tree, top_k, window, VOCABULARY) if node.depth < depth]
    for at, node in enumerate(nodes):
        branch = found[node.parent]
        found[at] = [*branch, behind(branch).topk(node.rank + 1).indices.tolist()[-1]]
    return [found[at][-1] for at in range(len(nodes))]


def texts_before(
    rounds: Sequence[Round], whole: list[int], prompt: int
) -> Iterator[tuple[list[int], Round]]:
    """Every round but the first, with the text that it drafted behind."""
    length = prompt
    for before, each in pairwise(rounds):
        length += before.accepted + 1
        yield whole[:length], each
