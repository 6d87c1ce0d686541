"""The n-gram drafter: a table lookup in place of a model (speculative decoding §3.6)."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bild_lab.engine.draft import Draft
from bild_lab.engine.drafters.ngram_table import NGramTable
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import pick
from bild_lab.engine.session import Model, Session, on_device
from bild_lab.errors import require_whole


class NGramDrafter(Drafter):
    """Drafts up to `window` tokens from a table, without a model.

    Greedy decoding drafts the likeliest token after the last one. Sampling draws from the table's
    distribution, standardized like the target's, and returns it in the draft's probs.
    """

    drafts_trees = False

    def __init__(self, target: Model, table: NGramTable, window: int) -> None:
        require_whole("the draft window", window, 1)
        self._device = target.device
        self._table = table
        self._window = window

    def start(self, request: Request, target: Session) -> None:
        self._request = request
        self._rows: dict[int | None, tuple[Tensor, Tensor]] = {}
        if not request.sampling.greedy:
            # on the host, so that reading a draw does not synchronize. Its seed is drawn from the request's
            # generator: the request's own seed would repeat the random numbers of the acceptance rule
            seed = torch.randint(2**62, (1,), generator=request.generator, device=self._device)
            self._generator = torch.Generator().manual_seed(int(seed))

    def propose(self, tokens: list[int]) -> Draft:
        limits, sampling = self._request.limits, self._request.sampling
        drafted: list[int] = []
        rows: list[tuple[Tensor, Tensor]] = []
        token = tokens[-1]
        window = min(self._window, limits.room(tokens))
        uniforms = None if sampling.greedy else torch.rand(window, dtype=torch.float64, generator=self._generator)
        for place in range(window):
            if sampling.greedy:
                token = self._table.likeliest_after(token)
            else:
                rows.append(self._distribution(token))
                seen, probs = rows[-1]
                token = int(seen[pick(probs[None], uniforms[place : place + 1])])
            drafted.append(token)
            if token in limits.end_tokens:
                break
        drawn = None if uniforms is None else self._sent(uniforms[: len(drafted)])
        return Draft(on_device(drafted, self._device), probs=self._dense(rows) if rows else None, uniforms=drawn)

    def _distribution(self, token: int) -> tuple[Int[Tensor, " k"], Float[Tensor, " k"]]:
        """Tokens seen after this one and their standardized probabilities; all other tokens have probability 0."""
        counts = self._table.after(token)
        row = None if counts is self._table.unigrams else token
        if row not in self._rows:
            order = counts.tokens.argsort()  # as in the vocabulary, so that a random number picks the same from either
            times = counts.times[order].float().log()
            self._rows[row] = counts.tokens[order], self._request.sampling.probs(times[None])[0]
        return self._rows[row]

    def _dense(self, rows: list[tuple[Tensor, Tensor]]) -> Float[Tensor, "n vocab"]:
        """The distributions on the device, as wide as the vocabulary."""
        width = self._table.width
        where = torch.cat([seen + index * width for index, (seen, _) in enumerate(rows)])
        values = torch.cat([probs for _, probs in rows])
        probs = torch.zeros(len(rows) * width, device=self._device)
        return probs.index_copy_(0, self._sent(where), self._sent(values)).view(len(rows), width)

    def _sent(self, values: Tensor) -> Tensor:
        """Copied to the device without synchronizing."""
        return values.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else values
