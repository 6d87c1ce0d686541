"""A client of the completions of an OpenAI-compatible server: one text at a time, as a stream.

Token ids and drafting are asked for in the words of vLLM and SGLang (`return_token_ids`,
`return_spec_tokens_details`). No text is begun with what the server kept of an earlier one with
the same prompt: `cache_prompt` says so to llama-server, a `cache_salt` of its own to vLLM and
SGLang. No token is likelier than the request says: servers have truncation and penalties of their
own, vLLM and SGLang those of the checkpoint's generation_config.json. Servers that do not know these
fields leave them out, or are asked without them.
"""

from __future__ import annotations

import io
import json
import time
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import httpx

from bild_lab.engine.models.checkpoint.chat import END_OF_THOUGHT
from bild_lab.engine.trace import ReportedRounds
from bild_lab.errors import UserError, first_line
from bild_lab.servers.acceptance_reports import over_all_forwards, reported_rounds

CONNECT_S = 10.0  # for a connection; an answer may take `stall_s` to begin and to go on
END_OF_STREAM = "[DONE]"
ID_PREFIX = "token_id:"  # how vLLM writes a token with return_tokens_as_token_ids
SHOWN = 200  # characters of a server's message
STOPPED, AT_LENGTH = "stop", "length"  # why a text ended: by itself, or at the limit
REFUSALS = (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY)  # of a request's fields
EXTENSIONS = {
    "return_token_ids": True,
    "return_spec_tokens_details": True,
    "cache_prompt": False,
    "cache_salt": "",  # another one in each request
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
# where the text of a piece is: of completions and of a chat; and what a model thinks before it,
# which may come in one piece with the first of it
TEXTS, THOUGHTS = ("text", "content"), ("reasoning_content", "reasoning")
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


class RequestError(Exception):
    """A request without a whole answer, and why. The server may answer the next one.

    retry_after_s: for how many seconds the server asks not to be asked again.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass
class ServerAnswer:
    """A text as a server gave it.

    token_ids: None if the server gave some of the text without them. pieces_s: the seconds since
    the request was sent at which each piece of the text came; a piece is one or several tokens.
    later_tokens: how many ids came in the pieces after the first.
    thinking: whether what came last is thought, which a server tells apart from the text;
    told_thoughts: whether any was.
    finish_reason: STOPPED or AT_LENGTH. prompt_tokens, completion_tokens: how many the server read
    and wrote; None if it does not tell. kept_tokens: how many of those read it had kept from earlier
    requests, as far as it tells. model: its name for what answered.
    """

    text: str = ""
    token_ids: list[int] | None = field(default_factory=list)
    pieces_s: list[float] = field(default_factory=list)
    later_tokens: int = 0
    thinking: bool = False
    told_thoughts: bool = False
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    kept_tokens: int = 0
    model: str | None = None
    rounds: ReportedRounds | None = None


class CompletionsClient:
    """Asks one server. url: up to and with /v1. stall_s: a stream that is silent for so long has
    failed. headers: of every request, such as a key.

    extensions: the fields that OpenAI's interface does not have, without those that the server
    refused by name.
    """

    def __init__(self, url: str, stall_s: float, headers: Mapping[str, str] | None = None) -> None:
        self.url, self._stall_s = url.rstrip("/"), stall_s
        self.extensions: Mapping[str, Any] = EXTENSIONS
        timeout = httpx.Timeout(stall_s, connect=CONNECT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.Client(timeout=timeout, limits=limits, headers=dict(headers or {}))

    def models(self) -> list[str]:
        """The names of the models that it serves. Raises UserError if it cannot be reached."""
        try:
            response = self._client.get(f"{self.url}/models")
            response.raise_for_status()
            return [model["id"] for model in response.json()["data"]]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            status = getattr(getattr(error, "response", None), "status_code", None)
            remedy = "start it, or correct policy.url, which ends with /v1"
            if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
                remedy = "name the environment variable with its key, policy.key_variable=NAME"
            raise UserError(
                f"no server with completions answers at {self.url}: {_described(error)}; {remedy}"
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

        Raises RequestError for a stream that fails, stalls, cannot be read, or ends before the text
        does, and for a text that is longer than was asked.
        """
        return self._complete(body, chat, self.extensions)

    def _complete(
        self, body: Mapping[str, Any], chat: bool, extensions: Mapping[str, Any]
    ) -> ServerAnswer:
        """What `complete` gives; the server is asked again without the extensions that it refuses."""
        endpoint = "chat/completions" if chat else "completions"
        salt = {"cache_salt": uuid4().hex} if "cache_salt" in extensions else {}
        sent_body = {**extensions, **salt, **body, **STREAMED}
        answer = ServerAnswer()
        started = time.perf_counter()
        try:
            with self._client.stream("POST", f"{self.url}/{endpoint}", json=sent_body) as response:
                if not response.is_success:
                    return self._complete(body, chat, _accepted_extensions(response, extensions))
                self.extensions = extensions
                for event in _events(response, self._stall_s):
                    _take_whole(answer, event, time.perf_counter() - started)
        except httpx.TimeoutException as error:
            raise RequestError(
                f"nothing came for {self._stall_s:g} s after {len(answer.pieces_s)} pieces"
            ) from error
        except httpx.HTTPError as error:
            raise RequestError(_described(error)) from error
        _require_whole(answer, sent_body.get("max_tokens"))
        answer.token_ids = answer.token_ids or None
        if answer.rounds is not None:
            answer.rounds = over_all_forwards(answer.rounds, answer.completion_tokens)
        return answer

    def close(self) -> None:
        self._client.close()


def _accepted_extensions(response: httpx.Response, extensions: Mapping[str, Any]) -> dict[str, Any]:
    """The extensions that a refusal does not name. Raises RequestError if it is none, or names no
    extension.
    """
    response.read()
    accepted = {name: value for name, value in extensions.items() if name not in response.text}
    if response.status_code in REFUSALS and len(accepted) < len(extensions):
        return accepted
    raise RequestError(
        f"status {response.status_code}: {response.text[:SHOWN]}", _retry_after_s(response)
    )


def _events(response: httpx.Response, stall_s: float) -> Iterator[Mapping[str, Any]]:
    """The objects of a stream of server-sent events (WHATWG, HTML, §9.2.6), until its last word. An
    object may take several lines; an empty line after it may be missing.

    Raises RequestError for what is no object, for an error, for an answer that is no stream, and
    where nothing but comments comes for `stall_s`.
    """
    kind, data = "", []
    other_lines: list[str] = []  # of no field that there is
    heard_s = time.perf_counter()
    for line in _lines(response.iter_bytes()):
        if time.perf_counter() - heard_s > stall_s:
            raise RequestError(f"nothing but comments came for {stall_s:g} s")
        name, _, value = line.partition(":")
        value = value.strip()
        if name == "error" or (name == "data" and kind == "error"):
            raise RequestError(f"error in the stream: {value[:SHOWN]}")
        if name == "data":
            data.append(value)
        elif name == "event":
            kind = value
        elif name not in ("", "id", "retry"):
            other_lines.append(line)
        if not data:
            continue
        text = "\n".join(data)
        if text == END_OF_STREAM:
            return
        try:
            event = json.loads(text)
        except ValueError as error:
            if line:  # the object may go on
                continue
            raise RequestError(f"the stream holds no JSON: {text[:SHOWN]}") from error
        if not isinstance(event, Mapping):
            raise RequestError(f"the stream holds no object: {text[:SHOWN]}")
        if event.get("error"):
            raise RequestError(f"error in the stream: {json.dumps(event['error'])[:SHOWN]}")
        data = []
        heard_s = time.perf_counter()
        yield event
    if other_lines:
        answered = " ".join(other_lines)[:SHOWN]
        raise RequestError(f"the answer is no stream of completions: {answered}")


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """The lines of UTF-8, which end with CR, LF or both, and one that is empty at the end.

    Text may hold what `str.splitlines` takes for more ends of lines, such as U+2028.
    """
    decoder = io.IncrementalNewlineDecoder(getincrementaldecoder("utf-8-sig")(), translate=True)
    begun = ""
    try:
        for chunk in chunks:
            *lines, begun = (begun + decoder.decode(chunk)).split("\n")
            yield from lines
    except UnicodeDecodeError as error:
        raise RequestError(f"the stream is no UTF-8: {error}") from error
    yield from (begun, "")


def _take_whole(answer: ServerAnswer, event: Mapping[str, Any], now_s: float) -> None:
    """Add an event of the stream to the answer. Raises RequestError for one of another form."""
    try:
        _take(answer, event, now_s)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RequestError(
            f"the stream holds no completion ({error}): {json.dumps(event)[:SHOWN]}"
        ) from error


def _take(answer: ServerAnswer, event: Mapping[str, Any], now_s: float) -> None:
    """Add an event of the stream to the answer."""
    choice = (event.get("choices") or [{}])[0]
    if choice.get("index"):
        raise RequestError("several texts came, but one was asked for; correct policy.body")
    written = choice.get("delta") or choice
    thought, text = (
        next((written[name] for name in names if written.get(name)), "")
        for names in (THOUGHTS, TEXTS)
    )
    piece = thought + text
    token_ids = _token_ids(choice)
    if answer.pieces_s:
        answer.later_tokens += len(token_ids or ())
    if piece or token_ids:
        answer.pieces_s.append(now_s)
    answer.text += thought
    if thought:
        answer.thinking = answer.told_thoughts = True
    if text and answer.thinking:  # the mark between them, which such servers leave out
        answer.text += END_OF_THOUGHT
        answer.thinking = False
    answer.text += text
    if piece and token_ids is None:
        answer.token_ids = None
    elif answer.token_ids is not None:
        answer.token_ids += token_ids or []
    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    answer.model = event.get("model") or answer.model
    if event.get("usage"):
        answer.prompt_tokens = _counted(event["usage"], "prompt_tokens")
        answer.completion_tokens = _counted(event["usage"], "completion_tokens")
        details = event["usage"].get("prompt_tokens_details")
        kept = details.get("cached_tokens") if isinstance(details, Mapping) else None
        answer.kept_tokens = kept if type(kept) is int else 0
    answer.rounds = reported_rounds(event) or answer.rounds


def _token_ids(choice: Mapping[str, Any]) -> list[int] | None:
    """The ids of a piece's tokens; None where the server gives none.

    A piece may have text and an empty list: the text of tokens that came before.
    """
    if choice.get("token_ids") is not None:  # vLLM, SGLang
        return _ids(choice["token_ids"])
    logprobs = choice.get("logprobs") or {}
    content = logprobs.get("content") or []
    if content and all("id" in token for token in content):  # llama-server
        return _ids([token["id"] for token in content])
    tokens = logprobs.get("tokens") or [token.get("token") for token in content]
    if tokens and all(str(token).startswith(ID_PREFIX) for token in tokens):
        return [int(token.removeprefix(ID_PREFIX)) for token in tokens]
    return None


def _ids(values: Any) -> list[int]:
    """Raises TypeError for what is no list of token ids."""
    if not isinstance(values, list) or not all(
        type(value) is int and value >= 0 for value in values
    ):
        raise TypeError(f"no token ids: {values}")
    return values


def _counted(usage: Mapping[str, Any], name: str) -> int | None:
    """Raises TypeError for what counts nothing."""
    count = usage.get(name)
    if count is not None and type(count) is not int:
        raise TypeError(f"{name} is {count!r}")
    return count


def _require_whole(answer: ServerAnswer, max_tokens: int | None) -> None:
    """Raise RequestError for a text that the server did not end, or at another length than was
    asked. max_tokens: what was asked for; None if nobody knows.
    """
    if answer.finish_reason is None:
        raise RequestError(f"the stream ended after {len(answer.pieces_s)} pieces, unfinished")
    if answer.finish_reason not in (STOPPED, AT_LENGTH):
        raise RequestError(f"the server ended the text: finish_reason {answer.finish_reason}")
    if max_tokens is None:
        return
    known = len(answer.token_ids or ())
    if (received := max(known, answer.completion_tokens or 0)) > max_tokens:
        raise RequestError(f"{received} tokens came where at most {max_tokens} were asked for")
    written = known if answer.completion_tokens is None else answer.completion_tokens
    if answer.finish_reason == AT_LENGTH and 0 < written < max_tokens:
        raise RequestError(
            f"the server ended the text after {written} of {max_tokens} tokens: at a limit of its own,"
            " such as its context"
        )


def _retry_after_s(response: httpx.Response) -> float:
    value = response.headers.get("retry-after", "")
    return float(value) if value.isdigit() else 0.0


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"[:SHOWN]
