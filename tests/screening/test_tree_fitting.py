"""The best tree against every tree that there is, acceptance of known candidates, and fits as a
user sees them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import ROOT, Draft, Verdict
from bild_lab.engine.methods.candidate_trees import (
    CandidateNode,
    ProbedTree,
    TreeLayout,
    trees_from_content,
)
from bild_lab.engine.methods.candidates import CandidateDrafter
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.session import Scores
from bild_lab.engine.trace import Round, Trace
from bild_lab.errors import UserError
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.measure.runner import run_point
from bild_lab.lab.point.prepare import Point, prepare
from bild_lab.lab.store.records import Sweep
from bild_lab.screening import tree_fitting
from bild_lab.screening.tree_fitting import (
    TIMED_ROUNDS,
    Choice,
    DraftedText,
    acceptance_of,
    best_nodes,
    best_tree,
    choices,
    collecting_drafter,
    describe_tree,
    fit_tree,
    measured_costs,
    round_times,
)
from bild_lab.training import reports
from scripts import fit_tree as script
from tests.checkpoints import write_data
from tests.engine.methods.modules.tiny import files_of
from tests.stubs import StubModel
from tests.tiny import tiny_llama

MOST = 6  # nodes of the trees that are all tried


def subtrees(
    acceptance: np.ndarray, depth: int, parent: int, first: int, most: int
) -> Iterator[list[CandidateNode]]:
    """All sets of at most so many nodes below a row, the first of which gets the index `first`."""
    ranks = range(acceptance.shape[1]) if depth < len(acceptance) else ()

    def below(rank: int, index: int) -> Iterator[list[CandidateNode]]:
        if rank == len(ranks):
            yield []
            return
        yield from below(rank + 1, index)
        if index - first < most:
            for inner in subtrees(
                acceptance, depth + 1, index, index + 1, most - (index - first) - 1
            ):
                for others in below(rank + 1, index + 1 + len(inner)):
                    yield [CandidateNode(depth, rank, parent), *inner, *others]

    yield from below(0, first)


def tokens_of(nodes: Sequence[CandidateNode], acceptance: np.ndarray) -> float:
    """Expected tokens of a round: the target's own, and each node with the chance that its whole
    path is accepted.
    """
    reached = [1.0]
    for node in nodes:
        reached.append(reached[node.parent + 1] * acceptance[node.depth, node.rank])
    return sum(reached)


def table(seed: int, depth: int, ranks: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet([2.0, *[0.8] * ranks], depth)[:, :ranks]


def most_tokens(acceptance: np.ndarray) -> list[float]:
    """By number of nodes, of every tree of at most MOST nodes."""
    best = [0.0] * (MOST + 1)
    for nodes in subtrees(acceptance, 0, ROOT, 0, MOST):
        best[len(nodes)] = max(best[len(nodes)], tokens_of(nodes, acceptance))
    return best


@pytest.mark.parametrize("seed", range(4))
def test_no_tree_of_as_many_nodes_gives_more_tokens(seed: int) -> None:
    acceptance = table(seed, 3, 3)
    best = most_tokens(acceptance)
    nodes = [node for node, _ in best_nodes(acceptance, MOST)]
    assert [tokens_of(nodes[:count], acceptance) for count in range(MOST + 1)] == pytest.approx(
        best
    )
    assert all(node.parent < place for place, node in enumerate(nodes))
    planted = acceptance.copy()  # a node chosen by its own chance, not by that of its path
    planted[0, 0], planted[1, 0] = planted[1, 0] / 2, 0.99
    wrong = [node for node, _ in best_nodes(planted, MOST)]
    assert tokens_of(wrong, acceptance) < best[MOST] - 1e-6


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_no_choice_of_depth_and_size_gives_more_tokens_per_second(seed: int, masked: bool) -> None:
    acceptance = table(seed, 2, 3)
    # by rows, with steps, and not monotone
    seconds = [1.0, 1.0, 1.05, 1.05, 1.7, 1.6, 1.7, 3.0, 3.1]
    costs = [{1: 0.9}] + [
        {1 + rows: one + 0.1 * depth for rows, one in enumerate(seconds)} for depth in (1, 2)
    ]
    found = choices(acceptance, costs, len(seconds), masked)
    assert found[0] == Choice(0, 0, 0, tokens=1.0, seconds=0.9)
    assert max(one.rows for one in found) <= len(seconds)
    best = 1 / 0.9
    for depth in (1, 2):
        masks = depth if masked else 0
        for nodes in subtrees(acceptance[:depth], 0, ROOT, 0, len(seconds) - 1):
            if nodes and (rows := (1 + len(nodes)) * (1 + masks)) <= len(seconds):
                best = max(best, tokens_of(nodes, acceptance) / costs[depth][rows])
    assert max(one.tokens_per_s for one in found) == pytest.approx(best)
    for one in found:
        tree = best_tree(acceptance[: one.depth], one.nodes, one.masks)
        assert (tree.rows, tokens_of(tree.nodes, acceptance)) == (
            one.rows,
            pytest.approx(one.tokens),
        )


@pytest.mark.parametrize("step", [4, 7, 12])
def test_a_step_in_the_cost_keeps_the_tree_below_it(step: int) -> None:
    planted = {rows: 1.0 if rows <= step else 9.0 for rows in range(1, 17)}
    found = choices(table(1, 3, 4), [{1: 1.0}, planted, planted, planted], 16, False)
    assert max(found, key=lambda one: one.tokens_per_s).rows == step


CHANCES = np.array([[0.5, 0.3, 0.0], [0.6, 0.1, 0.2]])


class KnownDrafter(CandidateDrafter):
    """For a target that counts up modulo 50: the right token has each rank with the chance of
    CHANCES. Its three candidates are all that it knows.
    """

    def __init__(self) -> None:
        target = SimpleNamespace(checkpoint=SimpleNamespace(columns=3), device=torch.device("cpu"))
        super().__init__(
            target,
            SimpleNamespace(markov=None, draft_vocabulary=None),
            "full_tree",
            1,
            len(CHANCES),
        )
        self._chance = random.Random(0)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        levels = []
        for depth, chances in enumerate(CHANCES):
            level = [(verdict.next_token + 20 + rank) % 50 for rank in range(3)]
            rank = self._chance.choices([0, 1, 2, None], [*chances, 1 - chances.sum()])[0]
            if rank is not None:
                level[rank] = (verdict.next_token + 1 + depth) % 50
            levels.append(level)
        self.candidates = torch.tensor(levels)


def counting() -> StubModel:
    return StubModel(
        lambda tokens: torch.nn.functional.one_hot(torch.tensor((tokens[-1] + 1) % 50), 50).float()
    )


def test_the_chances_of_a_drafter_are_found_by_depth_and_rank() -> None:
    method = DraftThenVerify(counting(), collecting_drafter(KnownDrafter(), 3), ExactMatch())
    texts = []
    for _ in range(60):
        tokens = method.decode(Request(Source((0,)), Limits(1, 50)), trace := Trace())
        texts.append(DraftedText(tokens, 1, trace.rounds))
    np.testing.assert_allclose(acceptance_of(texts, 2, 3), CHANCES, atol=0.05)


def test_below_a_second_choice_nothing_is_known_of_candidates_that_depend_on_their_parent() -> None:
    (first, second) = (
        DraftedText([0, *text], 1, [Round((1, 2, 3, 4), 0, text[0])]) for text in ((1, 3), (2, 4))
    )
    assert acceptance_of([first, second], 2, 2).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert acceptance_of([second], 2, 2, by_parent=True).tolist() == [[0.0, 1.0], [0.0, 0.0]]
    assert acceptance_of([first], 2, 2, by_parent=True).tolist() == [[1.0, 0.0], [1.0, 0.0]]


def test_below_a_miss_nothing_is_known() -> None:
    missed = DraftedText([0, 7, 3], 1, [Round((1, 2, 3, 4), 0, 7)])  # 3 is drafted below 1 and 2
    found = DraftedText([0, 2, 4], 1, [Round((1, 2, 3, 4), 2)])
    assert acceptance_of([missed], 2, 2).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert acceptance_of([missed, found], 2, 2).tolist() == [[0.0, 0.5], [0.0, 1.0]]


def test_behind_a_text_that_ended_every_candidate_is_a_miss() -> None:
    whole = DraftedText([0, 1, 3], 1, [Round((1, 2, 3, 4), 2)])
    ended = DraftedText([0, 1], 1, [Round((1, 2, 3, 4), 1)])
    assert acceptance_of([whole, ended], 2, 2).tolist() == [[1.0, 0.0], [0.5, 0.0]]


def test_behind_the_length_limit_nothing_is_drafted_so_no_candidate_is_a_miss() -> None:
    class Right(KnownDrafter):
        """Its most likely candidates are the right ones."""

        def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
            following = [verdict.next_token + 1 + depth for depth in range(2)]
            self.candidates = torch.tensor([[token, 40, 41] for token in following])

    method = DraftThenVerify(counting(), collecting_drafter(Right(), 3), ExactMatch())
    for length in range(3, 9):
        tokens = method.decode(Request(Source((0,)), Limits(1, length)), trace := Trace())
        found = acceptance_of([DraftedText(tokens, 1, trace.rounds)], 2, 3)
        assert found.tolist() == [[1.0, 0.0, 0.0]] * 2


def test_probes_follow_the_nodes_that_have_children_alone() -> None:
    drafter = KnownDrafter()
    drafter.max_probes = 2
    trees = collecting_drafter(drafter, 3)._trees._trees
    assert [tree.probes for tree in trees] == [(2,), (2, 2, 0, 0), (2, 2, 0, 0, 2, 0, 0)]


def test_a_chosen_tree_stands_beside_the_target_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = [{1: 0.004}, {2: 0.005, 64: 0.5}, {2: 0.006, 64: 0.5}]
    chosen = fitted(costs, monkeypatch)["chosen"]
    assert chosen["alone_ms"] == 4 and chosen["ms"] >= 5


def fitted(
    costs: list[dict[int, float]],
    monkeypatch: pytest.MonkeyPatch,
    drafter: CandidateDrafter | None = None,
) -> dict[str, Any]:
    monkeypatch.setattr(tree_fitting, "measured_costs", lambda *_: costs)
    method = DraftThenVerify(counting(), drafter or KnownDrafter(), ExactMatch())
    decoder = SimpleNamespace(method=method, synchronize=lambda: None)
    return fit_tree(decoder, [Request(Source((0,)), Limits(1, 50))] * 4, {})


def test_the_file_has_a_tree_for_each_number_of_depths_with_candidates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = fitted([{1: 1.0}, {2: 1.0, 64: 1.0}, {2: 1.0, 5: 1.0, 6: 9.0, 64: 9.0}], monkeypatch)
    assert content["chosen"]["rows"] == 5
    trees = trees_from_content(content)
    assert [len(tree.nodes) for tree in trees] == [0, 3, 4]
    assert [node.depth for node in trees[1].nodes] == [0, 0, 0]
    assert max(node.depth for node in trees[2].nodes) == 1


def test_a_drafter_with_probes_gets_as_many_below_each_row_as_the_tree_is_deep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = KnownDrafter()
    drafter.max_probes = 2
    content = fitted([{1: 1.0}, {4: 9.0}, {6: 1.0, 9: 1.0, 10: 9.0}], monkeypatch, drafter)
    assert content["chosen"]["rows"] == 9
    assert trees_from_content(content)[-1].probes == (2, 2, 2)


@pytest.mark.parametrize("by_parent", [False, True])
def test_of_candidates_that_depend_on_their_parent_those_below_a_second_choice_tell_nothing(
    by_parent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SecondIsRight(KnownDrafter):
        def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
            first, second = verdict.next_token + 1, verdict.next_token + 2
            self.candidates = torch.tensor([[60, first % 50, 61], [second % 50, 60, 61]])

    class FromCandidates:
        """A Markov head without a bias."""

        def draft(self, candidates: torch.Tensor, last: int, layout: TreeLayout) -> torch.Tensor:
            return candidates.flatten()[layout.picks]

    drafter = SecondIsRight()
    drafter.markov = FromCandidates() if by_parent else None
    found = fitted([{1: 1.0}, {2: 9.0}, {2: 9.0}], monkeypatch, drafter)["acceptance"]
    assert found == [[0, 1, 0], [0 if by_parent else 1, 0, 0]]


def test_texts_are_decoded_until_there_are_rounds_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = [{1: 1.0}, {2: 9.0}, {2: 9.0}]
    assert fitted(costs, monkeypatch)["texts"]["examples"] == 4
    monkeypatch.setattr(tree_fitting, "ROUNDS", 1)
    assert fitted(costs, monkeypatch)["texts"]["examples"] == 1


def words(checkpoints: Path, data: Path, policy: str, *more: str) -> list[str]:
    needed = files_of(policy, tiny_llama(1).config, checkpoints)
    pair = [f"pair.target={checkpoints / 'llama'}", f"pair.draft={checkpoints / 'llama-draft'}"]
    rest = [
        "dataset=multi30k",
        f"dataset.path={data}",
        "decoding.max_new_tokens=8",
        "measure.warmup=0",
    ]
    knobs = [f"policy.{knob}={path}" for knob, path in needed.items()]
    return [*pair, *rest, f"policy={policy}", *knobs, *more]


def point(*overrides: str) -> Point:
    return prepare(compose_config([*overrides, "dataset.split=test"]))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["medusa", "bita"])
def test_the_file_of_a_fitted_tree_is_decoded_with_and_is_part_of_the_result(
    policy: str,
    checkpoints: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(tree_fitting, "MOST_ROWS", 8)
    monkeypatch.setattr(tree_fitting, "SIZES", (2, 4, 8))
    monkeypatch.setattr(tree_fitting, "WIDEST", 3)
    monkeypatch.chdir(tmp_path)
    base = words(checkpoints, write_data(tmp_path / "data", 5), policy)
    script.fit(compose_config(["name=tree", "dataset.split=test", *base], "fit_tree"))
    (kept,) = tmp_path.glob("outputs/tree/*.json")
    assert f"policy.tree={kept.relative_to(tmp_path)}" in capsys.readouterr().out.replace("\n", "")
    result = run_point(point(*base, f"policy.tree={kept}"), Sweep(tmp_path / "sweep"))
    tree = result.facts["trained"]["tree"]
    assert result.agreement_with_target == 1 and tree == json.loads(kept.read_text())
    assert {key: tree["texts"][key] for key in ("split", "examples")} == {
        "split": "test",
        "examples": 5,
    }


def test_a_tree_of_the_texts_that_a_run_decodes_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"de": "Ja.", "en": "Yes."}\n')
    (tmp_path / "apart").mkdir()
    for split in ("test", "validation"):
        (tmp_path / "apart" / f"{split}.jsonl").write_text('{"de": "Ja.", "en": "Yes."}\n')
    monkeypatch.setattr(reports, "dataset_words", lambda dataset: ["dataset=multi30k"])
    told = []
    for path in ("pairs.jsonl", "apart"):
        line = ["dataset=multi30k", f"dataset.path={tmp_path / path}"]
        script.note_same_texts(compose_config(line, "fit_tree"))
        told.append("decodes the texts that the tree was fitted to" in capsys.readouterr().out)
    assert told == [True, False]


def test_a_policy_without_candidates_has_no_tree_to_fit(
    checkpoints: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match="a tree is fitted for policy=medusa or policy=bita, got policy=speculative"
    ):
        script.fit(
            compose_config(
                [*words(checkpoints, data, "speculative"), "dataset.split=test"], "fit_tree"
            )
        )


def test_a_tree_is_not_fitted_to_batches(
    checkpoints: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = [*words(checkpoints, data, "medusa"), "dataset.split=test", "runtime.batch=2"]
    with pytest.raises(UserError, match=r"one text at a time, got runtime\.batch=2"):
        script.fit(compose_config(line, "fit_tree"))


def test_a_trees_file_counts_with_its_content(
    checkpoints: Path, data: Path, tmp_path: Path
) -> None:
    base = words(checkpoints, data, "medusa")

    def name_of(rank: int, file: str) -> str:
        trees = [
            {"parents": [], "ranks": [], "probes": [0]},
            {"parents": [-1], "ranks": [rank], "probes": [0, 0]},
        ]
        (tmp_path / file).write_text(json.dumps({"trees": trees}))
        return point(*base, f"policy.tree={tmp_path / file}").id

    here = name_of(0, "here.json")
    assert name_of(0, "there.json") == here != name_of(1, "here.json")
    assert here != point(*base, "policy.tree=full_tree").id


def test_a_tree_that_drafts_nothing_is_told_with_its_reason() -> None:
    def told(rows: int) -> str:
        chosen = {"rows": rows, "tokens": 1.5, "ms": 3.0, "alone_ms": 2.5}
        return describe_tree({"chosen": chosen, "acceptance": [[0.0286, 0.01], [0.25, 0.08]]})

    assert told(4) == (
        "1.50 tokens in a round of 4 rows and 3.00 ms: 500 tokens/s, 1.25 times the target alone"
    )
    assert "nothing is drafted: a first token is right in 3 % of the rounds" in told(1)


def test_timed_rounds_are_those_that_drafted_the_whole_tree_after_a_texts_first() -> None:
    tree = best_tree(CHANCES, 3, 0)
    method = DraftThenVerify(counting(), KnownDrafter(), ExactMatch())

    def times(length: int) -> list[float]:
        return round_times(method, Request(Source((0,)), Limits(1, length)), 2, tree, lambda: None)

    assert len(times(100)) == TIMED_ROUNDS
    assert times(2) == []  # its second round has room for one token


def test_a_timed_tree_has_no_more_probes_below_a_row_than_it_is_deep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed: list[tuple[int, ProbedTree]] = []

    def seconds(_: object, text: object, depth: int, tree: ProbedTree, *__: object) -> list[float]:
        timed.append((depth, tree))
        return [1.0]

    monkeypatch.setattr(tree_fitting, "round_times", seconds)
    method = SimpleNamespace(drafter=SimpleNamespace(max_probes=2))
    measured_costs(method, ["text"], table(0, 3, 4), lambda: None)
    assert {(depth, max(tree.probes)) for depth, tree in timed} == {(0, 0), (1, 1), (2, 2), (3, 2)}


def test_of_the_seconds_of_rounds_the_lower_quartile_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other work on the machine only makes a round longer."""
    seconds = {"first": [9.0, 1.0, 4.0], "second": [3.0, 2.0]}
    monkeypatch.setattr(tree_fitting, "round_times", lambda _, text, *__: seconds[text])
    method = SimpleNamespace(drafter=SimpleNamespace(max_probes=0))
    found = measured_costs(method, list(seconds), np.zeros((0, 1)), lambda: None)
    assert found == [{1: 2.0}]
