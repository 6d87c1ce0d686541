"""Answers of any engine: the target's own, a tie or a defect, each planted; and `python scripts/audit.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import Tensor

import bild_lab
from bild_lab.engine.acceptance import ExactMatch
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.drafters import NoDraft
from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.engine.request import Source
from bild_lab.engine.sampling import Sampling
from bild_lab.errors import UserError
from bild_lab.lab.decoding.decoder import Decoder
from bild_lab.lab.measure.audit import Answer, Finding, audit_greedy, audit_sampled, chance_of, chi_square, read_answers
from bild_lab.lab.measure.certificate import DEFECT, EQUAL, TIE
from scripts import audit
from tests.checkpoints import tiny_checkpoints
from tests.stubs import StubModel
from tests.tiny import END, START, VOCABULARY

PROMPT = "w5 w9 w30 w12"
LIMIT = 12


@lru_cache
def vanilla(family: str) -> Decoder:
    return bild_lab.load(str(tiny_checkpoints() / family), policy="vanilla")


def own(family: str, prompt: str = PROMPT, limit: int = LIMIT) -> list[int]:
    return vanilla(family).generate(prompt, limit).token_ids


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_targets_own_answers_are_equal_as_tokens_and_as_text(family: str) -> None:
    for prompt in (PROMPT, "w7"):
        tokens, decoder = own(family, prompt), vanilla(family)
        for answer in (
            tokens,
            decoder.text(tokens),
            f" {decoder.text(tokens)}\n",
            tokens[:3],
            decoder.text(tokens[:3]),
        ):
            assert audit_greedy(decoder, Answer(1, prompt, answer), None) == Finding(1, EQUAL)
        if tokens[-1] > START:  # of a special token at its end a text says nothing
            assert audit_greedy(decoder, Answer(1, prompt, decoder.text(tokens)), LIMIT) == Finding(1, EQUAL)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_planted_token_is_a_defect_at_its_place(family: str) -> None:
    tokens, decoder = own(family), vanilla(family)
    wrong = [*tokens[:4], tokens[4] % (VOCABULARY - 4) + 3, *tokens[5:]]
    assert wrong[4] != tokens[4]
    for answer in (wrong, decoder.text(wrong)):
        found = audit_greedy(decoder, Answer(7, PROMPT, answer), None)
        assert (found.line, found.verdict, found.position) == (7, DEFECT, 4)
        assert (found.token, found.target_token) == (wrong[4], tokens[4]) and found.gap > 4 * found.noise > 0


def test_with_a_limit_an_answer_must_end_where_the_target_does() -> None:
    tokens, decoder = own("llama"), vanilla("llama")
    assert len(tokens) == LIMIT
    for answer in (tokens[:6], decoder.text(tokens[:6])):
        assert audit_greedy(decoder, Answer(1, PROMPT, answer), None).verdict == EQUAL
        found = audit_greedy(decoder, Answer(1, PROMPT, answer), LIMIT)
        assert (found.verdict, found.position, found.token, found.target_token) == (DEFECT, 6, END, tokens[6])
    found = audit_greedy(decoder, Answer(1, PROMPT, tokens), LIMIT - 1)  # longer than the limit
    assert (found.verdict, found.position, found.target_token) == (DEFECT, LIMIT - 1, None)


@dataclass
class Scored(StubModel):
    """Logits by the text, with the vocabulary of the tiny Llama."""

    bits: int | None = None
    positions: int | None = None
    session_positions: int | None = None
    source_positions: int | None = None

    def __post_init__(self) -> None:
        self.checkpoint, self.transformers, self.engine = Checkpoint(str(tiny_checkpoints() / "llama")), self, "hf"

    def source(self, prompt: list[int], most: int | None = None) -> Source:
        return self.checkpoint.source(prompt, most)


def scored(next_logits: Callable[[list[int]], Tensor]) -> Decoder:
    model = Scored(next_logits)
    return Decoder(model, DraftThenVerify(model, NoDraft(model), ExactMatch()), (model,))


def steps(text: list[int]) -> Tensor:
    """After token n comes n + 1; from 12 on n + 2 is tied with it, and after 20 the text ends."""
    logits = torch.zeros(VOCABULARY, dtype=torch.float64)
    logits[END if text[-1] > 20 else text[-1] + 1] = 8.0
    if 12 <= text[-1] <= 20:
        logits[text[-1] + 2] = 8.0
    return logits


def test_after_a_tie_the_judging_goes_on() -> None:
    decoder = scored(steps)
    tied = audit_greedy(decoder, Answer(1, [10], [11, 12, 14, 15, 17, 18]), None)
    assert (tied.verdict, tied.ties, tied.position, tied.token, tied.target_token) == (TIE, 2, 2, 14, 13)
    later = audit_greedy(decoder, Answer(1, [10], [11, 12, 14, 15, 18]), None)
    assert (later.verdict, later.ties, later.position, later.gap) == (DEFECT, 1, 4, 8.0)
    assert audit_greedy(decoder, Answer(1, [19], [20, 21, END]), 9) == Finding(1, EQUAL)
    after_end = audit_greedy(decoder, Answer(1, [19], [20, 21, END, 5]), 9)
    assert (after_end.verdict, after_end.position, after_end.token, after_end.target_token) == (DEFECT, 3, 5, None)


def test_what_two_engines_differ_by_is_noise() -> None:
    """Tokens 11 and 12 are 0.001 nats from each other; another engine's scores are off by as much, or are not."""

    def near(text: list[int], off: float = 0.0) -> Tensor:
        logits = torch.zeros(VOCABULARY, dtype=torch.float64)
        logits[11], logits[12], logits[13] = 8.0, 7.999 + off, 7.0 - off
        return logits

    verdicts = []
    for off in (0.0, 0.001):
        decoder = scored(near)
        decoder.target.engine, decoder.target.transformers = "kernels", Scored(lambda text, off=off: near(text, off))
        verdicts.append(audit_greedy(decoder, Answer(1, [10], [12]), None).verdict)
    assert verdicts == [DEFECT, TIE]


P = (2.0 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(5)).double()).softmax(-1)


def draws(table: Tensor, count: int, first: int = 10, length: int = 3) -> list[Answer]:
    """Texts whose every token is drawn by the row of the token before it."""
    chance, found = torch.Generator().manual_seed(1), []
    for line in range(1, count + 1):
        text = [first]
        while len(text) <= length and text[-1] != END:
            text.append(int(torch.multinomial(table[text[-1]], 1, generator=chance)))
        found.append(Answer(line, [first], text[1:]))
    return found


def test_draws_of_the_target_pass_and_those_of_other_distributions_fail() -> None:
    decoder, sampling = scored(lambda text: P[text[-1]].log()), Sampling(1.0)
    (sound,) = audit_sampled(decoder, draws(P, 1000), sampling)
    assert (sound.verdict, sound.draws) == (EQUAL, 1000) and sound.contexts > 2 and sound.p_value > 0.01
    colder = (P.log() / 0.8).softmax(-1)
    assert [one.verdict for one in audit_sampled(decoder, draws(colder, 1000), sampling)] == [DEFECT]
    assert [one.verdict for one in audit_sampled(decoder, draws(colder, 1000), Sampling(0.8))] == [EQUAL]
    later = P.clone()
    later[int(P[10].argmax())] = P[3]  # a fault after one token alone
    found = audit_sampled(decoder, [*draws(later, 1000), *draws(P, 1000, first=11)], sampling)
    assert [(one.line, one.verdict) for one in found] == [(1, DEFECT), (1, EQUAL)]
    assert [one.verdict for one in audit_sampled(decoder, draws(P, 1000), Sampling(1.0, top_k=5))] == [DEFECT]


def test_too_few_draws_and_texts_are_refused() -> None:
    decoder = scored(lambda text: P[text[-1]].log())
    with pytest.raises(UserError, match="80 draws of 1 prompts are too few"):
        audit_sampled(decoder, draws(P, 80), Sampling(1.0))
    with pytest.raises(UserError, match="line 3: sampled answers must be token ids"):
        audit_sampled(decoder, [Answer(3, "w5", "w6")], Sampling(1.0))


def test_the_chi_square_test_is_the_textbooks() -> None:
    """Four bins of 10, 20, 30 and 40 % and 100 draws: Σ (seen − expected)² / expected with three degrees of freedom."""
    p, seen = torch.tensor([0.1, 0.2, 0.3, 0.4]).double(), torch.tensor([20.0, 20.0, 20.0, 40.0]).double()
    assert chi_square(seen, p) == (pytest.approx(10 + 100 / 30), 4, pytest.approx(0.1))
    assert chance_of([(7.814728, 4, 0.0)]) == pytest.approx(0.05, abs=1e-6)
    assert chance_of([(4.0, 2, 0.0), (3.814728, 3, 0.0)]) == pytest.approx(0.05, abs=1e-6) and chance_of([]) == 1.0
    rare = torch.tensor([0.96, 0.02, 0.02]).double()  # the rare ones and their neighbour make one bin
    assert chi_square(torch.tensor([96.0, 4.0, 0.0]).double(), rare) == (
        pytest.approx(0.0),
        1,
        pytest.approx(0.0, abs=1e-6),
    )
    assert chi_square(seen, torch.tensor([0.0, 0.2, 0.4, 0.4]).double())[0] == float("inf")


def lines(file: Path, *answers: tuple[object, object]) -> Path:
    file.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in answers))
    return file


def test_the_command_prints_counts_and_exits_by_them(command, tmp_path: Path) -> None:
    folder, tokens = str(tiny_checkpoints() / "llama"), own("llama")
    words = [f"pair.target={folder}", "pair.draft=null", "runtime.engine=native"]
    good = lines(tmp_path / "good.jsonl", (PROMPT, tokens), ("w7", vanilla("llama").text(own("llama", "w7"))))
    code, printed = command(audit, *words, f"answers={good}", "name=good", config="audit")
    assert code == 0 and "equal 2, ties 0, defects 0" in printed
    wrong = lines(tmp_path / "wrong.jsonl", (PROMPT, tokens), (PROMPT, [*tokens[:4], tokens[4] ^ 1]))
    code, printed = command(audit, *words, f"answers={wrong}", config="audit")
    assert code == 1 and "equal 1, ties 0, defects 1" in printed
    rows = pd.read_csv(tmp_path / "outputs/audit/audit.csv")
    assert rows.verdict.tolist() == [EQUAL, DEFECT] and rows.position[1] == 4 and rows.target_token[1] == tokens[4]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("", "holds no answers"),
        ('{"prompt": "w5"}', "line 1: each line must be a JSON object with prompt and answer"),
        ('\n{"prompt": "w5", "answer": [3, -1]}', "line 2"),
        ('{"prompt": "w5", "answer": [3.5]}', "line 1"),
        ("w5", "got no JSON"),
    ],
)
def test_other_files_are_refused(content: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=message):
        read_answers(file)


def test_tokens_of_another_vocabulary_and_no_file_are_refused(command) -> None:
    with pytest.raises(UserError, match=f"line 1: tokens must be from 0 to {VOCABULARY - 1}, got 99"):
        audit_greedy(vanilla("llama"), replace(Answer(1, PROMPT, [3]), answer=[3, 99]), None)
    code, printed = command(audit, config="audit")
    assert code == 2 and "answers must be a file of answers, got None; set answers=FILE.jsonl" in printed
