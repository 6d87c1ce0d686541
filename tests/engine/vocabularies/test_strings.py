"""A draft model whose text is tokenized anew for the target."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from bild_lab.engine.acceptance import ExactMatch, SpeculativeSampling
from bild_lab.engine.beam import BeamDrafter
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.drafters import LowConfidence, ModelDrafter, NoDraft, SpeculativeDrafter, SyntheticDrafter
from bild_lab.engine.drafters.model_tree import ModelTreeDrafter
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.session import Growth, Want
from bild_lab.engine.trace import Trace
from bild_lab.engine.vocabularies import TranslatedModel
from bild_lab.errors import UserError
from tests.engine.drafters.chances import require_targets_distribution
from tests.engine.vocabularies.foreign import KINDS, TEXTS, Reciter, checkpoint, overlap, reciter, tokenizer, written
from tests.stubs import StubModel

PAIRS = [(one, other) for one in KINDS for other in KINDS if one != other]
WINDOW = 6
SPLIT = [bytes([byte]) for byte in range(0x80, 0xC0)]  # these bytes end a character


def decoded(target: str, draft: str, text: str, drafter=ModelDrafter, begins: bool = False, shortest: bool = False):
    """A target and a drafter that know the same text decode it. Returns the trace and the drafting model.

    begins: the text begins behind a start token, as in an encoder–decoder; else behind a prompt.
    """
    both = overlap(target, draft, encoder_decoder=begins)
    if begins:
        source = Source((both.target.tokenizer.eos_token_id,), torch.tensor([[both.target.tokenizer.eos_token_id]]))
    else:
        source = Source(tuple(tokenizer(target)("the man")["input_ids"]))
    own = both.source(source)
    large = reciter(target, text, len(source.prompt), begins)
    small = reciter(draft, text, len(own.prompt), begins, shortest)
    ends = frozenset([tokenizer(target).eos_token_id])
    limits = Limits(len(source.prompt), 200, ends)
    model = TranslatedModel(small, both, "strings")
    trace = Trace()
    method = DraftThenVerify(large, drafter(model, WINDOW), SpeculativeSampling())
    tokens = method.decode(Request(source, limits), trace)[len(source.prompt) :]
    alone = DraftThenVerify(large, NoDraft(large), ExactMatch()).decode(Request(source, limits), Trace())
    assert tokens == alone[len(source.prompt) :]
    return trace, small


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_a_draft_model_that_knows_the_text_is_wrong_in_the_last_word_alone(
    target: str, draft: str, begins: bool
) -> None:
    """A window may end within a word, whose beginning the target may write with other tokens."""
    tried, pieces = 0, checkpoint(target).pieces
    for text in TEXTS[:3]:
        behind = text if begins else f" {text}"
        if text not in written(target) or text not in written(draft):
            continue
        trace, _ = decoded(target, draft, behind, begins=begins)
        tried += 1
        for one in trace.rounds:
            drafted = pieces.text(one.drafted)
            if drafted[:1] in SPLIT:  # it begins within a character, which the target ends with another token
                continue
            assert len(pieces.text(one.drafted[: one.accepted])) >= drafted.rfind(b" "), (one, drafted)
        assert trace.accepted > (0 if target == "words" else len(trace.rounds))  # a window holds few whole words
    assert tried or "words" in (target, draft)


def test_committed_text_is_read_once_even_where_a_new_tokenization_changes_it() -> None:
    """The draft model writes letter by letter; what it reads is as its tokenizer writes words."""
    text = f" {TEXTS[3]}"
    usual, plain = decoded("byte_fallback", "byte_level", text)
    trace, letters = decoded("byte_fallback", "byte_level", text, shortest=True)
    canonical = len(tokenizer("byte_level").encode(text))
    drafted = sum(one.draft_calls for one in trace.rounds)
    assert trace.accepted > 20
    assert len(plain.fed) <= sum(one.draft_calls for one in usual.rounds) + canonical  # each forward reads one or more
    assert len(letters.fed) <= drafted + 2 * canonical + 20


def test_a_window_and_a_confidence_count_the_draft_models_tokens() -> None:
    trace, _ = decoded("metaspace", "byte_level", " A man in", lambda m, w: ModelDrafter(m, 3, LowConfidence(0.9)))
    assert trace.rounds[0].draft_calls <= 3
    assert all(len(one.drafted) <= 3 for one in trace.rounds)
    assert all(one.stats["confidence"] for one in trace.rounds if one.draft_calls)


def test_what_the_draft_model_cannot_write_back_is_drafted_on() -> None:
    """Its tokenizer lowercases, so the text it read is another one than the target's."""
    both = overlap("metaspace", "lowercase")
    source = Source(tuple(tokenizer("metaspace").encode("A Man", add_special_tokens=False)))
    own = both.source(source)
    small = reciter("lowercase", " man in a blue shirt is standing", len(own.prompt), begins=False)
    drafter = ModelDrafter(TranslatedModel(small, both, "strings"), 9)
    drafter = drafter.start(
        Request(source, Limits(len(source.prompt), 30)), StubModel(small.next_logits).start(source, 9)
    )
    ours = both.pieces
    tokens = list(source.prompt)
    draft = drafter.propose(tokens)
    assert ours.text(draft.token_list).startswith(b" man in")
    tokens += ours.tokens(b" Man", behind=True)  # the target writes it large
    assert ours.text(drafter.propose(tokens).token_list).startswith(b" in a"), "the text behind it, without its ' man'"


def test_nothing_is_drafted_where_the_draft_models_positions_end() -> None:
    both = overlap("metaspace", "byte_level")
    source = Source(tuple(tokenizer("metaspace").encode("the man", add_special_tokens=False)))
    small = reciter("byte_level", f" {TEXTS[0]}", len(both.source(source).prompt), begins=False)
    small.session_positions = 20
    drafter = ModelDrafter(TranslatedModel(small, both, "strings"), 4)
    drafter = drafter.start(Request(source, Limits(len(source.prompt), 99)), small.start(source, 9))
    assert len(drafter.propose(list(source.prompt)))
    long = [*source.prompt, *both.pieces.tokens(f" {TEXTS[0]}".encode(), behind=True)]
    assert not len(drafter.propose(long))


# in every context the target's probability of what the draft model likes best is 1/2, and half of the rest is the other
TARGET = ([1 / 2, 1 / 4, 1 / 4], [1 / 4, 1 / 2, 1 / 4])


def two_tokens(tokens: list[int]) -> Tensor:
    """A draft model over the same two words whose most likely token depends on the whole text."""
    mixed = sum((at + 1) * (token + 1) for at, token in enumerate(tokens)) % 2
    return torch.tensor([[2.0, 1.0], [1.0, 2.0]])[mixed]


def as_the_drafter(tokens: list[int]) -> list[float]:
    return TARGET[int(two_tokens([token % 2 for token in tokens]).argmax())]  # the draft model reads z as x


def test_sampled_text_is_exactly_distributed_as_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    both = FakeOverlap(FakePieces({0: b"x", 1: b"y", 2: b"z"}), FakePieces({0: b"x", 1: b"y"}))
    target = StubModel(lambda tokens: torch.tensor(as_the_drafter(tokens), dtype=torch.float64).log())
    drafter = ModelDrafter(TranslatedModel(Reciter(two_tokens), both, "strings"), 2)
    method = DraftThenVerify(target, drafter, SpeculativeSampling())
    traces = require_targets_distribution(method, target.next_logits, (0,), 3, monkeypatch)
    assert max(trace.accepted for several in traces.values() for trace in several) > 1


class FakePieces:
    """One letter for each token."""

    adds_space = False

    def __init__(self, written: dict[int, bytes]) -> None:
        self.written = written

    def text(self, tokens) -> bytes:
        return b"".join(self.written[token] for token in tokens)

    def tokens(self, text: bytes, behind: bool) -> list[int]:
        known = {letters: token for token, letters in self.written.items()}
        return [known.get(bytes([letter]), 0) for letter in text]


class FakeOverlap:
    draft = SimpleNamespace(end_tokens=frozenset(), path="small")
    target = SimpleNamespace(tokenizer=SimpleNamespace(eos_token_id=None))

    def __init__(self, pieces: FakePieces, draft_pieces: FakePieces) -> None:
        self.pieces, self.draft_pieces = pieces, draft_pieces

    def source(self, source: Source, most: int | None = None) -> Source:
        return Source((0,))


def test_what_reads_scores_is_refused_before_anything_is_decoded() -> None:
    model = TranslatedModel(reciter("byte_level", "x", 1, False), overlap("metaspace", "byte_level"), "strings")
    target = StubModel(lambda tokens: torch.zeros(3))
    makes = {
        "keeps_probs": lambda: ModelDrafter(model, 2, keeps_probs=True),
        "a hierarchy's middle model": lambda: SpeculativeDrafter(model, ModelDrafter(model, 1), 2),
        "speculative beam search": lambda: BeamDrafter(model, 2),
        "a draft tree": lambda: ModelTreeDrafter(model, nodes=4, window=2, width=2, children=2),
        "a synthetic drafter with a model's cost": lambda: SyntheticDrafter(target, 0.5, 2, model),
    }
    for what, make in makes.items():
        with pytest.raises(UserError, match=f"{what} reads .*; set pair.vocabularies=intersection"):
            make()
    session = model.start(Source((5,)), 4)
    with pytest.raises(UserError, match="drafted text has no scores .*; set pair.vocabularies=intersection"):
        session.extend([1], Want(logits=1))
    with pytest.raises(UserError, match="drafted text has no scores"):
        session.grow([1], Growth(4, 2, 2, 2, frozenset()))
