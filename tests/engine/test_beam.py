"""Beam search against Transformers, and speculative beam search against beam search."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

import run
from bild_lab.engine.beam import BeamDrafter, BeamSearch
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import Model
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from bild_lab.lab.cli import run_application
from tests.policies import in_memory
from tests.stubs import ModuleModel, NextLogits, StubModel
from tests.thinned import thinned
from tests.tiny import END, PAD, START, VOCABULARY, relative_of, tiny_llama, tiny_t5

FAMILIES = ("t5", "llama")
ENGINES = ("hf", "native")
END_TOKENS = tuple(map(frozenset, ([END, 7, 9], [END], [], [END, 7, 9, 12, 20])))
RULES = (
    {},
    {"early_stopping": True},
    {"length_penalty": 0.2},
    {"length_penalty": 2.0, "early_stopping": True},
    {"length_penalty": -1.0},
)


def random_target(family: str, seed: int) -> PreTrainedModel:
    """Flat enough for hypotheses to overtake each other; float64 and float32 in turn."""
    module = (tiny_t5 if family == "t5" else tiny_llama)(seed, sharpness=2.0)
    return module.double() if seed % 2 else module


def random_request(family: str, seed: int, max_new_tokens: int) -> Request:
    """One, three, five or no end tokens, of which a decoder-only prompt holds one."""
    words = torch.randint(3, VOCABULARY, (1, 7), generator=torch.Generator().manual_seed(seed))
    source = Source((PAD,), words) if family == "t5" else Source((START, END, *words[0].tolist()))
    return Request(source, Limits(len(source.prompt), max_new_tokens, END_TOKENS[seed % 4]))


def by_transformers(module: PreTrainedModel, request: Request, beams: int, rules: Mapping[str, object]) -> list[int]:
    """What `generate` gives, without the padding behind its end."""
    source, limits = request.source, request.limits
    module.generation_config = GenerationConfig(
        num_beams=beams,
        do_sample=False,
        max_new_tokens=limits.max_new_tokens,
        eos_token_id=sorted(limits.end_tokens) or None,
        pad_token_id=PAD,
        decoder_start_token_id=PAD if module.config.is_encoder_decoder else None,
        **rules,
    )
    prompt = torch.tensor([source.prompt])
    inputs = {"input_ids": prompt}
    if source.encoder_ids is not None:
        inputs = {"input_ids": source.encoder_ids, "decoder_input_ids": prompt}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with torch.inference_mode():
        out = module.generate(**inputs)[0].tolist()
    return limits.append(out[: limits.prompt_length], out[limits.prompt_length :])


def decode(target: Model, request: Request, beams: int, **options: object) -> tuple[list[int], Trace]:
    trace = Trace()
    return BeamSearch(target, beams, **options).decode(request, trace), trace


def steps(trace: Trace) -> int:
    """How far the search went."""
    return sum(each.accepted + 1 for each in trace.rounds)


@pytest.mark.parametrize("family", FAMILIES)
def test_beam_search_gives_the_text_of_transformers(family: str) -> None:
    ended = 0
    for seed, beams in itertools.product(range(5), (2, 3, 4)):
        module, rules = random_target(family, seed), RULES[(seed + beams) % len(RULES)]
        request = random_request(family, seed, (20, 12, 1)[seed % 3])
        expected = by_transformers(module, request, beams, rules)
        for engine in ENGINES:
            tokens, trace = decode(in_memory(module, engine), request, beams, **rules)
            assert tokens == expected, (seed, beams, rules, engine)
            assert steps(trace) == trace.target_calls <= request.limits.max_new_tokens
        ended += len(expected) < request.limits.prompt_length + request.limits.max_new_tokens
    assert 2 < ended < 13  # some ended by themselves, and some at the length limit


@pytest.mark.parametrize(("engine", "family"), thinned(itertools.product(ENGINES, FAMILIES), 3))
def test_speculative_beam_search_gives_the_text_of_beam_search(family: str, engine: str) -> None:
    accepted = rejected = whole = 0
    for seed, (beams, window) in enumerate(itertools.product((2, 4), (1, 2, 4, 5))):
        module, rules = random_target(family, seed), RULES[seed % len(RULES)]
        small = relative_of(module, seed + 1, noise=0.03 if seed % 3 else 0.002).to(module.dtype)
        target, draft = in_memory(module, engine), in_memory(small, engine)
        request = random_request(family, seed, (16, 7, 20)[seed % 3])
        expected, alone = decode(target, request, beams, **rules)
        for width in (None, beams + 3):
            drafter = BeamDrafter(draft, window, width)
            tokens, trace = decode(target, request, beams, drafter=drafter, **rules)
            assert tokens == expected, (seed, beams, window, width)
            assert steps(trace) == steps(alone)
            assert all(len(each.drafted) <= each.draft_calls <= window for each in trace.rounds)
            accepted += trace.accepted
            rejected += trace.rollbacks
            whole += sum(each.accepted == len(each.drafted) == window > 1 for each in trace.rounds)
    assert accepted > 20 and rejected > 20 and whole


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_that_drafts_for_itself_has_every_step_accepted(family: str) -> None:
    target, request = ModuleModel(random_target(family, 1)), random_request(family, 0, 17)
    tokens, trace = decode(target, request, 3, drafter=BeamDrafter(target, window=4))
    assert tokens == decode(target, request, 3)[0]
    # 4 steps drafted and one more from the same scores; of the last two, only the first can be drafted
    assert [(len(each.drafted), each.accepted) for each in trace.rounds] == [(4, 4), (4, 4), (4, 4), (1, 1)]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_forward_of_both_models_is_recorded(family: str) -> None:
    module = random_target(family, 1)
    target, draft = in_memory(module, "native"), in_memory(relative_of(module, 2, noise=0.05), "native")
    _, trace = decode(target, random_request(family, 1, 12), 3, drafter=BeamDrafter(draft, 2, 4))
    ran = [id(each.config) for each in trace.forwards if not each.encoder]
    assert ran.count(id(target.decoder.config)) == trace.target_calls > 1
    assert ran.count(id(draft.decoder.config)) == trace.draft_calls > 1


def following(table: dict[int, dict[int, float]]) -> NextLogits:
    """Logits of a model that knows only which token follows which, with what probability."""

    def next_logits(tokens: list[int]) -> Tensor:
        probs = torch.full((10,), 1e-6, dtype=torch.float64)
        for token, prob in table.get(tokens[-1], {}).items():
            probs[token] = prob
        return probs.log()

    return next_logits


# after 1 comes 1 or 2; what comes after 2 is any of many, so that no text with a 2 before its end survives
BUSH = following({0: {1: 0.6, 2: 0.4}, 1: {1: 0.6, 2: 0.4}, 2: dict.fromkeys(range(10), 0.1)})
# the first token says all others, so that two texts part at once and for ever
FORK = following({0: {1: 0.6, 2: 0.4}, 1: {1: 1.0}, 2: {2: 1.0}})
# the most likely first token is followed by any of many, the other by itself
TRAP = following({0: {1: 0.6, 3: 0.4}, 1: dict.fromkeys(range(10), 0.1), 3: {3: 0.9, 4: 0.1}})


def test_what_all_hypotheses_share_is_fed_once() -> None:
    target = StubModel(BUSH)
    tokens, _ = decode(target, Request(Source((5, 0)), Limits(2, 5)), 2)
    assert tokens == [5, 0, 1, 1, 1, 1, 1]
    assert target.fed == [0, 1, 2, 1, 2, 1, 2, 1, 2]


def test_a_greedy_trap_is_left_by_the_second_beam() -> None:
    tokens, _ = decode(StubModel(TRAP), Request(Source((0,)), Limits(1, 3)), 2)
    assert tokens == [0, 3, 3, 3]  # 0.4 · 0.9 · 0.9 > 0.6 · 0.1 · …, though 0.6 > 0.4


def test_a_search_ends_where_the_best_that_runs_only_equals_the_worst_that_ended() -> None:
    """Of each text one half ends and the other goes on."""
    halves = following({0: {9: 0.5, 1: 0.5}, 1: {9: 0.5, 1: 0.5}})
    request = Request(Source((0,)), Limits(1, 9, frozenset([9])))
    tokens, trace = decode(StubModel(halves), request, 2, length_penalty=0)
    assert (tokens, steps(trace)) == ([0, 9], 2)


def test_a_verification_is_of_all_candidates_and_a_missed_selection_costs_no_forward() -> None:
    target, draft = StubModel(BUSH), StubModel(FORK)
    request = Request(Source((5, 0)), Limits(2, 5))
    tokens, trace = decode(target, request, 2, drafter=BeamDrafter(draft, window=2))
    assert tokens == [5, 0, 1, 1, 1, 1, 1]
    assert target.fed[:5] == [0, 1, 2, 1, 2]
    # the drafter goes on with 1 1 and 2 2, where the target selects 1 1 and 1 2
    assert [(each.drafted, each.accepted) for each in trace.rounds] == [((1, 1), 1), ((1, 1), 0), ((1,), 0), ((), 0)]
    assert [each.next_token for each in trace.rounds] == [1, 1, 1, 1]
    assert [each.draft_calls for each in trace.rounds] == [2, 2, 1, 0]


def test_sampling_is_refused() -> None:
    request = Request(Source((0,)), Limits(1, 4), Sampling(temperature=0.7), torch.Generator())
    with pytest.raises(UserError, match=r"needs decoding.temperature=0, got 0.7; use decoding=greedy"):
        decode(StubModel(FORK), request, 2)


@pytest.mark.slow
def test_beam_search_is_the_baseline_of_speculative_beam_search(
    checkpoints: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = [
        f"pair.target={checkpoints / 'llama'}",
        f"pair.draft={checkpoints / 'llama'}",  # so that every step stands
        "dataset=multi30k",
        f"dataset.path={data}",
        "dataset.limit=4",
        "decoding.max_new_tokens=12",
        "measure.repeats=1",
        "measure.warmup=0",
        "measure.baseline=beam",
        "name=tested",
    ]
    monkeypatch.setattr(sys, "argv", ["run.py", "-m", *settings, "policy=beam,speculative_beam"])
    with pytest.raises(SystemExit) as ended:
        run_application(run.main)
    assert not ended.value.code
    frame = pd.read_csv("outputs/tested/sweep.csv").set_index("policy")
    assert frame["speedup"].notna().all() and frame["quality"].nunique() == 1
    assert frame["agreement_with_target"].isna().all()  # nobody decoded greedily
    assert frame.loc["speculative_beam", "acceptance_rate"] == 1 and math.isnan(frame.loc["beam", "acceptance_rate"])
    # 12 steps in 4 forwards: two drafted and one of the target's own in each
    assert frame["tokens_per_target_call"].to_dict() == {"beam": 1, "speculative_beam": 3}
    for file in Path("outputs/tested/points").glob("*/examples.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert [row["token_ids"] for row in rows] == [row["baseline_token_ids"] for row in rows]
