"""A target and the method that decodes with it: from a prompt to text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Event, RLock
from typing import Any, NoReturn, overload

from bild_lab.engine.batch_decoding import (
    auto_batch_size,
    decode_batch,
    require_batches,
    require_room,
)
from bild_lab.engine.batch_scheduler import Batch
from bild_lab.engine.logits_processors import Processors
from bild_lab.engine.methods.hf_generation import require_plain
from bild_lab.engine.models.checkpoint.chat import ChatSettings, CompleteText
from bild_lab.engine.models.checkpoint.checkpoint import Prompt
from bild_lab.engine.models.checkpoint.loaded_checkpoint import LoadedCheckpoint, evaluation_mode
from bild_lab.engine.models.device import cpu_by_default, dtype_name, wait_for
from bild_lab.engine.models.hf.positions import trained_positions
from bild_lab.engine.protocols import (
    DecodesBatches,
    External,
    Method,
    Prepares,
    Replays,
    Streams,
    require_text,
)
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import LoadedModel
from bild_lab.engine.stop import StopStrings, before_stop
from bild_lab.engine.trace import StageTrace, Trace, no_wait
from bild_lab.engine.vocabularies import SharedIdModel, TranslatedModel
from bild_lab.errors import UserError, require_whole, warn_once
from bild_lab.lab.config.schemas import stop_strings
from bild_lab.lab.data.prompts import SourcePrompt, longest_fitting
from bild_lab.lab.point.languages import Languages
from bild_lab.lab.point.prompt_forms import (
    chat_messages,
    is_chat,
    is_prompt_list,
    plain_prompt,
    plain_value,
)
from bild_lab.lab.point.streaming import stable_prefix, without_byte_tokens
from bild_lab.lab.schema.formatting import short_name

KNOWS_NO_STOP = (
    "{} knows no stop strings here, so its seconds would count what comes after them; set"
    " decoding.stop=null, or use policy=hf_generate"
)
# the measured policy, and the policy that it is compared with
METHOD, BASELINE = "method", "baseline"
LOADING = RLock()  # two threads would read the same weights twice


@dataclass(frozen=True)
class Generation:
    """One continuation. token_ids: as emitted, including the end token. text: without special
    tokens.
    """

    text: str
    token_ids: list[int]
    trace: Trace = field(repr=False)  # pages of rounds
    latency_s: float


@dataclass(frozen=True)
class Decoder:
    """A target model and a method that decodes with it.

    stop: stop strings of all its texts, for which a call may give others. chat: how the messages of
    a chat are written.
    policy: its name.
    """

    target: LoadedModel
    method: Method
    models: tuple[LoadedModel, ...]  # the target, then the models that draft
    processors: Processors = Processors()
    languages: Languages = Languages()
    stop: tuple[str, ...] = ()
    chat: ChatSettings = ChatSettings()
    policy: str = ""
    _loaded: Event = field(default_factory=Event, init=False, repr=False, compare=False)

    def __repr__(self) -> str:
        drafters = "".join(
            f", draft={model.checkpoint.path}" for model in self.models if model is not self.target
        )
        policy = self.policy or type(self.method).__name__
        precision = dtype_name(self.target.dtype)
        if self.target.bits is not None:
            precision = f"{precision}, weights={self.target.bits}"
        engine = f"engine={self.method.engine}, dtype={precision}"
        return f"Decoder(policy={policy}, target={self.target.checkpoint.path}{drafters}, {engine})"

    def __getstate__(self) -> NoReturn:
        """Raises TypeError: what it runs on is of this process."""
        raise TypeError(
            "a decoder cannot be copied to another process; call bild_lab.load there, once in each"
        )

    @property
    def running(self) -> tuple[LoadedModel, ...]:
        """The models that run: Transformers' own generate runs its own modules, whatever engine our
        loop uses.

        For a peer in a process of its own these are the same checkpoints, as our loop would run
        them; for one that decodes and is judged without them, none.
        """
        if not getattr(self.method, "reads_target", True):
            return ()
        if self.method.engine == "hf":
            return tuple(model.transformers for model in self.models)
        return self.models

    @property
    def vocabularies(self) -> list[dict[str, Any]]:
        """What each draft model with another vocabulary than the target's shares with it."""
        return [model.facts for model in self.models if isinstance(model, TranslatedModel)]

    def load_weights(self, stage: Callable[[str], None] = lambda name: None) -> None:
        """Read the weights now instead of at the first decoding. stage: called with each model's
        name.

        Raises UserError for a model whose sessions would not give its own scores, and for one whose
        files were overwritten since.
        """
        if self._loaded.is_set():  # a text waits for no other decoder's weights
            for model in self.running:
                model.checkpoint.require_not_overwritten()
            return
        with LOADING, self._undisturbed():
            for model in self.running:
                stage(f"loading {short_name(model.checkpoint.path)}")
                model.checkpoint.require_not_overwritten()
                model.load()
                if self.method.draft_shape is not None:
                    model.admit(self.method.draft_shape)
        self._loaded.set()

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Inside the block no model in memory is in training mode, and no default device of the
        process counts.
        """
        checkpoints = [model.checkpoint for model in self.models]
        modules = [
            checkpoint.module
            for checkpoint in checkpoints
            if isinstance(checkpoint, LoadedCheckpoint)
        ]
        with evaluation_mode(modules), cpu_by_default():
            yield

    def request(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        seed: int = 0,
        max_source_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        index: int = 0,
    ) -> Request:
        """Tokenize a prompt (text, token ids or messages) and set its limits and sampling.

        stop: stop strings; None for those of the decoder. index: its place among the prompts that
        are sampled with this seed. Raises UserError for a prompt that cannot be decoded.
        """
        require_whole("max_new_tokens", max_new_tokens, 1)
        require_whole("seed", seed, 0)
        if max_source_tokens is not None:
            require_whole("max_source_tokens", max_source_tokens, 1)
        sampling = sampling or Sampling()
        self.require_sampling(sampling)
        in_own_template = is_chat(prompt) or isinstance(prompt, CompleteText)
        source = self._source(prompt, max_source_tokens)
        positions = self._require_positions(source, max_new_tokens)
        checkpoint, strings = self.target.checkpoint, self.stop if stop is None else tuple(stop)
        if in_own_template:
            checkpoint.warn_of_unknown_end(strings)
        stops = StopStrings(strings, checkpoint) if strings else None
        if stops and not ends_at_stop_strings(self.method):
            raise UserError(KNOWS_NO_STOP.format(self.method.engine))
        limits = Limits(len(source.prompt), max_new_tokens, checkpoint.end_tokens, positions, stops)
        if self.processors:
            processors = self.processors.for_text(source, limits, self.target.checkpoint.config)
            source = replace(source, processors=processors)
        request = Request(source, limits, sampling).seeded(seed, index)
        if isinstance(self.method, Replays):
            self.method.require_answer(request)
        return request

    def _source(self, prompt: Prompt, max_tokens: int | None) -> Source:
        """The prompt as token ids, at most so many. Raises UserError for tokens that a model does not
        have.
        """
        if isinstance(prompt, SourcePrompt) and max_tokens is not None:
            prompt = prompt.within(max_tokens, self.prompt_length)
        if is_chat(prompt):
            prompt = self._chat_tokens(chat_messages(prompt), max_tokens)
        source = self.languages.text(self.target, prompt, max_tokens)
        for model in self.models:
            # models with a vocabulary of their own read other tokens
            if not isinstance(model, TranslatedModel | SharedIdModel):
                model.checkpoint.require_rows(source)
        return source

    def requests(
        self, prompts: Iterable[Prompt], max_new_tokens: int, *options: Any
    ) -> list[Request]:
        """A request for each prompt, as `request` makes it.

        Warns of texts longer than a model was trained for.
        """
        requests = [
            self.request(prompt, max_new_tokens, *options, index=index)
            for index, prompt in enumerate(prompts)
        ]
        # the last token is never read
        lengths = [len(request.source.prompt) + max_new_tokens - 1 for request in requests]
        for model in self.running:
            trained = trained_positions(model.checkpoint.config)
            if beyond := sum(trained is not None and length > trained for length in lengths):
                warn_once(
                    f"{model.checkpoint.path} was trained for texts of {trained:,} tokens, and"
                    f" {beyond} of {len(lengths)} here may be longer; lower"
                    " dataset.max_source_tokens or decoding.max_new_tokens"
                )
        return requests

    def require_sampling(self, sampling: Sampling) -> None:
        """Raise UserError for sampled texts of a method that decodes greedily alone, as it says
        itself, or as a peer that says nothing.
        """
        greedy_only = getattr(self.method, "greedy_only", isinstance(self.method, External))
        if greedy_only and not sampling.greedy:
            raise UserError(
                f"policy {self.policy or type(self.method).__name__} decodes greedily, got"
                f" decoding.temperature={sampling.temperature}; use decoding=greedy, or another"
                " policy"
            )

    def require_batches(self, sampling: Sampling) -> None:
        """Raise UserError for a method that decodes no batches, or none of such texts."""
        require_batches(self.policy or type(self.method).__name__, self.method, self.models)
        if isinstance(self.method, DecodesBatches):
            require_plain(sampling, bool(self.processors))

    def prompt_length(self, prompt: Prompt) -> int:
        """How many tokens the target reads of a prompt."""
        return self.languages.text(self.target, prompt, None).length

    def _chat_tokens(
        self, messages: Sequence[Mapping[str, str]], max_tokens: int | None
    ) -> list[int]:
        """A chat as token ids, at most so many of them: the end of the last message is left out."""
        *earlier_messages, last_message = messages
        content = last_message["content"]

        def tokens_with(characters: int) -> list[int]:
            shortened = {**last_message, "content": content[:characters]}
            return self.target.checkpoint.chat_tokens([*earlier_messages, shortened], self.chat)

        tokens = tokens_with(len(content))
        if max_tokens is None or len(tokens) <= max_tokens:
            return tokens
        fitting = longest_fitting(
            len(content), lambda characters: len(tokens_with(characters)) <= max_tokens
        )
        if not fitting:
            raise UserError(
                f"max_source_tokens={max_tokens} leaves no room for the last message: the chat"
                f" without it has {len(tokens_with(0))} tokens; raise it, or leave earlier messages"
                " out"
            )
        return tokens_with(fitting)

    def _require_positions(self, source: Source, max_new_tokens: int) -> int | None:
        """How many tokens all models can read; None for any number.

        Raises UserError for a longer request.
        """
        prompt_length = len(source.prompt)
        tokens_read = prompt_length + max_new_tokens - 1  # the last token is never read
        source_length = source.encoder_length
        limits = []
        for model in self.running:
            name = f"{model.checkpoint.path} ({model.checkpoint.config.model_type})"
            in_session = self.method.draft_shape is not None
            limit = model.session_positions if in_session else model.positions
            if limit is not None and tokens_read > limit:
                reason = remedy = ""
                if limit != model.positions:
                    reason = ", as its rotation changes with longer texts"
                    remedy = ", or use policy=hf_generate"
                raise UserError(
                    f"{name} reads at most {limit} tokens{reason}, got a prompt of {prompt_length}"
                    f" and {max_new_tokens} new tokens; lower decoding.max_new_tokens or"
                    f" dataset.max_source_tokens{remedy}"
                )
            source_limit = model.source_positions
            if source_limit is not None and source_length > source_limit:
                raise UserError(
                    f"the encoder of {name} reads at most {source_limit} tokens, got a source of"
                    f" {source_length}; lower dataset.max_source_tokens"
                )
            limits.append(limit)
        return min((limit for limit in limits if limit is not None), default=None)

    @overload
    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = ...,
        temperature: float = ...,
        top_k: int | None = ...,
        top_p: float | None = ...,
        seed: int = ...,
        max_source_tokens: int | None = ...,
        batch: int | None = ...,
        stop: str | Sequence[str] | None = ...,
    ) -> Generation: ...
    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        max_new_tokens: int = ...,
        temperature: float = ...,
        top_k: int | None = ...,
        top_p: float | None = ...,
        seed: int = ...,
        max_source_tokens: int | None = ...,
        batch: int | None = ...,
        stop: str | Sequence[str] | None = ...,
    ) -> list[Generation]: ...
    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        max_source_tokens: int | None = None,
        batch: int | None = 1,
        stop: str | Sequence[str] | None = None,
    ) -> Generation | list[Generation]:
        """Continue one prompt, or translate it with an encoder–decoder. The trace holds every round
        and its stages.

        prompt: text, token ids, or the messages of a chat; or a list of such prompts, which gives a
        list. Sampled, each of a list draws for itself, the same prompt too.
        max_source_tokens: a longer prompt is cut to so many tokens, of a chat the last message;
        None: never.
        stop: one or several stop strings; the text ends before the first of them. None: those of
        `load`.
        batch: how many of several prompts to decode at once, to the same texts; their traces then
        have no stages. None: as many as pay where nobody times, one for what decodes no batches.
        """
        batch = plain_value(batch)
        if batch is not None:
            require_whole("batch", batch, 1)
        prompt = plain_prompt(prompt)
        strings = self.stop if stop is None else stop_strings(stop)
        options = (
            plain_value(max_new_tokens),
            sampling_of(*map(plain_value, (temperature, top_k, top_p))),
            plain_value(seed),
            plain_value(max_source_tokens),
            strings,
        )
        is_list = is_prompt_list(prompt)
        with cpu_by_default():
            requests = self.requests(prompt if is_list else [prompt], *options)
        if not is_list:
            return self._generate_alone(requests[0], strings)
        if batch == 1:
            return [self._generate_alone(request, strings) for request in requests]
        return self._generate_together(requests, batch, strings)

    def _generate_alone(self, request: Request, stop: Sequence[str]) -> Generation:
        self.load_weights()
        trace = StageTrace(synchronize=self.synchronize)
        with self._undisturbed():
            if isinstance(self.method, Prepares):
                self.method.prepare(request)
            started = time.perf_counter()
            tokens = self.method.decode(request, trace)
            self.synchronize()
            seconds = time.perf_counter() - started
        trace.synchronize = no_wait  # a stored result does not take the models with it
        require_text(self.method, request, tokens)
        emitted = tokens[request.limits.prompt_length :]
        return Generation(self.text(emitted, stop), emitted, trace, seconds)

    def _generate_together(
        self, requests: list[Request], batch: int | None, stop: Sequence[str]
    ) -> list[Generation]:
        """Raises UserError for a method that decodes no batches, and for a batch that does not fit
        into memory.
        """
        self.load_weights()
        if batch is None:
            batch = auto_batch_size(self.method, self.models, requests)
        else:
            self.require_batches(requests[0].sampling)
            require_room(self.models, requests, batch)
        with self._undisturbed():
            texts = decode_batch(self.method, requests, Batch(batch))
        return [
            Generation(self.text(text.token_ids, stop), text.token_ids, text.trace, text.latency_s)
            for text in texts
        ]

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop: str | Sequence[str] | None = None,
    ) -> Iterator[str]:
        """The text of `generate` in pieces, as tokens are accepted.

        A method that cannot stream, such as a peer, gives the text in one piece.
        """
        prompt = plain_prompt(prompt)
        if is_prompt_list(prompt):
            raise UserError(
                f"a stream has one prompt, got a list of {len(prompt)}; use generate, or stream"
                " each"
            )
        strings = self.stop if stop is None else stop_strings(stop)
        sampling = sampling_of(*map(plain_value, (temperature, top_k, top_p)))
        length, seed = map(plain_value, (max_new_tokens, seed))
        with cpu_by_default():
            (request,) = self.requests([prompt], length, sampling, seed, None, strings)
        self.load_weights()
        rounds = self._rounds(request)
        emitted: list[int] = []
        shown = ""
        for new_tokens in self._each_undisturbed(rounds):
            emitted += new_tokens
            tokens = without_byte_tokens(emitted, self.target.checkpoint.tokenizer)
            text = stable_prefix(self.text(tokens, strings), strings)
            if text.startswith(shown) and len(text) > len(shown):
                yield text[len(shown) :]
                shown = text
        if remaining := self.text(emitted, strings)[len(shown) :]:
            yield remaining

    def _rounds(self, request: Request) -> Iterator[list[int]]:
        """The tokens of each round; of a method that cannot stream those of the whole text."""
        if isinstance(self.method, Streams):
            yield from self.method.stream(request, Trace())
        else:
            yield self.method.decode(request, Trace())[request.limits.prompt_length :]

    def _each_undisturbed(self, rounds: Iterator[list[int]]) -> Iterator[list[int]]:
        """The rounds; between them a training may go on."""
        while True:
            with self._undisturbed():
                new_tokens = next(rounds, None)
            if new_tokens is None:
                return
            yield new_tokens

    def text(self, token_ids: Sequence[int], stop: Sequence[str] | None = None) -> str:
        """Without special tokens, and before the first stop string; None for those of the decoder.

        Behind the prompt it gives the whole text: leading spaces are kept.
        """
        text = self.target.checkpoint.continuation(token_ids)
        return before_stop(text, self.stop if stop is None else stop)

    def scored_text(self, token_ids: Sequence[int]) -> str:
        """The text that metrics get: what a program begins with counts, a space at its end does
        not.
        """
        return self.text(token_ids).rstrip()

    def pieces(self, token_ids: Iterable[int]) -> dict[int, str]:
        """The text that each token adds, with its leading space, by token id.

        Special tokens are given by name.
        """
        tokenizer = self.target.checkpoint.tokenizer
        special = set(tokenizer.all_special_ids)
        # a token decoded alone loses its leading space; a tokenizer of words may not know this one
        encoded = tokenizer.encode("a", add_special_tokens=False)
        anchor = encoded[-1] if encoded else min(set(tokenizer.get_vocab().values()) - special)
        anchor_text = tokenizer.decode([anchor])
        return {
            token: (
                tokenizer.convert_ids_to_tokens(token)
                if token in special
                else tokenizer.decode([anchor, token])[len(anchor_text) :]
            )
            for token in token_ids
        }

    def synchronize(self) -> None:
        """Wait until the target's device has finished its work."""
        wait_for(self.target.device)


def sampling_of(temperature: float, top_k: int | None, top_p: float | None) -> Sampling:
    """How tokens are chosen. Raises UserError for top_k or top_p where nothing is sampled."""
    sampling = Sampling(temperature, top_k, top_p)
    unused = {
        name: value for name, value in (("top_k", top_k), ("top_p", top_p)) if value is not None
    }
    if sampling.greedy and unused:
        name, value = next(iter(unused.items()))
        raise UserError(
            f"decoding.{name}={value} has no effect without sampling, as decoding.temperature is 0;"
            f" set decoding=sample, or decoding.{name}=null"
        )
    return sampling


def ends_at_stop_strings(method: Method) -> bool:
    """Whether a method ends texts at stop strings: all of ours, and a peer that says so."""
    return not isinstance(method, External) or getattr(method, "knows_stop_strings", False)
