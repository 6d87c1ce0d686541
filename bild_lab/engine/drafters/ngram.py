"""N-gram drafters: a table lookup in place of a model (speculative decoding §3.6)."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import draw
from bild_lab.engine.session import Model, Scores, rows_of
from bild_lab.errors import UserError
from bild_lab.files import write_atomically
from bild_lab.lab.config import require_whole

if TYPE_CHECKING:
    from bild_lab.engine.models.checkpoint import Checkpoint
    from bild_lab.engine.models.hf import HuggingFaceModel
    from bild_lab.lab.data.tasks import Example

FORMAT = "bild_lab n-grams 1"
BUILD = "python scripts/build_ngrams.py name=ngrams pair.target=DIR dataset=NAME dataset.path=DIR ngram.order=2"


@dataclass(frozen=True, eq=False)
class Counts:
    """How often tokens were seen: the most frequent first, equals by token id."""

    tokens: Int[Tensor, " k"]
    times: Int[Tensor, " k"]


@dataclass(frozen=True, eq=False)
class NGramTable:
    """Maximum-likelihood unigrams (order 1) or bigrams backed by unigrams (order 2) of a corpus.

    width: one more than the largest token id. starts: where each token's followers begin; what was
    seen after token c is followers[starts[c] : starts[c + 1]]. vocabulary_hash: of the tokenizer.
    """

    order: int
    width: int
    unigrams: Counts
    starts: Int[Tensor, " contexts+1"]
    followers: Counts
    vocabulary_hash: str
    corpus: str

    @property
    def token_count(self) -> int:
        return int(self.unigrams.times.sum())

    def after(self, token: int) -> Counts:
        """What followed this token; all tokens where it was never seen."""
        begin, end = self.starts[token : token + 2].tolist() if token + 1 < len(self.starts) else (0, 0)
        if begin == end:
            return self.unigrams
        return Counts(self.followers.tokens[begin:end], self.followers.times[begin:end])

    def likeliest_after(self, token: int) -> int:
        return self._likeliest.get(token, self._likeliest_of_all)

    @cached_property
    def _likeliest(self) -> dict[int, int]:
        seen = self.starts.diff().nonzero()[:, 0]
        return dict(zip(seen.tolist(), self.followers.tokens[self.starts[seen]].tolist(), strict=True))

    @cached_property
    def _likeliest_of_all(self) -> int:
        return int(self.unigrams.tokens[0])

    def unigram(self) -> NGramTable:
        """The same corpus without its bigrams."""
        empty = self.starts.new_zeros(0)
        return replace(self, order=1, starts=self.starts.new_zeros(1), followers=Counts(empty, empty))

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
    """A table that `NGramTable.save` wrote. Raises UserError for a missing file and for any other file."""
    if not path.is_file():
        raise UserError(f"no n-gram table {path}; make one with: {BUILD}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise UserError(f"{path} is not an n-gram table of this version; make one with: {BUILD}")
            tensors = {name: file.get_tensor(name).long() for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot read the n-gram table {path}: {error}; make it again with: {BUILD}") from error
    return NGramTable(
        order=int(metadata["order"]),
        width=int(metadata["vocabulary_size"]),
        unigrams=Counts(tensors["unigram_tokens"], tensors["unigram_times"]),
        starts=tensors["starts"],
        followers=Counts(tensors["follower_tokens"], tensors["follower_times"]),
        vocabulary_hash=metadata["vocabulary_hash"],
        corpus=metadata["corpus"],
    )


def load_table(target: HuggingFaceModel, path: str | None, order: int) -> NGramTable:
    """The table of a policy, as unigrams or bigrams.

    Raises UserError for no or an unreadable table, one of another vocabulary, and one without bigrams
    where they are wanted.
    """
    require_order(order)
    if not isinstance(path, str):
        raise UserError(
            f"policy.table must be the file of an n-gram table, got {'null' if path is None else repr(path)}; "
            f"make one with: {BUILD} and then set policy.table=outputs/ngrams/table.safetensors"
        )
    table = read_table(Path(path).expanduser())
    checkpoint = target.checkpoint
    if table.vocabulary_hash != vocabulary_hash(checkpoint.vocabulary):
        raise UserError(
            f"the n-gram table {path} ({table.corpus}) has another vocabulary than {checkpoint.path} "
            f"({len(checkpoint.vocabulary)} pieces); make one with: {BUILD.replace('DIR', checkpoint.path, 1)}"
        )
    if table.order < order:
        raise UserError(f"{path} holds unigrams, but bigrams are wanted; make them with: {BUILD}")
    return table.unigram() if order == 1 else table


def vocabulary_hash(vocabulary: dict[str, int]) -> str:
    """What two tokenizers share that map the same pieces to the same ids."""
    pieces = json.dumps(sorted(vocabulary.items()))
    return hashlib.sha256(pieces.encode()).hexdigest()[:16]


def require_order(order: object) -> None:
    if not isinstance(order, int) or isinstance(order, bool) or order not in (1, 2):
        raise UserError(f"the order of n-grams must be 1 (unigrams) or 2 (bigrams), got {order!r}")


def estimate(sequences: Iterable[Sequence[int]], order: int, vocabulary: dict[str, int], corpus: str) -> NGramTable:
    """Count the tokens of these sequences; the first of each is context and is not counted itself.

    Raises UserError for an order other than 1 and 2, and where there is nothing to count.
    """
    require_order(order)
    before, tokens = array("q"), array("q")
    for sequence in sequences:
        before.extend(sequence[:-1])
        tokens.extend(sequence[1:])
    if not tokens:
        raise UserError(f"{corpus} has no tokens to estimate n-grams from; choose another dataset or split")
    width = max(vocabulary.values()) + 1
    contexts, following = (torch.frombuffer(each, dtype=torch.long) for each in (before, tokens))
    pairs, times = (contexts * width + following).unique(return_counts=True)
    ranked = times.argsort(descending=True, stable=True)
    ranked = ranked[(pairs[ranked] // width).argsort(stable=True)]  # by context, then by count, then by id
    seen = torch.bincount(pairs // width)
    counts = torch.bincount(following)
    by_count = counts.argsort(descending=True, stable=True)[: int(counts.count_nonzero())]
    table = NGramTable(
        order=2,
        width=width,
        unigrams=Counts(by_count, counts[by_count]),
        starts=torch.cat([seen.new_zeros(1), seen.cumsum(0)]),
        followers=Counts(pairs[ranked] % width, times[ranked]),
        vocabulary_hash=vocabulary_hash(vocabulary),
        corpus=corpus,
    )
    return table if order == 2 else table.unigram()


def reference_tokens(checkpoint: Checkpoint, examples: Iterable[Example]) -> Iterator[list[int]]:
    """Every reference as the target would emit it, behind the token it would emit it after.

    For a decoder-only model that is the prompt's continuation, up to an end token.
    """
    tokenizer = checkpoint.tokenizer
    for example in examples:
        for reference in example.references:
            if checkpoint.encoder_decoder:
                yield [checkpoint.decoder_start, *tokenizer(text_target=reference, verbose=False)["input_ids"]]
                continue
            gap = "" if example.prompt[-1].isspace() else " "
            # together, as a piece may depend on what stands before it
            texts = [example.prompt, f"{example.prompt}{gap}{reference}"]
            prompt, whole = tokenizer(texts, verbose=False)["input_ids"]
            end = [] if tokenizer.eos_token_id in (None, whole[-1]) else [tokenizer.eos_token_id]
            same = (one == other for one, other in zip(prompt, whole, strict=False))
            shared = len(list(takewhile(bool, same)))
            yield [*whole[max(shared - 1, 0) :], *end]


class NGramDrafter:
    """Drafts up to `window` tokens from a table, without a model.

    Greedy decoding drafts the likeliest token after the last one; sampling draws from the table's
    distribution, standardized as the target's is, and says so in the draft's probs.
    """

    drafts_trees = False

    def __init__(self, target: Model, table: NGramTable, window: int) -> None:
        require_whole("the draft window", window, 1)
        self._device = target.device
        self._table = table
        self._window = window

    def start(self, request: Request) -> None:
        self._request = request
        self._rows: dict[int | None, tuple[Tensor, Tensor]] = {}
        if not request.sampling.greedy:
            # on the host, where reading a draw waits for nothing; its seed is drawn, as a generator with
            # the request's own seed would repeat the numbers that drafts are accepted by
            seed = torch.randint(2**62, (1,), generator=request.generator, device=self._device)
            self._generator = torch.Generator().manual_seed(int(seed))

    def propose(self, tokens: list[int]) -> Draft:
        limits, sampling = self._request.limits, self._request.sampling
        drafted: list[int] = []
        rows: list[tuple[Tensor, Tensor]] = []
        token = tokens[-1]
        for _ in range(min(self._window, limits.room(tokens))):
            if sampling.greedy:
                token = self._table.likeliest_after(token)
            else:
                rows.append(self._distribution(token))
                seen, probs = rows[-1]
                token = int(seen[draw(probs[None], self._generator)])
            drafted.append(token)
            if token in limits.end_tokens:
                break
        return Draft(rows_of(drafted, self._device), probs=self._dense(rows) if rows else None)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Nothing to update: the table is fixed."""

    def _distribution(self, token: int) -> tuple[Int[Tensor, " k"], Float[Tensor, " k"]]:
        """Tokens seen after this one and their standardized probabilities; all others have none."""
        counts = self._table.after(token)
        row = None if counts is self._table.unigrams else token
        if row not in self._rows:
            self._rows[row] = counts.tokens, self._request.sampling.probs(counts.times.float().log()[None])[0]
        return self._rows[row]

    def _dense(self, rows: list[tuple[Tensor, Tensor]]) -> Float[Tensor, "n vocab"]:
        """The distributions on the device, as wide as the vocabulary."""
        width = self._table.width
        where = torch.cat([seen + index * width for index, (seen, _) in enumerate(rows)])
        values = torch.cat([probs for _, probs in rows])
        probs = torch.zeros(len(rows) * width, device=self._device)
        return probs.index_copy_(0, self._sent(where), self._sent(values)).view(len(rows), width)

    def _sent(self, values: Tensor) -> Tensor:
        """On the device, without waiting for what a GPU is doing."""
        return values.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else values
