"""Whether a session gives a module's own scores: checked when a model that runs on Transformers
loads.

Any checkpoint can be loaded, but not every module keeps its cache as sessions need it. So before
the first text a session runs a short one in all the ways that a method may feed rows, and its
logits are compared with those of one forward over the whole text without a cache.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from bild_lab.engine.draft import Tree
from bild_lab.engine.models.cached_session import CachedSession
from bild_lab.engine.models.hf.positions import (
    counts_in,
    max_session_positions,
    original_context,
)
from bild_lab.engine.request import Source
from bild_lab.engine.session import DraftShape, Rows
from bild_lab.errors import UserError, first_line

WHOLE = "in one forward without a cache"
ROW_BY_ROW = "row by row"
TOGETHER = "several rows at once"
ROLLED_BACK = "after a rollback"
KEPT = "after keeping some rows"
BRANCHING = "in a tree"

# how many keys a row attends to, in configurations
WINDOWS = (
    "sliding_window",
    "attention_chunk_size",
    "window_size",
    "attention_window_size",
    "index_topk",
)
AFFORDABLE = {"cuda": 1e13}  # weights times rows of a forward that takes well below a second
AFFORDABLE_ELSEWHERE = 1e10
PROMPT = 4
FED = 12  # rows after the prompt that the checks feed, without the tree's
# the parents of the tree, whose second branch lies far from its place in the text
PARENTS = (-1, 0, 0, 0, 0, 0, 1, 5)
LEFT, RIGHT = [0, 1, 6], [0, 5, 7]
GROWN = 3  # rows of the tree that run in a forward before the others
TREE = len(RIGHT) + 1  # the deepest branch, and a row after it

REMEDIES = {
    TOGETHER: "use policy=vanilla or policy=hf_generate, which draft nothing",
    ROLLED_BACK: "use policy=vanilla or policy=hf_generate, which draft nothing",
    KEPT: "use policy=vanilla or policy=hf_generate, which draft nothing",
    BRANCHING: "use a policy that drafts chains, such as speculative or prompt_lookup",
}
OTHER_REMEDY = (
    "use policy=hf_generate with measure.baseline=hf_generate, which is decoding by Transformers"
    " itself"
)

# a session for this source; whether it runs rows one by one
Open = Callable[[Source, bool], CachedSession]


class CheckFailed(Exception):
    """The scores or the cache of a session are not as they should be."""


@dataclass(frozen=True)
class Outcome:
    """What the checks found.

    one_by_one: the session had to run each row in a forward of its own.
    failed: the check that failed, None if none did.
    problem: what was wrong then.
    refused: the session refused the check in words of its own.
    """

    one_by_one: bool = False
    failed: str | None = None
    problem: str | None = None
    refused: bool = False

    def refusal(self, name: str, model_type: str) -> str:
        """The message for a checkpoint with this name."""
        if self.refused:
            return f"{name}: {self.problem}"
        return (
            f"a session of {name} ({model_type}) must give the model's own logits, but"
            f" {self.failed} {self.problem}; {REMEDIES.get(self.failed, OTHER_REMEDY)}"
        )


@torch.inference_mode()
def check(module: PreTrainedModel, draft_shape: DraftShape, open_session: Open) -> Outcome | None:
    """Run a short text in all the ways that a method may feed it; None if the module scores it with
    NaN.

    draft_shape: what the method feeds at most. open_session: starts a session of the module. A
    recurrent module may begin several rows from an empty state; then a session that runs them one
    by one is tried.
    """
    outcome = _check(module, draft_shape, open_session, one_by_one=False)
    if outcome is None or outcome.failed not in (TOGETHER, ROLLED_BACK, KEPT):
        return outcome
    slower = _check(module, draft_shape, open_session, one_by_one=True)
    return outcome if slower is None or slower.failed in (TOGETHER, ROLLED_BACK, KEPT) else slower


def _check(
    module: PreTrainedModel, draft_shape: DraftShape, open_session: Open, one_by_one: bool
) -> Outcome | None:
    session_check = SessionCheck(module, lambda source: open_session(source, one_by_one))
    failed = problem = None
    refused = False
    try:
        if bool(session_check.score().isnan().any()):
            return None
        for difference in session_check.run(draft_shape):
            if not difference <= (limit := tolerance(module.dtype)):
                raise CheckFailed(
                    f"they are off by {difference:.2g} of their spread, and {limit:.2g} is the most"
                )
    except UserError as error:
        failed, problem, refused = session_check.check_name, str(error), True
    except Exception as error:  # whatever a module raises is its answer
        failed = session_check.check_name
        problem = first_line(error)[:200]
        if not isinstance(error, CheckFailed):
            problem = f"it raises {type(error).__name__}: {problem}"
    return Outcome(one_by_one, failed, problem, refused)


def tolerance(dtype: torch.dtype) -> float:
    """How far logits may be off, relative to their spread.

    Some modules compute in float32 whatever the precision.
    """
    return 3e-4 if dtype.itemsize > 2 else 0.1


class SessionCheck:
    """Checks of a short text in a session that runs it. check_name: the check that runs now."""

    def __init__(
        self, module: PreTrainedModel, open_session: Callable[[Source], CachedSession]
    ) -> None:
        self.check_name = WHOLE
        self._module, self._open_session = module, open_session
        self._prompt = prompt_length(module)
        tokens = plain_tokens(module.config, self._prompt + FED + len(PARENTS) + 4)
        self.text, self._other_tokens = tokens[: self._prompt + FED], tokens[self._prompt + FED :]
        sources = source_tokens(module) if module.config.is_encoder_decoder else None
        self._device = input_device(module)
        self._encoder_ids = (
            None if sources is None else torch.tensor([sources], device=self._device)
        )

    def score(self) -> Float[Tensor, "n vocab"]:
        """The module's own logits of the text."""
        self._expected = self._scored(self.text)
        return self._expected

    def run(self, draft_shape: DraftShape) -> Iterator[float]:
        """How far the logits of each group of rows are off."""
        self._fed_count = self._prompt - 1  # rows that the session has, the prompt's included
        self.check_name = ROW_BY_ROW
        # a text of its own, which must leave no trace
        other_session = self._open_session(self._source(self._other_tokens[:2]))
        other_session.extend(self._other_tokens[1:2])
        self._session = self._open_session(self._source(self.text[: self._prompt]))
        for wrong in self._other_tokens[:3]:
            yield self._feed(1)
            other_session.extend([wrong])
        self._require_growth()
        if draft_shape > DraftShape.ROWS:
            yield from self._chains()
            self._require_growth()
        if draft_shape > DraftShape.CHAINS:
            yield from self._tree()

    def _require_growth(self) -> None:
        if (row_counts := self._session.layers.stored) - {self._fed_count}:
            raise CheckFailed(
                f"the cache holds {max(row_counts)} rows where {self._fed_count} were fed"
            )

    def _chains(self) -> Iterator[float]:
        self.check_name = TOGETHER
        yield self._feed(3)
        self.check_name = ROLLED_BACK
        yield self._feed(1, wrong=2)
        self._session.rollback(self._fed_count)
        yield self._feed(2)
        for wrong in self._other_tokens[:2]:  # one forward each, as a drafter does
            self._session.extend([wrong])
        self._session.rollback(self._fed_count)
        yield self._feed(1)
        self.check_name = KEPT
        yield self._feed(1, wrong=2)
        self._session.keep([0])
        yield self._feed(2)
        self._session.rollback(self._fed_count)

    def _tree(self) -> Iterator[float]:
        self.check_name = BRANCHING
        tree_tokens = self._other_tokens[: len(PARENTS)]
        next_token = self._other_tokens[len(PARENTS)]
        shapes = [
            Tree(torch.tensor(PARENTS[:count], device=self._device))
            for count in (GROWN, len(PARENTS))
        ]
        # a tree may grow in several forwards
        forwards = [Rows(tree_tokens[:GROWN], shapes[0]), Rows(tree_tokens[GROWN:], shapes[1])]
        logits = torch.cat([self._session.extend(rows).logits for rows in forwards])
        left, right = ([tree_tokens[node] for node in branch] for branch in (LEFT, RIGHT))
        yield self._difference(logits[LEFT], self._scored([*self.text, *left])[-3:])
        expected = self._scored([*self.text, *right, next_token])
        yield self._difference(logits[RIGHT], expected[-4:-1])
        self._session.keep(RIGHT)
        yield self._difference(self._session.extend([next_token]).logits, expected[-1:])

    def _feed(self, count: int, wrong: int = 0) -> float:
        """Feed the next rows of the text and some wrong ones after them, and compare."""
        rows = [*self.text[self._fed_count : self._fed_count + count], *self._other_tokens[:wrong]]
        expected = self._expected[self._fed_count : self._fed_count + count]
        self._fed_count += count
        return self._difference(self._session.extend(rows).logits[:count], expected)

    def _source(self, text: Sequence[int]) -> Source:
        return Source(tuple(text), self._encoder_ids, self._device)

    def _scored(self, text: Sequence[int]) -> Float[Tensor, "n vocab"]:
        return uncached_logits(self._module, self._source(text))

    def _difference(
        self, logits: Float[Tensor, "m vocab"], expected: Float[Tensor, "m vocab"]
    ) -> float:
        return distance(logits, expected, self._module.dtype)


def distance(
    logits: Float[Tensor, "m vocab"], expected: Float[Tensor, "m vocab"], dtype: torch.dtype
) -> float:
    """The rows' distances relative to the spread of the module's logits: of the worst row, or
    the middle one.

    In half precision, which is dtype, a rounding may send a single row to other experts. Infinite
    logits do not count; a NaN does.
    """
    replacements = {"nan": torch.nan, "posinf": 0.0, "neginf": 0.0}
    logits = logits.double().nan_to_num(**replacements)
    expected = expected.to(logits.device).double().nan_to_num(**replacements)
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1).clamp(min=1e-30)
    distances = (logits - expected).norm(dim=-1) / spread
    return float(distances.max() if dtype.itemsize > 2 else distances.median())


def uncached_logits(
    module: PreTrainedModel, text: Source, count: int | None = None
) -> Float[Tensor, "n vocab"]:
    """A module's logits of a text, by one forward without a cache. count: after how many of its last
    tokens; None: after all.
    """
    ids = torch.tensor([text.prompt], device=text.device)
    inputs = {"input_ids": ids}
    if text.encoder_ids is not None:
        inputs = {"input_ids": text.encoder_ids, "decoder_input_ids": ids}
    # the logits of all rows of a long prompt take gigabytes
    if count is not None and "logits_to_keep" in inspect.signature(module.forward).parameters:
        inputs["logits_to_keep"] = count
    logits = module(**inputs, use_cache=False).logits[0]
    return logits if count is None else logits[-count:]


def input_device(module: PreTrainedModel) -> torch.device:
    """The device of a model's tokens and logits.

    Weights of a spread model may be elsewhere, or on disk.
    """
    hook = getattr(module, "_hf_hook", None)  # of Accelerate
    return module.device if hook is None else torch.empty(0, device=hook.execution_device).device


def prompt_length(module: PreTrainedModel) -> int:
    """A prompt long enough that the rows after it are beyond the windows and the original context,
    if affordable.
    """
    config = module.config.get_text_config(decoder=True)
    # 1. the longest prompt that leaves positions for the rows after it, and time
    max_positions = max_session_positions(module)
    longest = math.inf if max_positions is None else max(1, max_positions - FED - TREE)
    shortest = 1 if module.config.is_encoder_decoder else int(min(PROMPT, longest))
    weights = sum(weight.numel() for weight in module.parameters())
    affordable = AFFORDABLE.get(module.device.type, AFFORDABLE_ELSEWHERE) / weights
    # 2. the lengths after which a window, a chunk or the original context ends
    lengths = {window + 2 for window in counts_in(config, WINDOWS)}
    if (chunk := getattr(config, "attention_chunk_size", None)) is not None:
        lengths.add(chunk * (2 + FED // chunk) - FED - 1)  # the tree's first row ends a chunk
    if (context := original_context(config)) is not None:
        lengths.add(context + 2)
    fitting = [length for length in lengths if length <= min(affordable, longest)]
    return max([shortest, *fitting])


def source_tokens(module: PreTrainedModel) -> list[int]:
    """A few random tokens for an encoder, whose vocabulary may be smaller than the decoder's."""
    rows = getattr(module.get_input_embeddings(), "num_embeddings", None)
    drawn = plain_tokens(module.config, 64)
    return [token for token in drawn if rows is None or token < rows][:6]


def plain_tokens(config: PreTrainedConfig, count: int) -> list[int]:
    """Random tokens without those that have a meaning of their own, such as padding, the end, or an
    image.
    """
    described = {**config.to_dict(), **config.get_text_config(decoder=True).to_dict()}
    special: set[int | None] = set()
    for name, ids in described.items():
        if name.endswith(("token_id", "token_ids", "token_index")):
            special |= set(ids) if isinstance(ids, list) else {ids}
    vocabulary = config.get_text_config(decoder=True).vocab_size
    drawn = torch.randint(
        vocabulary, (4 * count + 64,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    plain = [token for token in drawn if token not in special]
    return plain[:count]
