"""The judge: what it forgives, the distribution of what is emitted, and which state it reads."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bild_lab.engine.acceptance import Judge
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import ROOT, Draft, Verdict
from bild_lab.engine.drafters import ModelDrafter, ModelTreeDrafter
from bild_lab.engine.heads import JudgeConfig, JudgeHead, load_judge
from bild_lab.engine.protocols import Acceptance, Drafter
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import Scores
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from tests.engine.acceptance.exact import DRAFTER, GREEDY, TARGET, chain_of, outcomes, rows, rows_after, sampled
from tests.engine.heads.tiny import random_judge
from tests.policies import in_memory
from tests.tiny import TINY, relative_of

MATTERS, DOES_NOT, LARGE = 5.0, -5.0, 99.0  # states of one number, and one that decides nothing


def head(threshold: float = 0.5) -> JudgeHead:
    """The chance is σ(h)."""
    made = JudgeHead(JudgeConfig(1, threshold))
    with torch.no_grad():
        made.weight.fill_(1.0)
    return made


def judging(states: list[float], threshold: float | None = None) -> Acceptance:
    """The rule in a round with these states: after the text, then after each drafted token."""
    return Judge(head(), threshold).in_round([0], Scores(None, torch.tensor(states, dtype=torch.float64)[:, None]))


def test_a_mismatch_is_accepted_if_the_state_after_it_says_that_it_does_not_matter() -> None:
    logits = rows([0.6, 0.4], [0.1, 0.9], [0.2, 0.8])
    draft = Draft(torch.tensor([1, 0]))  # both are mismatches
    assert judging([LARGE, DOES_NOT, DOES_NOT])(draft, logits, GREEDY).path == (0, 1)
    assert judging([LARGE, DOES_NOT, MATTERS])(draft, logits, GREEDY).path == (0,)
    assert judging([DOES_NOT, MATTERS, DOES_NOT])(draft, logits, GREEDY) == Verdict(
        (), 0, {"forgiven": (0, 0), "importance": pytest.approx((1 / (1 + math.exp(-5)), 1 / (1 + math.exp(5))))}
    )


def test_a_match_is_accepted_whatever_the_judge_says() -> None:
    logits = rows([0.6, 0.4], [0.1, 0.9])
    verdict = judging([LARGE, MATTERS])(Draft(torch.tensor([0])), logits, GREEDY)
    assert (verdict.path, verdict.next_token, verdict.stats["forgiven"]) == ((0,), 1, (0,))


def test_at_the_threshold_a_mismatch_is_rejected() -> None:
    logits, draft = rows([0.6, 0.4], [0.1, 0.9]), Draft(torch.tensor([1]))
    assert judging([LARGE, 0.0], 0.5)(draft, logits, GREEDY).path == ()
    assert judging([LARGE, 0.0], math.nextafter(0.5, 1))(draft, logits, GREEDY).path == (0,)
    assert judging([LARGE, 0.0])(draft, logits, GREEDY).path == ()  # the judge's own threshold


def test_the_emitted_token_has_exactly_the_distribution_of_the_rule() -> None:
    """The judge forgives token 1, whose state says so; the others are accepted with min(1, p / q)."""
    p, q, output = TARGET[0].tolist(), DRAFTER[0].tolist(), [0.0] * 3
    for draft, chance in chain_of(DRAFTER, 1):
        (token,) = draft.token_list
        rule = judging([LARGE, DOES_NOT if token == 1 else MATTERS])
        for text, found in outcomes(rule, draft, rows_after(draft, TARGET), sampled()).items():
            output[text[0]] += chance * found
    kept = [b if token == 1 else min(a, b) for token, (a, b) in enumerate(zip(p, q, strict=True))]
    rest = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
    assert output == pytest.approx(
        [k + (1 - sum(kept)) * r / sum(rest) for k, r in zip(kept, rest, strict=True)], abs=1e-6
    )
    assert min(p[1], q[1]) < kept[1]


def test_in_a_tree_the_targets_choice_comes_first_and_then_the_most_likely_that_is_forgiven() -> None:
    logits = rows([0.5, 0.3, 0.2], *[[0.8, 0.1, 0.1]] * 3)
    draft = Draft(torch.tensor([2, 1, 0]), torch.tensor([ROOT, ROOT, ROOT]))
    assert judging([LARGE, DOES_NOT, DOES_NOT, MATTERS])(draft, logits, GREEDY).path == (2,)
    mismatches = Draft(torch.tensor([2, 1]), torch.tensor([ROOT, ROOT]))
    assert judging([LARGE, DOES_NOT, DOES_NOT])(mismatches, logits[:3], GREEDY).path == (1,)
    assert judging([LARGE, DOES_NOT, MATTERS])(mismatches, logits[:3], GREEDY).path == (0,)


def test_a_token_that_cannot_be_drawn_is_rejected() -> None:
    request = Request(Source((0,)), Limits(1, 9), Sampling(temperature=1.0, top_k=1), torch.Generator().manual_seed(0))
    logits, q = rows([0.6, 0.4], [0.5, 0.5]), torch.tensor([[0.1, 0.9]], dtype=torch.float64)
    assert judging([LARGE, DOES_NOT])(Draft(torch.tensor([1]), probs=q), logits, request).path == ()


def drafter_of(kind: str, model: object) -> Drafter:
    return (
        ModelDrafter(model, 3) if kind == "chain" else ModelTreeDrafter(model, nodes=5, window=3, width=2, children=2)
    )


@pytest.mark.parametrize(("family", "kind"), [("llama", "chain"), ("t5", "tree")])
def test_the_judge_reads_what_the_head_reads_after_the_drafted_token(family: str, kind: str) -> None:
    """Against the last hidden state of one forward of Transformers over the whole text."""
    module = TINY[family](3, layers=2).double()
    target, draft = in_memory(module, "native"), in_memory(relative_of(module, 4, 0.3).double(), "native")
    source = Source((0,), torch.tensor([[7, 9, 1]])) if family == "t5" else Source((2, 7, 9))
    judge = random_judge(module.config)
    trace = Trace()
    method = DraftThenVerify(target, drafter_of(kind, draft), Judge(judge))
    text = method.decode(Request(source, Limits(len(source.prompt), 24)), trace)
    place, forgiven = len(source.prompt), 0
    for one in trace.rounds:
        chances = one.stats["importance"]
        if one.drafted:
            tokens = torch.tensor([[*text[:place], one.drafted[0]]])
            inputs = {"input_ids": tokens} if family == "llama" else {"decoder_input_ids": tokens}
            if family == "t5":
                inputs["encoder_outputs"] = module.encoder(input_ids=source.encoder_ids)
            with torch.inference_mode():
                expected = float(judge(last_state(module, inputs)[-1:]))
            assert chances[0] == pytest.approx(expected, abs=1e-6)
        forgiven += sum(one.stats["forgiven"])
        place += one.accepted + 1
    assert forgiven > 0 and trace.rollbacks > 0


@torch.inference_mode()
def last_state(module: torch.nn.Module, inputs: dict[str, object]) -> Tensor:
    """What the model's own head is given."""
    seen: list[Tensor] = []
    hook = module.get_output_embeddings().register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    module(**inputs, use_cache=False)
    hook.remove()
    return seen[0][0]


def test_a_judge_alone_says_what_it_needs() -> None:
    with pytest.raises(UserError, match="hidden states"):
        Judge(head())(Draft(torch.tensor([1])), rows([0.6, 0.4], [0.1, 0.9]), GREEDY)


def test_a_judge_is_read_as_it_was_saved_and_for_its_target_alone(tmp_path: Path) -> None:
    target = in_memory(TINY["llama"](1, layers=1))
    made = random_judge(target.checkpoint.config)
    made.save(tmp_path)
    read = load_judge(target, str(tmp_path))
    assert read.config == made.config and torch.equal(read.weight, made.weight) and not read.weight.requires_grad
    JudgeHead(JudgeConfig(7, 0.5, base={"path": "another"})).save(tmp_path / "narrow")
    with pytest.raises(UserError, match="another.*hidden_size is 7.* 32"):
        load_judge(target, str(tmp_path / "narrow"))
    with pytest.raises(UserError, match="python scripts/train_module.py module=judge"):
        load_judge(target, None)
