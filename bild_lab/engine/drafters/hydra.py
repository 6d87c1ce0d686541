"""Drafts from heads of which each reads the tokens drafted before its own (Ankner et al., 2024, Hydra)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedConfig

from bild_lab.engine.drafters.state_trees import StateTreeDrafter
from bild_lab.engine.heads.hydra import HydraHeads
from bild_lab.engine.request import Request
from bild_lab.engine.session import EVERYTHING, Rows, Scores, Session, Want, as_rows, on_device
from bild_lab.engine.trace import Forward


class HydraDrafter(StateTreeDrafter):
    """A tree by Hydra's heads, one head for each level.

    Each head's product with its vocabulary matrix is recorded as a forward without layers, for the rows of its level.
    The blocks are far smaller and not recorded. Heads beyond the window do not run; a window longer than there are
    heads is cut to these.
    """

    _heads: HydraHeads

    @property
    def longest(self) -> int:
        return self._heads.config.heads

    def reads(self) -> Want:
        return Want(head_input=True)

    def opened(self, request: Request, target: Session) -> HydraSession:
        self._heads.attach(self._target.vocabulary_weights()[0])
        return HydraSession(self._heads, self._target.checkpoint.config, target.forwards, len(request.source.prompt))

    def states(self, scores: Scores) -> Float[Tensor, "m dim"]:
        return scores.head_input


class HydraSession:
    """The last state of a text, and the branches drafted after it, each with its tokens."""

    def __init__(self, heads: HydraHeads, config: PreTrainedConfig, forwards: list[Forward], length: int) -> None:
        self.forwards, self.length = forwards, length - 1
        self._heads, self._config = heads, config
        self._state: Tensor | None = None
        self._branches: list[Int[Tensor, "m path"]] = []  # of each level's rows, from the text's last token on

    @property
    def ready(self) -> bool:
        return self._state is not None

    @torch.inference_mode()
    def receive(self, states: Float[Tensor, "m dim"]) -> None:
        self._state = states[-1:].to(self._heads.outputs.dtype)
        self.length += states.shape[0]

    @torch.inference_mode()
    def extend(self, rows: Rows | Sequence[int] | Int[Tensor, " m"], want: Want = EVERYTHING) -> Scores:
        rows = as_rows(rows)
        tokens = on_device(rows.tokens, self._state.device)[:, None]
        if rows.tree is None:
            self._branches = [tokens[-1:]]
        else:
            count, level = tokens.shape[0], self._branches[-1].shape[0]
            earlier = len(rows.tree) - count - level if len(self._branches) > 1 else -1  # rows before the last level's
            above = self._branches[-1][rows.tree.parents[-count:] - earlier]
            self._branches.append(torch.cat([above, tokens], 1))
        branches = self._branches[-1]
        states = self._state.expand(branches.shape[0], -1)
        self.forwards.append(Forward(self._config, rows=0, scored=branches.shape[0], layers=0))
        return Scores(self._heads(len(self._branches) - 1, states, branches))
