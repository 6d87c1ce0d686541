"""The n-gram drafter: a table lookup in place of a model (speculative decoding §3.6), and the
table's file.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from bild_lab.engine.draft import Draft
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import pick
from bild_lab.engine.session import Model, Session, on_device
from bild_lab.errors import UserError, require_whole
from bild_lab.files import FilePath, write_atomically

if TYPE_CHECKING:
    from bild_lab.engine.session import LoadedModel


class NGramDrafter(Drafter):
    """Drafts up to `window` tokens from a table, without a model.

    Greedy decoding drafts the most likely token after the last one. Sampling draws from the table's
    distribution, standardized like the target's, and returns it in the draft's probs.
    """

    def __init__(self, target: Model, table: NGramTable, window: int) -> None:
        require_whole("the draft window", window, 1)
        self._device = target.device
        self._table = table
        self._window = window

    def begin(self, request: Request, target: Session) -> None:
        self._request = request
        self._rows: dict[int | None, tuple[Tensor, Tensor]] = {}
        if not request.sampling.greedy:
            # on the host, so that reading a draw does not synchronize. Its seed is drawn from the
            # request's generator: the request's own seed would repeat the random numbers of the
            # acceptance rule
            seed = torch.randint(2**62, (1,), generator=request.generator, device=self._device)
            self._generator = torch.Generator().manual_seed(int(seed))

    def propose(self, tokens: list[int]) -> Draft:
        limits, sampling = self._request.limits, self._request.sampling
        drafted: list[int] = []
        rows: list[tuple[Tensor, Tensor]] = []
        token = tokens[-1]
        window = min(self._window, limits.room(tokens))
        uniforms = None
        if not sampling.greedy:
            uniforms = torch.rand(window, dtype=torch.float64, generator=self._generator)
        for place in range(window):
            if sampling.greedy:
                token = self._table.most_likely_after(token)
            else:
                rows.append(self._distribution(token))
                seen, probs = rows[-1]
                token = int(seen[pick(probs[None], uniforms[place : place + 1])])
            drafted.append(token)
            if token in limits.end_tokens:
                break
        drawn = None if uniforms is None else self._sent(uniforms[: len(drafted)])
        return Draft(
            on_device(drafted, self._device),
            probs=self._dense(rows) if rows else None,
            uniforms=drawn,
        )

    def _distribution(self, token: int) -> tuple[Int[Tensor, " k"], Float[Tensor, " k"]]:
        """Tokens seen after this one and their standardized probabilities; all other tokens have
        probability 0.
        """
        counts = self._table.after(token)
        row = None if counts is self._table.unigrams else token
        if row not in self._rows:
            # in the order of the vocabulary, so that a random number picks the same token from either
            order = counts.tokens.argsort()
            times = counts.times[order].float().log()
            self._rows[row] = counts.tokens[order], self._request.sampling.probs(times[None])[0]
        return self._rows[row]

    def _dense(self, rows: list[tuple[Tensor, Tensor]]) -> Float[Tensor, "n vocab"]:
        """The distributions on the device, as wide as the vocabulary."""
        width = self._table.width
        where = torch.cat([seen + index * width for index, (seen, _) in enumerate(rows)])
        values = torch.cat([probs for _, probs in rows])
        probs = torch.zeros(len(rows) * width, dtype=torch.float32, device=self._device)
        return probs.index_copy_(0, self._sent(where), self._sent(values)).view(len(rows), width)

    def _sent(self, values: Tensor) -> Tensor:
        """Copied to the device without synchronizing."""
        if self._device.type != "cuda":
            return values
        return values.pin_memory().to(self._device, non_blocking=True)


FORMAT = "bild_lab n-grams 1"
BUILD = (
    "python scripts/train_module.py module=ngram name=ngrams pair.target=DIR dataset=NAME"
    " dataset.path=DIR"
)


@dataclass(frozen=True, eq=False)
class TokenCounts:
    """How often tokens were seen: the most frequent first, ties by token id."""

    tokens: Int[Tensor, " k"]
    times: Int[Tensor, " k"]


@dataclass(frozen=True, eq=False)
class NGramTable:
    """Maximum-likelihood unigrams (order 1), or bigrams with unigram backoff (order 2), of a
    corpus.

    width: one more than the largest token id.
    starts: where each token's followers begin; the tokens seen after token c are
        followers[starts[c] : starts[c + 1]].
    vocabulary_hash: of the tokenizer.
    """

    order: int
    width: int
    unigrams: TokenCounts
    starts: Int[Tensor, " contexts+1"]
    followers: TokenCounts
    vocabulary_hash: str
    corpus: str

    @property
    def token_count(self) -> int:
        return int(self.unigrams.times.sum())

    def after(self, token: int) -> TokenCounts:
        """Counts of the tokens after this one; unigram counts if it was never seen."""
        if token + 1 >= len(self.starts):
            return self.unigrams
        start, stop = self.starts[token : token + 2].tolist()
        if start == stop:
            return self.unigrams
        return TokenCounts(self.followers.tokens[start:stop], self.followers.times[start:stop])

    def most_likely_after(self, token: int) -> int:
        return self._most_likely.get(token, self._most_likely[None])

    @cached_property
    def _most_likely(self) -> dict[int | None, int]:
        """The most likely token after each; None: of all."""
        seen = self.starts.diff().nonzero()[:, 0]
        followers = self.followers.tokens[self.starts[seen]]
        return {
            None: int(self.unigrams.tokens[0]),
            **dict(zip(seen.tolist(), followers.tolist(), strict=True)),
        }

    def unigram(self) -> NGramTable:
        """The table of this corpus without its bigrams."""
        empty = self.starts.new_zeros(0)
        return replace(
            self, order=1, starts=self.starts.new_zeros(1), followers=TokenCounts(empty, empty)
        )

    def save(self, path: Path) -> None:
        tensors = {
            "unigram_tokens": self.unigrams.tokens.int(),
            "unigram_times": self.unigrams.times,
            "starts": self.starts,
            "follower_tokens": self.followers.tokens.int(),
            "follower_times": self.followers.times.int(),
        }
        metadata = {
            "format": FORMAT,
            "order": str(self.order),
            "vocabulary_size": str(self.width),
            "vocabulary_hash": self.vocabulary_hash,
            "corpus": self.corpus,
            "tokens": str(self.token_count),
        }
        write_atomically(path, save(tensors, metadata))


def read_table(path: Path) -> NGramTable:
    """Read a table that `NGramTable.save` wrote.

    Raises UserError for a missing file and for any other file.
    """
    if not path.is_file():
        raise UserError(f"no n-gram table {path}; make one with: {BUILD}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise UserError(
                    f"{path} is not an n-gram table of this version; make one with: {BUILD}"
                )
            tensors = {name: file.get_tensor(name).long() for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"cannot read the n-gram table {path}: {error}; make it again with: {BUILD}"
        ) from error
    return NGramTable(
        order=int(metadata["order"]),
        width=int(metadata["vocabulary_size"]),
        unigrams=TokenCounts(tensors["unigram_tokens"], tensors["unigram_times"]),
        starts=tensors["starts"],
        followers=TokenCounts(tensors["follower_tokens"], tensors["follower_times"]),
        vocabulary_hash=metadata["vocabulary_hash"],
        corpus=metadata["corpus"],
    )


def load_table(target: LoadedModel, path: FilePath | None, order: int) -> NGramTable:
    """Load the table of a policy, as unigrams (order 1) or bigrams (order 2).

    Raises UserError for a missing or unreadable table, a table with another vocabulary, and a table
    without bigrams if order is 2.
    """
    require_order(order)
    if not isinstance(path, str):
        raise UserError(
            "policy.table must be the file of an n-gram table, got"
            f" {'null' if path is None else repr(path)}; make one with: {BUILD} and then set"
            " policy.table=outputs/ngrams/table.safetensors"
        )
    table = read_table(Path(path).expanduser())
    checkpoint = target.checkpoint
    if table.vocabulary_hash != vocabulary_hash(checkpoint.vocabulary):
        raise UserError(
            f"the n-gram table {path} ({table.corpus}) has another vocabulary than"
            f" {checkpoint.path} ({len(checkpoint.vocabulary)} pieces); make one with:"
            f" {BUILD.replace('DIR', checkpoint.path, 1)}"
        )
    checkpoint.require_row(
        int(table.unigrams.tokens.max()), f"the tokens of the n-gram table {path}"
    )
    if table.order < order:
        raise UserError(f"{path} holds unigrams, but bigrams are wanted; make them with: {BUILD}")
    return table.unigram() if order == 1 else table


def vocabulary_hash(vocabulary: dict[str, int]) -> str:
    """A hash that is equal for two tokenizers if they map the same pieces to the same ids."""
    pieces = json.dumps(sorted(vocabulary.items()))
    return hashlib.sha256(pieces.encode()).hexdigest()[:16]


def require_order(order: object) -> None:
    """Raise UserError unless it is the order of unigrams or bigrams."""
    require_whole("the order of n-grams", order, 1, 2, "1 counts unigrams, 2 bigrams")
