"""What a session asks of an engine, forward by forward, and what it makes of the answers.

The engine's rows are numbers: a token, behind which every layer that it runs through writes its own
digit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from bild_lab.engine.draft import Tree
from bild_lab.engine.models.cached_session import CachedSession, ForwardPass
from bild_lab.engine.session import (
    ChainResult,
    ChainSpec,
    GrownTree,
    OutputSpec,
    Rows,
    Scores,
    Skipped,
    TreeSpec,
)
from bild_lab.engine.trace import Forward
from bild_lab.errors import UserError

MODEL = object()
CHAIN = ChainSpec(3, frozenset())
GROWTH = TreeSpec(4, 2, 2, 2, frozenset())


@dataclass
class DigitLayers:
    """Three layers: a token 7 leaves them as 7123.

    The head's input adds a half, and the head leaves it as it is.
    """

    reserved: int = 0
    source: int = 0
    passes: list[ForwardPass] = field(default_factory=list)
    asked: list[tuple] = field(default_factory=list)  # every other call
    program: object = None  # what `draft` and `grow` return
    again: int = 0  # how many rows before the asked ones run again

    config, depth, device = MODEL, 3, torch.device("cpu")
    program_rows = 256

    def run(self, work: ForwardPass) -> Scores:
        self.passes.append(work)
        layers = list(range(self.depth) if work.layers is None else work.layers)
        rows = work.tokens[:, None].double() if work.states is None else work.states
        after = {layers[0] if layers else self.depth: rows}
        for layer in layers:
            rows = after[layer + 1] = rows * 10 + layer + 1
        read = rows[rows.shape[0] - work.read :] + 0.5
        logits = read[read.shape[0] - work.logits :] if work.logits else None
        hidden = tuple(after[count] for count in work.hidden)
        return Scores(
            logits, read[read.shape[0] - work.head_input :] if work.head_input else None, hidden
        )

    def scored(self, work: ForwardPass) -> int:
        return work.logits

    def forwards(self, start: int, count: int) -> list[tuple[int, int]]:
        return (
            [(start - self.again, self.again), (start, count)] if self.again else [(start, count)]
        )

    def draft(self, *call: object) -> object:
        self.asked.append(("draft", *call))
        return self.program

    def forward_until_confident(self, *call: object) -> object:
        self.asked.append(("forward_until_confident", *call))
        return self.program

    def gather(self, *call: object) -> None:
        self.asked.append(("gather", *call))


def opened(prompt: Sequence[int], **given: object) -> tuple[CachedSession, DigitLayers]:
    layers = DigitLayers(**given)
    return CachedSession(layers, prompt, []), layers


def numbers(held: torch.Tensor | None) -> list[float] | None:
    return None if held is None else held.flatten().tolist()


def as_lists(scores: Scores) -> tuple:
    return (
        numbers(scores.logits),
        numbers(scores.head_input),
        [numbers(each) for each in scores.hidden],
    )


def ran(layers: DigitLayers) -> list[tuple]:
    """Of every pass: its slot, its rows, its layers, and for how many rows logits were asked
    for.
    """
    return [
        (work.start, numbers(work.tokens if work.states is None else work.states), work.layers and list(work.layers),
         work.logits)
        for work in layers.passes
    ]  # fmt: skip


def test_a_prompt_runs_with_the_first_rows_and_only_once() -> None:
    session, layers = opened([4, 5, 6], reserved=2)
    assert session.length == 2
    assert as_lists(session.extend([6, 7])) == ([6123.5, 7123.5], None, [])
    assert (session.length, layers.passes[0].prompt) == (4, 2)
    assert as_lists(session.extend(torch.tensor([8, 9]), OutputSpec(logits=1))) == (
        [9123.5],
        None,
        [],
    )
    assert ran(layers) == [(2, [4, 5, 6, 7], None, 2), (6, [8, 9], None, 1)]
    assert session.forwards == [Forward(MODEL, 4, 2, 2), Forward(MODEL, 2, 6, 1)]


def test_only_what_is_asked_for_covers_the_prompt() -> None:
    everything = OutputSpec(head_input=True, hidden=(1, 2))
    session, _ = opened([4, 5])
    assert as_lists(session.extend([5], everything)) == ([5123.5], [5123.5], [[51], [512]])
    session, _ = opened([3, 4, 5])
    assert as_lists(session.extend([5], OutputSpec(hidden=(1,)))) == ([5123.5], None, [[51]])
    session, _ = opened([4, 5])
    assert as_lists(session.extend([5, 6], OutputSpec(logits=1, head_input=True))) == (
        [6123.5],
        [6123.5],
        [],
    )
    session, _ = opened([4, 5])
    of_prompt = OutputSpec(head_input=True, hidden=(1,), prompt=True)
    assert as_lists(session.extend([5, 6], of_prompt)) == (
        [5123.5, 6123.5],
        [4123.5, 5123.5, 6123.5],
        [[41, 51, 61]],
    )
    assert as_lists(session.extend([7], OutputSpec(logits=0))) == (None, None, [])


def test_a_long_prompt_runs_before_a_program() -> None:
    session, layers = opened([3, 4, 5])
    layers.program_rows = 2  # and the prompt makes three with the row that is fed
    session.draft([5], CHAIN)
    assert ran(layers) == [(0, [3, 4], None, 1)] and layers.asked == [("draft", 2, [5], CHAIN)]


def test_a_tree_after_a_prompt_hangs_below_its_last_token() -> None:
    session, layers = opened([3, 4, 5])
    session.extend(Rows([5, 6, 7], Tree(torch.tensor([-1, 0, 0]))))
    (work,) = layers.passes
    assert (numbers(work.tokens), numbers(work.tree.parents)) == ([3, 4, 5, 6, 7], [-1, 0, 1, 2, 2])
    session.keep([0, 2])
    assert layers.asked == [("gather", 2, [0, 2])] and session.length == 4
    session.extend([8])
    assert ran(layers)[1] == (4, [8], None, 1)


def test_rows_of_a_tree_that_ran_before_are_counted_from_its_first() -> None:
    session, layers = opened([5], reserved=1)
    session.extend(Rows([5, 6], Tree(torch.tensor([-1, 0]))))
    session.extend(Rows([7, 8], Tree(torch.tensor([-1, 0, 0, 1]))))
    session.keep([0, 1, 3])
    assert layers.asked == [("gather", 1, [0, 1, 3])] and session.length == 3


def test_kept_rows_of_a_chain_do_not_move_and_a_rollback_drops_rows() -> None:
    session, layers = opened([5], reserved=1)
    session.extend([5, 6, 7])
    session.keep([0, 1])
    assert (layers.asked, session.length) == ([], 2)
    session.rollback(9)
    assert session.length == 2
    session.rollback(1)
    assert session.length == 1
    session.commit_row(0, [1])
    session.commit_row(2, [1, 2])
    assert layers.asked == [("gather", 2, [2], [1, 2])]


def test_an_encoder_is_a_forward_of_its_own() -> None:
    session, _ = opened([5], source=9)
    session.extend([5])
    encoder = Forward(MODEL, 9, source=9, encoder=True)
    assert session.forwards == [encoder, Forward(MODEL, 1, 0, 1, source=9)]


def test_a_program_drafts_a_chain_after_the_rows_or_there_is_none() -> None:
    session, layers = opened([3, 4, 5], source=2)
    assert session.draft([5], CHAIN) is None and session.length == 2
    assert session.draft([5], ChainSpec(3, frozenset(), plain=False)) is None
    layers.program = ChainResult([7, 8], 3, False, [], None, None)
    assert session.draft([5, 6], CHAIN) is layers.program
    assert layers.asked == [("draft", 0, [3, 4, 5], CHAIN), ("draft", 0, [3, 4, 5, 6], CHAIN)]
    counted = [
        (each.rows, each.cached, each.scored, each.source, each.layers)
        for each in session.forwards[1:]
    ]
    assert counted == [(4, 0, 1, 2, None), (1, 4, 1, 2, None), (1, 5, 1, 2, None)]
    assert session.length == 6
    session.extend([9])
    assert ran(layers) == [(6, [9], None, 1)]


def test_a_program_grows_a_tree_whose_rows_can_be_kept() -> None:
    session, layers = opened([3, 4, 5], reserved=1)
    assert session.draft([5], GROWTH) is None
    assert session.draft([5], TreeSpec(4, 2, 2, 2, frozenset(), plain=False)) is None
    layers.program = GrownTree([6, 7, 8], [-1, -1, 0], [0, 1, None], [9, 2, 3])
    assert session.draft([5, 6], GROWTH) is layers.program
    assert layers.asked == [("draft", 1, [3, 4, 5], GROWTH), ("draft", 1, [3, 4, 5, 6], GROWTH)]
    assert [(each.rows, each.cached, each.scored) for each in session.forwards] == [
        (4, 1, 1),
        (2, 5, 2),
        (3, 7, 3),
    ]
    session.keep([1])
    assert layers.asked[2:] == [("gather", 5, [1])] and session.length == 5


def exited(
    session: CachedSession,
    tokens: list[int],
    at: int,
    layers: Sequence[int] = (0,),
    **output_spec: object,
) -> tuple:
    return as_lists(
        session.extend(Rows(tokens, position=at), OutputSpec(layers=layers, **output_spec))
    )


def test_the_text_goes_on_after_an_early_exit_where_the_tokens_are_the_same() -> None:
    session, layers = opened([4, 5])
    assert exited(session, [5], 1, head_input=True) == ([51.5], [51.5], [])
    assert exited(session, [6, 7], 2, hidden=(0,)) == ([61.5, 71.5], None, [[6, 7]])
    assert session.length == 1
    assert as_lists(session.extend([5, 6, 8, 9], OutputSpec(head_input=True)))[0] == [
        5123.5,
        6123.5,
        8123.5,
        9123.5,
    ]
    assert ran(layers) == [
        (0, [4], None, 1),  # the prompt
        (1, [5], [0], 1),
        (2, [6, 7], [0], 2),
        (3, [8, 9], [0], 0),
        (1, [51, 61, 81, 91], [1, 2], 4),
    ]
    assert layers.passes[3].head_input == 0
    assert [(each.layers, each.first_layer) for each in session.forwards] == [
        (None, 0),
        (1, 0),
        (1, 0),
        (1, 0),
        (2, 1),
    ]
    assert session.length == 5


def test_a_program_drafts_rows_of_the_first_layers_and_the_text_goes_on_from_them() -> None:
    session, layers = opened([3, 4, 5], source=2)
    chain = ChainSpec(3, frozenset(), position=2, layers=(0,))
    assert session.draft([5], chain) is None
    layers.program = ChainResult(
        [8, 9], 2, False, [], None, None, torch.tensor([[51.0], [61.0], [81.0]]).double()
    )
    assert session.draft([5, 6], chain) is layers.program
    assert layers.asked == [("draft", 2, [5], chain), ("draft", 2, [5, 6], chain)]
    prompt, *program = session.forwards[1:]
    assert (prompt.rows, prompt.layers) == (2, None)
    assert program == [Forward(MODEL, 2, 2, 1, 2, layers=1), Forward(MODEL, 1, 4, 1, 2, layers=1)]
    assert session.length == 2
    assert numbers(session.extend([5, 6, 8, 9]).logits) == [5123.5, 6123.5, 8123.5, 9123.5]
    assert ran(layers)[1:] == [(5, [9], [0], 0), (2, [51, 61, 81, 91], [1, 2], 4)]


def test_drafted_rows_of_other_layers_leave_nothing_to_go_on_from() -> None:
    session, layers = opened([5])
    exited(session, [5], 0)
    skipped = Skipped(frozenset({1}), frozenset({0, 2}))
    layers.program = ChainResult([6], 1, False, [], None, None)
    session.draft([5], ChainSpec(1, frozenset(), position=0, layers=(0, 1, 2), skipped=skipped))
    assert session.forwards[-1] == Forward(
        MODEL, 1, 0, 1, layers=3, skipped_attention=1, skipped_feed_forward=2
    )
    session.extend([5])
    assert ran(layers)[1:] == [(0, [5], None, 1)]


def test_a_program_runs_a_token_until_it_is_saturated_or_there_is_none() -> None:
    session, layers = opened([3, 4, 5], source=2)
    assert session.forward_until_confident(5, 0.5) is None and session.length == 2
    exited(session, [5, 6], 2)
    layers.program = (torch.tensor([[9.0]]), 2)
    assert session.forward_until_confident(5, 0.25) is layers.program
    assert layers.asked == [
        ("forward_until_confident", 2, 5, 0.5),
        ("forward_until_confident", 2, 5, 0.25),
    ]
    assert session.forwards[-1] == Forward(MODEL, 1, 2, 1, 2, layers=2, filled_layers=1)
    assert session.length == 3
    session.extend([6])
    assert ran(layers)[-1] == (3, [6], None, 1)  # what was drafted is forgotten


def test_no_row_is_drafted_behind_a_token_that_did_not_run() -> None:
    session, layers = opened([3, 4, 5])
    states = torch.tensor([[51.0], [61.0], [81.0]]).double()
    layers.program = ChainResult([8, 9], 2, False, [], None, None, states)
    session.draft([5, 6], ChainSpec(3, frozenset(), position=2, layers=(0,)))
    for position, refusal in ((6, "from position 2 to 5, got position 6"), (1, "got position 1")):
        with pytest.raises(UserError, match=refusal):
            exited(session, [7], position)
        with pytest.raises(UserError, match=refusal):
            session.draft([7], ChainSpec(3, frozenset(), position=position, layers=(0,)))
    exited(session, [9], 5)
    session.rollback(2)
    with pytest.raises(UserError, match="from position 2 to 2, got position 3"):
        exited(session, [7], 3)  # where a row ran, but of another text
    session.extend([5, 6, 7])
    session.keep([0])
    with pytest.raises(UserError, match="from position 3 to 3, got position 4"):
        exited(session, [7], 4)  # where a row ran that was not kept


@pytest.mark.parametrize("given", [
    {"rows": Rows([5, 6], Tree(torch.tensor([-1, 0])))},
    {"want": OutputSpec(hidden=(1,))},
    {"rows": Rows([9, 6])},
    {"forget": True},
    {"skipped": Skipped(frozenset({0}))},
    {"layers": (1,)},
    {"second": (0, 1)},
    {"second": (1,)},
])  # fmt: skip
def test_otherwise_all_layers_run_again(given: dict) -> None:
    session, layers = opened([5])
    exited(session, [5], 0, given.get("layers", (0,)), skipped=given.get("skipped", Skipped()))
    exited(session, [6], 1, given.get("second", given.get("layers", (0,))))
    if "forget" in given:
        session.rollback(0)
    before = len(layers.passes)
    session.extend(given.get("rows", Rows([5, 6])), given.get("want", OutputSpec()))
    assert ran(layers)[before:] == [
        (0, [9 if given.get("rows") == Rows([9, 6]) else 5, 6], None, 2)
    ]


def test_a_draft_that_is_overwritten_goes_on_from_the_rows_that_stay() -> None:
    session, layers = opened([5])
    exited(session, [5, 6, 7], 0)
    exited(session, [8], 2)
    session.extend([5, 6, 8])
    assert ran(layers)[2:] == [(0, [51, 61, 81], [1, 2], 3)]
    exited(session, [9], 3)
    exited(session, [10, 11], 3)
    session.extend([10])
    assert ran(layers)[-1] == (3, [101], [1, 2], 1)
    session.extend([11])
    assert ran(layers)[-1] == (4, [11], None, 1)  # what was drafted counts for the next rows alone


def test_rows_count_as_cached_once_the_last_layer_has_run() -> None:
    session, _ = opened([5])
    found = session.extend([5], OutputSpec(layers=(0,), logits=0, hidden=(1,)))
    assert session.length == 0
    session.extend(Rows([5], states=found.hidden[0]), OutputSpec(layers=(1,), logits=0))
    assert session.length == 0
    states = torch.tensor([[512.0]])
    assert as_lists(
        session.extend(
            Rows([5], states=states), OutputSpec(layers=(2,), skipped=Skipped(frozenset({2})))
        )
    )[0] == [5123.5]
    assert session.length == 1
    assert [
        (each.layers, each.first_layer, each.skipped_attention) for each in session.forwards
    ] == [
        (1, 0, 0),
        (1, 1, 0),
        (1, 2, 1),
    ]


def test_filling_computes_keys_alone_and_rows_that_run_again_are_forwards_too() -> None:
    session, _ = opened([5], again=2)
    exited(session, [3, 4, 5], 0)
    states = torch.tensor([[51.0]])
    session.extend(
        Rows([5], position=3, states=states), OutputSpec(layers=(1, 2), fill=True, logits=0)
    )
    assert session.forwards[-2:] == [
        Forward(MODEL, rows, cached, 0, layers=0, first_layer=1, filled_layers=2)
        for cached, rows in ((1, 2), (3, 1))
    ]
    blocks = Skipped(frozenset({1}), frozenset({1, 2}))
    session.extend(Rows([5], position=3), OutputSpec(layers=(1, 2), skipped=blocks, logits=1))
    last = session.forwards[-1]
    assert (last.skipped_attention, last.skipped_feed_forward, last.scored, last.first_layer) == (
        1,
        2,
        1,
        0,
    )
    assert [each.scored for each in session.forwards[-2:]] == [1, 1]


def test_without_layers_given_states_go_to_the_head() -> None:
    session, _ = opened([5])
    rows = Rows([0, 0], states=torch.tensor([[7.0], [8.0]]))
    assert as_lists(session.extend(rows, OutputSpec(layers=(), hidden=(3, 3)))) == (
        [7.5, 8.5],
        None,
        [[7, 8]] * 2,
    )
    assert as_lists(session.extend(rows, OutputSpec(layers=(), hidden=(3,), logits=0))) == (
        None,
        None,
        [[7, 8]],
    )
    assert [(each.layers, each.first_layer) for each in session.forwards] == [(0, 3)]
    assert session.length == 0


def test_drafted_rows_of_all_layers_may_stand_at_a_position() -> None:
    session, layers = opened([4, 5])
    assert as_lists(session.extend(Rows([6], position=1)))[0] == [6123.5]
    assert session.length == 1 and ran(layers)[1:] == [(1, [6], None, 1)]


@pytest.mark.parametrize(
    ("rows", "output_spec", "refusal"),
    [
        pytest.param(
            Rows([7, 8], Tree(torch.tensor([-1]))),
            OutputSpec(),
            "a tree of 1 rows was given 2 tokens",
            id="more tokens than the tree has rows",
        ),
        pytest.param(
            Rows([7], Tree(torch.tensor([-1, 0]))),
            OutputSpec(),
            "given 1 tokens after 2 rows of the last extends",
            id="other rows before the tokens than ran last",
        ),
        pytest.param(
            Rows([7], Tree(torch.tensor([-1] * 9))),
            OutputSpec(),
            "without a position between",
            id="rows before the tokens that never ran",
        ),
        pytest.param(
            Rows([7], Tree(torch.tensor([-1, 0])), position=3),
            OutputSpec(),
            "given 1 tokens after 0 rows",
            id="a drafted tree over rows of the text",
        ),
        pytest.param(
            Rows([7], position=2),
            OutputSpec(layers=(0,)),
            "behind the 3 rows of the text, .* got position 2",
            id="a drafted row within the text",
        ),
        pytest.param(
            Rows([7, 8]),
            OutputSpec(logits=3),
            "the last 3 of 2 rows cannot be scored",
            id="more scores than rows",
        ),
        pytest.param(Rows([]), OutputSpec(logits=1), "the last 1 of 0 rows", id="no rows"),
        pytest.param(
            Rows([7, 8], states=torch.zeros(1, 1)),
            OutputSpec(layers=(1,)),
            "2 tokens were given states of 1 rows",
            id="states of fewer rows",
        ),
        pytest.param(
            Rows([7], position=3),
            OutputSpec(layers=(0, 3)),
            r"3 layers has no layers \[0, 3\]",
            id="a layer too many",
        ),
        pytest.param(
            Rows([7], position=3),
            OutputSpec(layers=(-1,)),
            "name those from 0 to 2",
            id="a layer from the end",
        ),
        pytest.param(
            Rows([7]),
            OutputSpec(hidden=(3, 4)),
            r"3 layers has no hidden states after layers \[3, 4\]",
            id="states after a layer too many",
        ),
        pytest.param(
            Rows([7]),
            OutputSpec(hidden=(-1,)),
            "from 0, the embeddings, to 3",
            id="states after a layer from the end",
        ),
    ],
)
def test_rows_that_an_engine_cannot_run_are_refused(
    rows: Rows, output_spec: OutputSpec, refusal: str
) -> None:
    session, layers = opened([5], reserved=1)
    session.extend([5])
    session.extend([6, 6])  # the rows of the last extend
    passes = len(layers.passes)
    with pytest.raises(UserError, match=refusal):
        session.extend(rows, output_spec)
    assert len(layers.passes) == passes


@pytest.mark.parametrize("path", [[0, 2], [-1], range(4)])
def test_rows_that_did_not_run_are_not_kept(path: Sequence[int]) -> None:
    session, layers = opened([5])
    session.extend([5, 6])
    with pytest.raises(UserError, match="of the 2 rows that ran in the last extends"):
        session.keep(path)
    assert (layers.asked, session.length) == ([], 2)


def test_a_session_is_not_rolled_back_before_its_beginning() -> None:
    session, _ = opened([4, 5])
    session.extend([5])
    with pytest.raises(UserError, match=r"keeps 0 rows or more, got rollback\(-1\)"):
        session.rollback(-1)
    assert session.length == 2
