"""Streams in the fields of each engine, read by the client; `fake_server.py` says where they are
from.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from bild_lab.engine.trace import ReportedRounds
from bild_lab.servers.acceptance_reports import over_all_forwards, reported_rounds
from bild_lab.servers.completions import CompletionsClient, RequestError, ServerAnswer
from tests.servers.byte_server import sending
from tests.servers.fake_server import dialogue

IDS = [11, 12, 13, 14, 15, 16, 2]
STEPS = {(3, 0): 1, (3, 1): 1, (3, 2): 1}
TOLD = {  # text, tokens, how it ended, tokens of prompt and text, drafting
    "vllm": (" w5 w9 w12 w7 w8 w6", IDS, "stop", 3, 7, ReportedRounds(4, 9, 3, STEPS)),
    "sglang": (" w5 w9 w12 w7 w8 w6", IDS, "stop", 3, 7, ReportedRounds(4, 9, 3)),
    "llama_cpp": ("powfjjrzw", None, "length", 4, 9, ReportedRounds(3, 6, 6)),
    "plain": (" w5 w9 w12 w7 w8", None, "length", 3, 5, None),
}


def answered(events: list[Any]) -> ServerAnswer:
    data = (event if isinstance(event, str) else json.dumps(event) for event in events)
    chunks = [f": a comment\n\ndata: {text}\n\n".encode() for text in data]
    with sending(chunks) as url:
        return CompletionsClient(url, stall_s=5).complete({"prompt": [1, 5, 9]})


@pytest.mark.parametrize("engine", TOLD)
def test_every_field_of_an_engines_stream_is_read(engine: str) -> None:
    answer = answered(dialogue(engine))
    told = (answer.text, answer.token_ids, answer.finish_reason, answer.prompt_tokens)
    assert (*told, answer.completion_tokens, answer.rounds) == TOLD[engine]
    assert answer.model.startswith("tiny")


def test_text_without_ids_makes_all_ids_unknown() -> None:
    """llama-server drafts, and gives the first of the tokens that a forward accepts with its id."""
    first, second, *_, last, end = dialogue("llama_cpp")
    first["choices"][0]["logprobs"] = {"content": [{"id": 21, "token": "p"}]}
    assert answered([first, last, end]).token_ids == [21]
    assert answered([first, second, last, end]).token_ids is None


def test_text_after_its_tokens_leaves_them_known() -> None:
    """vLLM holds text back that may begin a stop string."""
    first, *_, last, usage, end = dialogue("vllm")
    last["choices"][0] |= {"text": " w9", "token_ids": []}
    answer = answered([first, last, usage, end])
    assert (answer.text, answer.token_ids) == (" w5 w9", [11])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_text_that_the_server_ended_is_no_answer(engine: str, reason: str) -> None:
    events = dialogue(engine)
    events[3]["choices"][0]["finish_reason"] = reason
    with pytest.raises(RequestError, match=f"ended the text: finish_reason {reason}"):
        answered(events)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_error_in_the_stream_is_no_answer_though_the_stream_ends(engine: str) -> None:
    error = {"message": "Internal server error", "type": "InternalServerError", "code": 500}
    with pytest.raises(RequestError, match="error in the stream.*Internal server error"):
        answered([*dialogue(engine)[:2], {"error": error}, "[DONE]"])


def test_before_its_histogram_by_length_vllm_told_lengths_where_they_are_the_greatest() -> None:
    *_, usage, _ = dialogue("vllm")
    fields = usage["metrics"]["speculative_decoding"]
    del fields["acceptance_histogram_by_draft_length"]
    assert reported_rounds(usage).steps == STEPS
    fields["num_draft_tokens"] = 8  # of another length
    assert reported_rounds(usage).steps is None


def test_forwards_without_a_draft_count() -> None:
    for engine in ("vllm", "sglang"):
        told = [event for event in dialogue(engine) if isinstance(event, dict)]
        rounds = next(filter(None, map(reported_rounds, told)))  # three, which accepted three
        assert over_all_forwards(rounds, 20).verifications == 17
        # accepted tokens were cut; planted: with them the prompt's forward was left out
        assert over_all_forwards(rounds, 5).verifications == 4
        assert over_all_forwards(rounds, None) == rounds


def chunk(**delta: str) -> dict[str, Any]:
    return {"model": "tiny", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("together", [False, True])
def test_thoughts_come_before_the_answer_with_the_mark_between_them(
    name: str, together: bool
) -> None:
    """vLLM writes both into one piece where a draft spans the end of a thought. Planted: the thought
    of such a piece was lost, and thoughts could not be told from the answer.
    """
    pieces = [chunk(role="assistant", content=""), chunk(**{name: "Is it"})]
    if together:
        pieces.append(chunk(**{name: " 8?"}, content="It is"))
    else:
        pieces += [chunk(**{name: " 8?"}), chunk(content="It is")]
    end = {"choices": [{"index": 0, "delta": {"content": " 7"}, "finish_reason": "stop"}]}
    answer = answered([*pieces, end, "[DONE]"])
    assert (answer.text, answer.told_thoughts) == ("Is it 8?</think>It is 7", True)
    assert len(answer.pieces_s) == (3 if together else 4)


def test_a_text_without_thoughts_or_of_thoughts_alone_has_no_mark() -> None:
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    assert answered([chunk(content="It"), chunk(content=" is"), end, "[DONE]"]).text == "It is"
    assert answered([chunk(reasoning="Is it"), chunk(reasoning=" 8"), end, "[DONE]"]).text == (
        "Is it 8"
    )


@pytest.mark.parametrize(
    ("details", "kept"),
    [
        ({"cached_tokens": 3}, 3),
        ({"cached_tokens": 0}, 0),
        ({"cached_tokens": None}, 0),
        (None, 0),
        ([], 0),
    ],
)
def test_tokens_of_a_prompt_that_a_server_had_kept_are_counted(details: Any, kept: int) -> None:
    *events, usage, end = dialogue("plain")
    usage["usage"]["prompt_tokens_details"] = details
    assert answered([*events, usage, end]).kept_tokens == kept
