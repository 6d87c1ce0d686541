"""Streams byte by byte: what the format of server-sent events allows is read, and everything else is
an error of the request.
"""

from __future__ import annotations

import json
import re
import time
from functools import lru_cache
from typing import Any

import pytest

from bild_lab.servers.completions import CONNECT_S, CompletionsClient, RequestError, ServerAnswer
from tests.servers.byte_server import sending

ASKED = {"prompt": [1, 5, 9], "max_tokens": 4}
END = b"data: [DONE]\n\n"


@lru_cache
def only_client() -> CompletionsClient:
    return CompletionsClient("http://127.0.0.1:9/v1", stall_s=0.5)


def client(url: str) -> CompletionsClient:
    """A client of this address; to make another one takes a tenth of a second."""
    only_client().url = url
    return only_client()


def answered(*chunks: bytes | float, status: int = 200) -> ServerAnswer:
    with sending(chunks, status) as url:
        return client(url).complete(ASKED)


def event(**fields: Any) -> bytes:
    """A piece of the text with what these fields add to it or change."""
    usage = fields.pop("usage", None)
    choice = {"text": "a", "token_ids": [5], "finish_reason": None, **fields}
    content = {"choices": [choice]} | ({"usage": usage} if usage else {})
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()


LAST = event(text="b", token_ids=[6], finish_reason="stop")
READ = {
    "LF": [event(), LAST, END],
    "CRLF": [b"".join([event(), LAST, END]).replace(b"\n", b"\r\n")],
    "CR": [b"".join([event(), LAST, END]).replace(b"\n", b"\r")],
    "a line in pieces": [event()[:9], 0.01, event()[9:], LAST, END],
    "a byte order mark": ["\ufeff".encode() + event(), LAST, END],
    "comments": [b": ping\n\n", event(), b":\n", LAST, END],
    "further fields": [b"id: 3\nretry: 5\nevent: message\n", event(), LAST, END],
    "further fields and no last word": [b"id: 3\nretry: 5\n", event(), LAST],
    "longer than its silence may be": [
        event(),
        0.26,
        event(text="", token_ids=[]),
        0.26,
        LAST,
        END,
    ],
    "several lines of data": [event().replace(b", ", b",\ndata: "), LAST, END],
    "no last word": [event(), LAST],
    "no empty lines": [event().strip() + b"\n", LAST.strip() + b"\n", END],
}


@pytest.mark.parametrize("case", READ)
def test_what_the_format_allows_is_read(case: str) -> None:
    answer = answered(*READ[case])
    assert (answer.text, answer.token_ids, len(answer.pieces_s)) == ("ab", [5, 6], 2)


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "é"])
def test_a_text_may_hold_what_python_takes_for_the_end_of_a_line(character: str) -> None:
    assert answered(event(text=character), LAST, END).text == f"{character}b"


def test_a_token_that_writes_nothing_is_a_piece_too() -> None:
    answer = answered(event(text=""), LAST, END)
    assert (answer.text, answer.token_ids, len(answer.pieces_s)) == ("b", [5, 6], 2)


def test_tokens_after_the_first_piece_are_those_of_later_pieces() -> None:
    answer = answered(event(token_ids=[5, 7, 8]), event(text="", token_ids=[]), LAST, END)
    assert (answer.token_ids, answer.later_tokens, len(answer.pieces_s)) == ([5, 7, 8, 6], 1, 2)


def test_the_seconds_of_pieces_are_those_since_the_request() -> None:
    began_s = time.perf_counter()
    first_s, last_s = answered(event(), 0.05, LAST, END).pieces_s
    assert 0 < first_s < last_s < time.perf_counter() - began_s


def test_an_answer_may_be_silent_for_longer_than_a_connection_may_take() -> None:
    timeout = only_client()._client.timeout
    assert (timeout.read, timeout.connect) == (0.5, CONNECT_S)


def test_what_a_model_thinks_before_it_answers_is_text_too() -> None:
    """Its tokens are counted and timed like all others; a mark ends them, as the model wrote it."""
    thoughts = ({"role": "assistant"}, {"reasoning_content": "a"}, {"reasoning": "b"})
    pieces = [event(text=None, token_ids=None, delta=delta) for delta in thoughts]
    last = event(text=None, token_ids=None, delta={"content": "c"}, finish_reason="stop")
    answer = answered(*pieces, last, END)
    assert (answer.text, len(answer.pieces_s)) == ("ab</think>c", 3)


LENGTH = {"finish_reason": "length"}
ERRORS = {
    "a page": ([b"<html>hello</html>"], "no stream of completions: <html>hello"),
    "an object": ([b'{"error": "no model"}'], "no stream of completions: .*no model"),
    "an event of an error": ([event(), b"event: error\ndata: it died\n\n"], "error.*it died"),
    "a field of an error": ([event(), b'error: {"code": 500}\n\n'], "error in the stream.*500"),
    "no UTF-8": ([event().replace(b"a", b"\xff")], "no UTF-8"),
    "no JSON": ([b"data: {broken\n\n", LAST], "holds no JSON: {broken"),
    "half an object at the end": ([event(), LAST, b'data: {"usage": {'], "holds no JSON"),
    "comments alone": ([event(), *[b": ping\n\n", 0.2] * 5, LAST], "nothing but comments"),
    "choices of another form": ([b'data: {"choices": "abc"}\n\n'], "holds no completion"),
    "text of another form": ([event(text=5)], "holds no completion"),
    "log-probabilities of another form": ([event(token_ids=None, logprobs=[1])], "no completion"),
    "a token that is no number": ([event(token_ids=["x"])], "no token ids"),
    "a token below zero": ([event(token_ids=[-5])], "no token ids"),
    "a count that is no number": ([event(usage={"prompt_tokens": "3"})], "prompt_tokens is '3'"),
    "a second text": ([event(), event(index=1), LAST], "several texts"),
    "an unknown end": ([event(finish_reason="content_filter")], "finish_reason content_filter"),
    "a limit of its own": ([event(**LENGTH), END], "after 1 of 4 tokens"),
    "its own count at a limit": (
        [event(token_ids=None, usage={"completion_tokens": 3}, **LENGTH)],
        "after 3 of 4 tokens",
    ),
    "more than was asked": ([event()] * 4 + [LAST], "5 tokens came where at most 4"),
    "more than it counts": (
        [event()] * 4 + [event(finish_reason="stop", usage={"completion_tokens": 4})],
        "5 tokens came where at most 4",
    ),
}


def test_a_text_at_its_limit_is_read_of_a_server_that_counts_nothing() -> None:
    answer = answered(event(token_ids=None), event(text="b", token_ids=None, **LENGTH), END)
    assert (answer.text, answer.token_ids) == ("ab", None)


@pytest.mark.parametrize("case", ERRORS)
def test_everything_else_is_an_error_of_the_request(case: str) -> None:
    chunks, message = ERRORS[case]
    with pytest.raises(RequestError, match=message):
        answered(*chunks)


def test_a_redirection_is_no_answer() -> None:
    with pytest.raises(RequestError, match="status 307"):
        answered(status=307)


def test_a_server_may_ask_for_a_pause() -> None:
    headers = {"Retry-After": "7"}
    with sending([b"slow down"], 429, **headers) as url, pytest.raises(RequestError) as caught:
        client(url).complete(ASKED)
    assert caught.value.retry_after_s == 7 and re.search("429.*slow down", str(caught.value))
