"""A client of the completions of an OpenAI-compatible server: one text at a time, as a stream.

Token ids and drafting are asked for in the words of vLLM and SGLang (`return_token_ids`,
`return_spec_tokens_details`); servers that do not know these fields leave them out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from bild_lab.engine.trace import ReportedRounds
from bild_lab.errors import UserError
from bild_lab.servers.acceptance_reports import over_all_forwards, reported_rounds

CONNECT_S = 10.0  # for a connection; an answer may take `stall_s` to begin and to go on
END_OF_STREAM = "[DONE]"
ID_PREFIX = "token_id:"  # how vLLM writes a token with return_tokens_as_token_ids
SHOWN = 200  # characters of a server's message
UNFINISHED = ("abort", "error")  # why vLLM and SGLang end a text before it ends
EXTENSIONS = {"return_token_ids": True, "return_spec_tokens_details": True}


class RequestError(Exception):
    """A request without a whole answer, and why. The server may answer the next one."""


@dataclass
class ServerAnswer:
    """A text as a server gave it.

    token_ids: None if the server gave some of the text without them. pieces_s: the seconds since
    the request was sent at which each piece of the text came; a piece is one or several tokens.
    finish_reason: "stop" or "length". prompt_tokens, completion_tokens: how many the server read
    and wrote; None if it does not tell. model: its name for what answered.
    """

    text: str = ""
    token_ids: list[int] | None = field(default_factory=list)
    pieces_s: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    model: str | None = None
    rounds: ReportedRounds | None = None


class CompletionsClient:
    """Asks one server. url: up to and with /v1. stall_s: a stream that is silent for so long has
    failed. headers: of every request, such as a key.
    """

    def __init__(self, url: str, stall_s: float, headers: Mapping[str, str] | None = None) -> None:
        self.url = url.rstrip("/")
        timeout = httpx.Timeout(stall_s, connect=CONNECT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.Client(timeout=timeout, limits=limits, headers=dict(headers or {}))

    def models(self) -> list[str]:
        """The names of the models that it serves. Raises UserError if it cannot be reached."""
        try:
            response = self._client.get(f"{self.url}/models")
            response.raise_for_status()
            return [model["id"] for model in response.json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"no server with completions answers at {self.url}: {_described(error)}; start it,"
                " or correct policy.url, which ends with /v1"
            ) from error

    def version(self) -> str | None:
        """The server's version, where it tells one: vLLM's /version, llama-server's /props."""
        root = self.url.removesuffix("/v1")
        for path, key in (
            ("version", "version"),
            ("props", "build_info"),
            ("server_info", "version"),
        ):
            try:
                response = self._client.get(f"{root}/{path}")
                if response.status_code == httpx.codes.OK and response.json().get(key):
                    return str(response.json()[key])
            except (httpx.HTTPError, ValueError, AttributeError):
                continue
        return None

    def complete(self, body: Mapping[str, Any], chat: bool = False) -> ServerAnswer:
        """The answer to a request. chat: of the chat endpoint.

        Raises RequestError for a stream that fails, stalls, or ends before the text does.
        """
        endpoint = "chat/completions" if chat else "completions"
        stream_options = {"stream": True, "stream_options": {"include_usage": True}}
        answer = ServerAnswer()
        started = time.perf_counter()
        try:
            with self._client.stream(
                "POST", f"{self.url}/{endpoint}", json={**EXTENSIONS, **body, **stream_options}
            ) as response:
                if response.is_error:
                    response.read()
                    raise RequestError(f"status {response.status_code}: {response.text[:SHOWN]}")
                for event in _events(response):
                    _take(answer, event, time.perf_counter() - started)
        except httpx.TimeoutException as error:
            raise RequestError(
                f"nothing came for {self._client.timeout.read:g} s after {len(answer.pieces_s)}"
                " pieces"
            ) from error
        except httpx.HTTPError as error:
            raise RequestError(_described(error)) from error
        if answer.finish_reason is None:
            raise RequestError(f"the stream ended after {len(answer.pieces_s)} pieces, unfinished")
        if answer.finish_reason in UNFINISHED:
            raise RequestError(f"the server ended the text: finish_reason {answer.finish_reason}")
        answer.token_ids = answer.token_ids or None
        if answer.rounds is not None:
            answer.rounds = over_all_forwards(answer.rounds, answer.completion_tokens)
        return answer

    def close(self) -> None:
        self._client.close()


def _events(response: httpx.Response) -> Iterator[Mapping[str, Any]]:
    """The objects of a stream of server-sent events. Raises RequestError for one that is none."""
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue  # an empty line, a comment, or another field
        data = line.removeprefix("data:").strip()
        if data == END_OF_STREAM:
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise RequestError(f"the stream holds no JSON: {data[:SHOWN]}") from error
        if not isinstance(event, Mapping):
            raise RequestError(f"the stream holds no object: {data[:SHOWN]}")
        if event.get("error"):
            raise RequestError(f"error in the stream: {json.dumps(event['error'])[:SHOWN]}")
        yield event


def _take(answer: ServerAnswer, event: Mapping[str, Any], now_s: float) -> None:
    """Add an event of the stream to the answer."""
    choice = (event.get("choices") or [{}])[0]
    piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    token_ids = _token_ids(choice)
    if piece or token_ids:
        answer.pieces_s.append(now_s)
    answer.text += piece
    if piece and token_ids is None:
        answer.token_ids = None
    elif answer.token_ids is not None:
        answer.token_ids += token_ids or []
    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    answer.model = event.get("model") or answer.model
    if event.get("usage"):
        answer.prompt_tokens = event["usage"].get("prompt_tokens")
        answer.completion_tokens = event["usage"].get("completion_tokens")
    answer.rounds = reported_rounds(event) or answer.rounds


def _token_ids(choice: Mapping[str, Any]) -> list[int] | None:
    """The ids of a piece's tokens; None where the server gives none.

    A piece may have text and an empty list: the text of tokens that came before.
    """
    if choice.get("token_ids") is not None:  # vLLM, SGLang
        return list(choice["token_ids"])
    logprobs = choice.get("logprobs") or {}
    content = logprobs.get("content") or []
    if content and all("id" in token for token in content):  # llama-server
        return [token["id"] for token in content]
    tokens = logprobs.get("tokens") or [token.get("token") for token in content]
    if tokens and all(str(token).startswith(ID_PREFIX) for token in tokens):
        return [int(token.removeprefix(ID_PREFIX)) for token in tokens]
    return None


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:SHOWN]
