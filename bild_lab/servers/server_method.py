"""A policy that is a server: its texts, its times, and what it tells of its drafting."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import httpx

from bild_lab.engine.methods.replayed_answers import written_answer
from bild_lab.engine.models.device import dtype_name
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import LoadedModel
from bild_lab.engine.trace import EngineReport, Trace, until_end
from bild_lab.errors import UserError, require_finite, require_flag, require_whole, warn_once
from bild_lab.servers.completions import (
    EXTENSIONS,
    STOPPED,
    CompletionsClient,
    RequestError,
    ServerAnswer,
)
from bild_lab.servers.server_process import ServerProcess, server_process


class Server:
    """Asks a server with OpenAI-compatible completions for each text, one after another.

    url: up to and with /v1. model: the server's name for it; None: its only one. chat: ask the chat
    endpoint with one message, which the server's own template wraps. body: further fields of every
    request, such as those that switch its drafting. launch: the command that starts it; None: it
    runs already. stall_s: a stream that is silent for so long has failed. attempts: how often a
    failed request is sent in all; a text that never came counts as an error and has no tokens.
    precision: of the server's weights; None: the target's. key_variable: the environment variable
    with its key, which is neither printed nor stored. baseline_url, baseline_body: of the server
    that it is compared with; None for the body: the same. Without both it is compared with the
    target, whose weights are then here, so a text that comes without token ids is written by the
    target's own tokens; beside another server by those of the tokenizer. arrival_rate: with
    runtime.batch=N between servers, requests a second that arrive at random, at most N of them at
    once; None: always N.

    Prompts are sent as the target's token ids, so the server reads what the target reads. Raises
    UserError for an encoder–decoder, for a variable without a key, and for a server that cannot be
    reached, or whose first text another model wrote; a later one is an error of its request.
    """

    engine: ClassVar[str] = "server"
    draft_shape: ClassVar[None] = None
    greedy_only: ClassVar[bool] = False
    knows_stop_strings: ClassVar[bool] = True
    versions: ClassVar[Mapping[str, str]] = {}  # nobody is asked before a point begins

    def __init__(
        self,
        target: LoadedModel,
        url: str | None = None,
        model: str | None = None,
        chat: bool = False,
        body: Mapping[str, Any] | None = None,
        launch: str | None = None,
        stall_s: float = 120.0,
        attempts: int = 3,
        precision: str | None = None,
        key_variable: str | None = None,
        baseline_url: str | None = None,
        baseline_body: Mapping[str, Any] | None = None,
        arrival_rate: float | None = None,
    ) -> None:
        _require_url("url", url)
        if baseline_url is not None:
            _require_url("baseline_url", baseline_url)
        require_flag("policy.chat", chat)
        require_whole("policy.attempts", attempts, 1)
        require_finite("policy.stall_s", stall_s, 0, above=True)
        _require_fields("body", body)
        _require_fields("baseline_body", baseline_body)
        if target.checkpoint.encoder_decoder:
            raise UserError(
                "a server of completions runs decoder-only models, got"
                f" {target.checkpoint.path} ({target.checkpoint.config.model_type})"
            )
        self.reads_target = baseline_url is None and baseline_body is None
        if chat and self.reads_target:
            raise UserError(
                "policy.chat=true wraps the prompt in the server's own template, which the target"
                " here does not read; compare with a server, policy.baseline_url=URL or"
                " policy.baseline_body"
            )
        if arrival_rate is not None:
            require_finite("policy.arrival_rate", arrival_rate, 0, above=True)
        self.arrival_rate = arrival_rate
        self.target, self.url, self.launch = target, url, launch
        self.precision = precision or dtype_name(target.dtype)
        self._model, self.chat, self._body = model, chat, dict(body or {})
        self._stall_s, self._attempts, self._key = stall_s, attempts, _key_of(key_variable)
        self._answered, self._answering_model = False, None
        self._kept_tokens = 0  # of all prompts

    @classmethod
    def baseline_knobs(cls, knobs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The knobs of the server that a point is compared with; None: of none. Raises UserError for a
        server to start that would have no address of its own.
        """
        if knobs["baseline_launch"] is not None and knobs["baseline_url"] in (None, knobs["url"]):
            raise UserError(
                "policy.baseline_launch starts a second server, which needs an address of its own:"
                " set policy.baseline_url=URL"
            )
        if knobs["baseline_url"] is None and knobs["baseline_body"] is None:
            return None
        body = knobs["body"] if knobs["baseline_body"] is None else knobs["baseline_body"]
        changes = {
            "url": knobs["baseline_url"] or knobs["url"],
            "body": body,
            "launch": knobs["baseline_launch"],
        }
        return {**knobs, **changes}

    def lossless(self, sampling: Sampling) -> bool:
        """Nobody knows how the server decodes."""
        return False

    def prepare(self, request: Request) -> None:
        """Start the server if it must be started, and find its model."""
        _ = self._served_model

    def decode(self, request: Request, trace: Trace) -> list[int]:
        """The prompt followed by the server's tokens; the prompt alone if it gave none.

        The seconds of failed attempts, and those that find token ids for a text, are paused.
        """
        self.prepare(request)
        answer = self.ask(request, trace)
        started = time.perf_counter()
        tokens = self.read(request, trace, answer)
        trace.paused_s += time.perf_counter() - started
        return tokens

    def ask(self, request: Request, trace: Trace) -> ServerAnswer | None:
        """The server's answer, after some attempts; None if it gave none, as the trace then says."""
        attempt, error = 0, None
        while attempt < self._attempts:
            attempt += 1
            started = time.perf_counter()
            try:
                answer = self._client.complete(self._request_body(request), self.chat)
            except RequestError as failure:
                error = self._without_key(str(failure))
                if attempt < self._attempts:
                    time.sleep(min(failure.retry_after_s, self._stall_s))
                trace.paused_s += time.perf_counter() - started
                continue
            trace.report = EngineReport(
                pieces_s=tuple(answer.pieces_s),
                later_tokens=None if answer.token_ids is None else answer.later_tokens,
                rounds=answer.rounds,
                attempts=attempt,
            )
            return answer
        if self.launch is not None and not self._process.alive:
            error = f"{error}; the server of policy.launch has ended, as its log may tell"
        trace.report = EngineReport(attempts=attempt, error=error)
        return None

    def read(self, request: Request, trace: Trace, answer: ServerAnswer | None) -> list[int]:
        """The prompt and an answer's tokens; the prompt alone for another model's answer, as the
        trace then says. Raises UserError if no answer before was the target's.
        """
        prompt = list(request.source.prompt)
        if answer is None:
            return prompt
        try:
            self._require_same_model(request, answer)
        except UserError as error:
            if not self._answered:
                raise
            trace.report = replace(trace.report, error=str(error))
            return prompt
        self._answered, self._answering_model = True, answer.model
        self._note_kept(answer)
        return self._tokens(request, answer)

    def _note_kept(self, answer: ServerAnswer) -> None:
        """Count, and say once, that a prompt was not read anew."""
        self._kept_tokens += answer.kept_tokens
        if answer.kept_tokens:
            warn_once(
                f"the server at {self.url} did not read prompts anew, but took tokens from what it"
                " keeps of earlier ones, so that texts begin sooner than those of new prompts; switch"
                " its cache of prompts off"
            )

    def _note_count(self, told: int | None, found: int) -> None:
        """Say once that a text had other tokens, by more than its end and 1 %. told: how many the
        server counts; found: how many the target's tokenizer makes of the text.
        """
        if told is not None and abs(told - found) > 1 + told // 100:
            warn_once(
                f"the server at {self.url} gives no token ids, and counts other tokens in a text than"
                " the tokenizer of pair.target makes of it, by which tokens and their seconds are"
                " told here; compare seconds of whole texts, or take a server that gives ids"
            )

    def about(self) -> dict[str, Any]:
        """What answered: for a result's environment. refused: the fields that the server does not
        take, such as those that switch its cache of prompts off. kept_tokens: how many tokens of
        prompts it took from there nevertheless.
        """
        facts = {"url": self.url, "model": self._served_model, "version": self._client.version()}
        if refused := [name for name in EXTENSIONS if name not in self._client.extensions]:
            facts["refused"] = refused
        if self._kept_tokens:
            facts["kept_tokens"] = self._kept_tokens
        return {**facts, "launch": self.launch} if self.launch else facts

    def log(self) -> str | None:
        """What the server printed, if this policy started it."""
        if self.launch is None:
            return None
        return self._process.log.read_text(encoding="utf-8", errors="replace")

    def cpu_seconds(self) -> float:
        return 0.0 if "_process" not in self.__dict__ else self._process.cpu_seconds()

    @cached_property
    def _process(self) -> ServerProcess:
        return server_process(self.launch, self.url)

    @cached_property
    def _client(self) -> CompletionsClient:
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        return CompletionsClient(self.url, self._stall_s, headers)

    def _without_key(self, message: str) -> str:
        """A message without the key, which a server may repeat."""
        return message if self._key is None else message.replace(self._key, "…")

    @cached_property
    def _served_model(self) -> str:
        """The name of the model that is asked. Raises UserError if it is not served."""
        if self.launch is not None:
            _ = self._process
        served = self._client.models()
        if self._model is None and len(served) == 1:
            return served[0]
        if self._model not in served:
            raise UserError(
                f"the server at {self.url} serves {', '.join(served) or 'nothing'}, got"
                f" policy.model={self._model}; name one of them"
            )
        return self._model

    def _request_body(self, request: Request) -> dict[str, Any]:
        """The request in OpenAI's fields, with `top_k` as vLLM, SGLang and llama-server have it."""
        limits, sampling = request.limits, request.sampling
        prompt = list(request.source.prompt)
        if self.chat:
            text = self.target.checkpoint.tokenizer.decode(prompt, skip_special_tokens=True)
            prompt_fields = {"messages": [{"role": "user", "content": text}]}
        else:
            prompt_fields = {"prompt": prompt}
        body = {
            "model": self._served_model,
            **prompt_fields,
            "max_tokens": limits.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        }
        if limits.stop is not None:
            body["stop"] = list(limits.stop.strings)
        if sampling.top_k is not None:
            body["top_k"] = sampling.top_k
        if request.generator is not None:
            body["seed"] = request.generator.initial_seed()
        return {**body, **self._body}

    def _require_same_model(self, request: Request, answer: ServerAnswer) -> None:
        """Raise UserError for a server that read another number of tokens than were sent, gave a
        token that the target does not have or tokens behind an end token, or names another model
        than before.
        """
        tokens = answer.token_ids or []
        if behind := len(tokens) - until_end(tokens, request.limits.end_tokens):
            raise UserError(
                f"the server at {self.url} wrote {behind} tokens behind an end token of the target,"
                " which its seconds hold and its text does not; leave ignore_eos out of policy.body,"
                " or give the server the end tokens of the target's generation_config.json"
            )
        rows = self.target.checkpoint.rows
        if max(answer.token_ids or (), default=0) >= rows:
            raise UserError(
                f"the server at {self.url} gave token {max(answer.token_ids)}, and pair.target has"
                f" {rows}: it serves another model"
            )
        if self._answered and answer.model != self._answering_model:
            raise UserError(
                f"the server at {self.url} answered as {answer.model}, and before as"
                f" {self._answering_model}: it serves another model by now"
            )
        sent = len(request.source.prompt)
        if not self.chat and answer.prompt_tokens not in (None, sent):
            raise UserError(
                f"the server at {self.url} read {answer.prompt_tokens} tokens of a prompt of {sent}:"
                " it changes prompts, or serves another model than pair.target"
            )

    def _tokens(self, request: Request, answer: ServerAnswer) -> list[int]:
        """The prompt and the answer's tokens, cut by the request's limits."""
        limits, checkpoint = request.limits, self.target.checkpoint
        prompt = list(request.source.prompt)
        content = answer.text if answer.token_ids is None else answer.token_ids
        cut = answer.finish_reason != STOPPED
        if self.reads_target and request.sampling.greedy:
            rounds = written_answer(self.target, request, content, cut)
            tokens = [*prompt, *(token for new in rounds for token in new)]
        else:
            if isinstance(content, str):
                content = checkpoint.tokenizer.encode(content, add_special_tokens=False)
                # a server counts tokens of stop strings, and marks and spaces around thoughts
                if limits.stop is None and not answer.told_thoughts:
                    self._note_count(answer.completion_tokens, len(content))
            tokens = limits.append(prompt, content)
            ends_itself = not cut and limits.stop is None
            if ends_itself and not limits.reached(tokens) and limits.end_tokens:
                tokens = limits.append(tokens, [min(limits.end_tokens)])
        as_text = answer.token_ids is None
        if cut and as_text and len(tokens) > len(prompt) and tokens[-1] in limits.end_tokens:
            return tokens[:-1]
        return tokens


def _require_fields(name: str, fields: Any) -> None:
    """Raise UserError for what is no mapping of a request's further fields; None: there are none."""
    if not isinstance(fields, Mapping | None):
        raise UserError(
            f"policy.{name} must be fields of a request, such as {{min_p: 0.1}}, got {fields!r}"
        )


def _require_url(name: str, url: Any) -> None:
    """Raise UserError for what is no address of a server, or has a password, which a result would
    keep.
    """
    try:
        address = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        address = httpx.URL()
    if address.scheme not in ("http", "https") or not address.host:
        raise UserError(
            f"policy server asks a server, got {name}={url!r}; set"
            f" policy.{name}=http://127.0.0.1:8000/v1"
        )
    if address.userinfo:
        raise UserError(
            f"policy.{name} has a password, which would be stored with the results; leave it out,"
            " and name the environment variable with the server's key, policy.key_variable=NAME"
        )


def _key_of(variable: str | None) -> str | None:
    """The key in an environment variable. Raises UserError if there is none."""
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not key or not key.isascii() or not key.isprintable() or key != key.strip():
        raise UserError(
            f"policy.key_variable={variable} names no environment variable with a key, of printable"
            " ASCII without spaces around it; export it"
        )
    return key
