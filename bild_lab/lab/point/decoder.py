"""A target and the method that decodes with it: from a prompt to text, and the answers that later
turns follow.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload

import torch

from bild_lab.engine.batch_decoding import (
    auto_batch_size,
    decode_batch,
    require_batches,
    require_room,
)
from bild_lab.engine.batch_scheduler import Batch
from bild_lab.engine.logits_processors import Processors
from bild_lab.engine.methods.hf_generation import require_plain
from bild_lab.engine.models.checkpoint.chat import ChatSettings
from bild_lab.engine.models.checkpoint.checkpoint import Prompt
from bild_lab.engine.models.checkpoint.pieces import BYTE
from bild_lab.engine.models.checkpoint.weight_files import in_folder
from bild_lab.engine.models.hf.admission import trained_positions
from bild_lab.engine.protocols import (
    DecodesTogether,
    External,
    Method,
    Prepares,
    Replays,
    Streams,
)
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import LoadedModel
from bild_lab.engine.stop import UNFINISHED, StopStrings, before_stop
from bild_lab.engine.trace import StageTrace, Trace
from bild_lab.engine.vocabularies import AlikeModel, TranslatedModel
from bild_lab.errors import UserError, require_whole
from bild_lab.files import write_atomically
from bild_lab.lab.config.compose import compose_policy, resolved_policy
from bild_lab.lab.config.schemas import stop_strings
from bild_lab.lab.data.prompts import (
    Example,
    SourcePrompt,
    longest_fitting,
    with_answers,
    with_earlier_turns,
)
from bild_lab.lab.point.languages import Languages, warn
from bild_lab.lab.schema.formatting import number, short_name
from bild_lab.lab.store.code import code_hash
from bild_lab.lab.store.hashing import content_hash, modules_of

# what decoders of WordPiece, and `clean_up_tokenization` of Transformers, write without spaces
CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're", " do not")
KNOWS_NO_STOP = (
    "{} knows no stop strings here, so its seconds would count what comes after them; set"
    " decoding.stop=null, or use policy=hf_generate"
)
# the measured policy, and the policy that it is compared with
METHOD, BASELINE = "method", "baseline"


A_PROMPT = "text, token ids or the messages of a chat, or a list of such prompts"
RAW = (bytes, bytearray, memoryview)  # sequences of numbers that are no token ids


@dataclass(frozen=True)
class Generation:
    """One continuation. token_ids: as emitted, including the end token. text: without special
    tokens.
    """

    text: str
    token_ids: list[int]
    trace: Trace
    latency_s: float


@dataclass(frozen=True)
class Timed:
    """One method's output on one example: the emitted tokens, the seconds of every repeat, and the
    trace.

    latency_s: in a batch, its share of the batch's seconds. waited_s: in a batch, from its place to
    its end. joules: as latency_s; empty where no counter can be read. All three are empty if
    nothing was timed.
    """

    token_ids: list[int]
    latency_s: list[float]
    trace: Trace
    waited_s: list[float] = field(default_factory=list)
    joules: list[float] = field(default_factory=list)

    def without_clock(self) -> Timed:
        """The text alone."""
        return Timed(self.token_ids, [], self.trace)


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

    def __repr__(self) -> str:
        drafters = "".join(
            f", draft={model.checkpoint.path}" for model in self.models if model is not self.target
        )
        policy = self.policy or type(self.method).__name__
        precision = str(self.target.dtype).removeprefix("torch.")
        if self.target.bits is not None:
            precision = f"{precision}, weights={self.target.bits}"
        engine = f"engine={self.method.engine}, dtype={precision}"
        return f"Decoder(policy={policy}, target={self.target.checkpoint.path}{drafters}, {engine})"

    @property
    def running(self) -> tuple[LoadedModel, ...]:
        """The models that run: Transformers' own generate runs its own modules, whatever engine our
        loop uses.

        Of a peer in a process of its own these are the same checkpoints, as our loop would run
        them.
        """
        return tuple(
            each.transformers if self.method.engine == "hf" else each for each in self.models
        )

    @property
    def vocabularies(self) -> list[dict[str, Any]]:
        """Of each draft model with another vocabulary than the target's: what the two share."""
        return [model.facts for model in self.models if isinstance(model, TranslatedModel)]

    def load_weights(self, stage: Callable[[str], None] = lambda name: None) -> None:
        """Read the weights now instead of at the first decoding. stage: called with each model's
        name and size.

        Raises UserError for a model whose sessions would not give its own scores.
        """
        for model in self.running:
            stage(
                "loading"
                f" {short_name(model.checkpoint.path)}{loading_size(Path(model.checkpoint.location))}"
            )
            model.load()
            if self.method.draft_shape is not None:
                model.admit(self.method.draft_shape)

    def request(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        seed: int = 0,
        max_source_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> Request:
        """Tokenize a prompt (text, token ids or messages) and set its limits and sampling.

        stop: stop strings; None for those of the decoder. Raises UserError for a prompt that cannot
        be decoded.
        """
        require_whole("max_new_tokens", max_new_tokens, 1)
        sampling = sampling or Sampling()
        self.require_sampling(sampling)
        if isinstance(prompt, SourcePrompt) and max_source_tokens is not None:
            prompt = prompt.within(max_source_tokens, self.prompt_length)
        if several_messages(prompt):
            prompt = self._chat_tokens(prompt, max_source_tokens)
        source = self.languages.text(self.target, prompt, max_source_tokens)
        for model in self.models:
            # which read tokens of their own
            if not isinstance(model, TranslatedModel | AlikeModel):
                model.checkpoint.require_rows(source)
        positions = self._require_positions(source, max_new_tokens)
        checkpoint, strings = self.target.checkpoint, self.stop if stop is None else tuple(stop)
        stops = StopStrings(strings, checkpoint) if strings else None
        if stops and isinstance(self.method, External):
            raise UserError(KNOWS_NO_STOP.format(self.method.engine))
        limits = Limits(len(source.prompt), max_new_tokens, checkpoint.end_tokens, positions, stops)
        if self.processors:
            processors = self.processors.for_text(source, limits, self.target.checkpoint.config)
            source = replace(source, processors=processors)
        generator = (
            None if sampling.greedy else torch.Generator(self.target.device).manual_seed(seed)
        )
        request = Request(source, limits, sampling, generator)
        if isinstance(self.method, Replays):
            self.method.require_answer(request)
        return request

    def requests(
        self, prompts: Iterable[Prompt], max_new_tokens: int, *options: Any
    ) -> list[Request]:
        """Several prompts, each as `request` makes it.

        Warns of texts longer than a model was trained for.
        """
        found = [self.request(one, max_new_tokens, *options) for one in prompts]
        # the last token is never read
        lengths = [len(one.source.prompt) + max_new_tokens - 1 for one in found]
        for model in self.running:
            trained = trained_positions(model.checkpoint.config)
            if beyond := sum(trained is not None and length > trained for length in lengths):
                warn(
                    f"{model.checkpoint.path} was trained for texts of {trained:,} tokens, and"
                    f" {beyond} of {len(lengths)} here may be longer; lower"
                    " dataset.max_source_tokens or decoding.max_new_tokens"
                )
        return found

    def require_sampling(self, sampling: Sampling) -> None:
        """Raise UserError for sampled texts of a method that decodes greedily alone."""
        parts = [getattr(self.method, name, None) for name in ("drafter", "acceptance")]
        greedy_only = isinstance(self.method, External) or any(
            getattr(one, "greedy_only", False) for one in parts
        )
        if greedy_only and not sampling.greedy:
            raise UserError(
                f"policy {self.policy or type(self.method).__name__} decodes greedily, got"
                f" decoding.temperature={sampling.temperature}; use decoding=greedy, or another"
                " policy"
            )

    def require_batches(self, sampling: Sampling) -> None:
        """Raise UserError for a method that decodes no batches, or none of such texts."""
        require_batches(self.policy or type(self.method).__name__, self.method, self.models)
        if isinstance(self.method, DecodesTogether):
            require_plain(sampling, bool(self.processors))

    def prompt_length(self, prompt: Prompt) -> int:
        """How many tokens the target reads of a prompt."""
        return self.languages.text(self.target, prompt, None).length

    def _chat_tokens(self, messages: Sequence[Mapping[str, str]], most: int | None) -> list[int]:
        """A chat as token ids, at most so many of them: the end of the last message is left out."""
        checkpoint, (*earlier, last) = self.target.checkpoint, messages

        def tokens_of(characters: int | None) -> list[int]:
            shortened = {**last, "content": last["content"][:characters]}
            return checkpoint.chat_tokens([*earlier, shortened], self.chat)

        whole = tokens_of(None)
        if most is None or len(whole) <= most:
            return whole
        fitting = longest_fitting(
            len(last["content"]), lambda length: len(tokens_of(length)) <= most
        )
        if not fitting:
            raise UserError(
                f"max_source_tokens={most} leaves no room for the last message: the chat without it"
                f" has {len(tokens_of(0))} tokens; raise it, or leave earlier messages out"
            )
        return tokens_of(fitting)

    def _require_positions(self, source: Source, max_new_tokens: int) -> int | None:
        """How many tokens all models can read; None for any number.

        Raises UserError for a longer request.
        """
        # the last token is never read
        prompt, read = len(source.prompt), len(source.prompt) + max_new_tokens - 1
        limits = []
        for model in self.running:
            name = f"{model.checkpoint.path} ({model.checkpoint.config.model_type})"
            most = model.positions if self.method.draft_shape is None else model.session_positions
            if most is not None and read > most:
                unchanged = (
                    "" if most == model.positions else ", as its rotation changes with longer texts"
                )
                remedy = "" if most == model.positions else ", or use policy=hf_generate"
                raise UserError(
                    f"{name} reads at most {most} tokens{unchanged}, got a prompt of {prompt} and"
                    f" {max_new_tokens} new tokens; lower decoding.max_new_tokens or"
                    f" dataset.max_source_tokens{remedy}"
                )
            limits.append(most)
            longest = 0 if source.encoder_ids is None else source.encoder_ids.shape[1]
            if (most := model.source_positions) is not None and longest > most:
                raise UserError(
                    f"the encoder of {name} reads at most {most} tokens, got a source of {longest};"
                    " lower dataset.max_source_tokens"
                )
        return min((most for most in limits if most is not None), default=None)

    @overload
    def generate(self, prompt: Prompt, max_new_tokens: int = ..., **options: Any) -> Generation: ...
    @overload
    def generate(
        self, prompt: Sequence[Prompt], max_new_tokens: int = ..., **options: Any
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
        list.
        max_source_tokens: a longer prompt is cut to so many tokens, of a chat the last message;
        None: never.
        stop: one or several stop strings; the text ends before the first of them. None: those of
        `load`.
        batch: how many of several prompts to decode at once, to the same texts; their traces then
        have no stages. None: as many as pay where nobody times, one for what decodes no batches.
        """
        prompt = plain_prompt(prompt)
        strings = self.stop if stop is None else stop_strings(stop)
        options = (
            max_new_tokens,
            sampling_of(temperature, top_k, top_p),
            seed,
            max_source_tokens,
            strings,
        )
        if several(prompt):
            if batch == 1:
                own = (
                    max_new_tokens,
                    temperature,
                    top_k,
                    top_p,
                    seed,
                    max_source_tokens,
                    1,
                    strings,
                )
                return [self.generate(one, *own) for one in prompt]
            return self._generate_together(self.requests(prompt, *options), batch, strings)
        (request,) = self.requests([prompt], *options)
        self.load_weights()
        if isinstance(self.method, Prepares):
            self.method.prepare(request)
        trace = StageTrace(synchronize=self.synchronize)
        started = time.perf_counter()
        tokens = self.method.decode(request, trace)
        self.synchronize()
        emitted = tokens[request.limits.prompt_length :]
        return Generation(
            self.text(emitted, strings), emitted, trace, time.perf_counter() - started
        )

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
        texts = decode_batch(self.method, requests, Batch(batch))
        return [
            Generation(self.text(one.token_ids, stop), one.token_ids, one.trace, one.latency_s)
            for one in texts
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
        if several(prompt):
            raise UserError(
                f"a stream has one prompt, got a list of {len(prompt)}; use generate, or stream"
                " each"
            )
        strings = self.stop if stop is None else stop_strings(stop)
        sampling = sampling_of(temperature, top_k, top_p)
        (request,) = self.requests([prompt], max_new_tokens, sampling, seed, None, strings)
        self.load_weights()
        if isinstance(self.method, Streams):
            parts = self.method.stream(request, Trace())
        else:
            parts = iter([self.method.decode(request, Trace())[request.limits.prompt_length :]])
        emitted: list[int] = []
        shown, stripped = "", self.target.checkpoint.encoder_decoder
        for part in parts:
            emitted += part
            text = settled(self.text(self._whole_characters(emitted), strings), strings)
            text = text.rstrip() if stripped else text  # as the whole text is
            if text.startswith(shown) and len(text) > len(shown):
                yield text[len(shown) :]
                shown = text
        if rest := self.text(emitted, strings)[len(shown) :]:
            yield rest

    def text(self, token_ids: Sequence[int], stop: Sequence[str] | None = None) -> str:
        """Without special tokens, and before the first stop string; None for those of the decoder.

        Behind the prompt it gives the whole text: leading spaces are kept.
        """
        checkpoint = self.target.checkpoint
        text = before_stop(checkpoint.continuation(token_ids), self.stop if stop is None else stop)
        return text.strip() if checkpoint.encoder_decoder else text

    def _whole_characters(self, token_ids: list[int]) -> list[int]:
        """The tokens without those at the end that write single bytes: the next byte may make them
        invalid.
        """
        names = self.target.checkpoint.tokenizer.convert_ids_to_tokens(token_ids)
        length = len(names)
        while length and BYTE.fullmatch(names[length - 1] or ""):
            length -= 1
        return token_ids[:length]

    def pieces(self, token_ids: Iterable[int]) -> dict[int, str]:
        """The text that each token adds, with its leading space, by token id.

        Special tokens are given by name.
        """
        tokenizer = self.target.checkpoint.tokenizer
        special = set(tokenizer.all_special_ids)
        # a token decoded alone loses its leading space
        anchor = tokenizer.encode("a", add_special_tokens=False)[-1]
        before = tokenizer.decode([anchor])
        return {
            token: (
                tokenizer.convert_ids_to_tokens(token)
                if token in special
                else tokenizer.decode([anchor, token])[len(before) :]
            )
            for token in token_ids
        }

    def synchronize(self) -> None:
        """Wait until the target's device has finished its work."""
        self.target.transformers.synchronize()


def loading_size(place: Path) -> str:
    """Of the weights in this folder or GGUF file, as `, 3.1 GB`; empty below a tenth, and for a
    model of the hub.
    """
    files = [place / name for name in in_folder(place)] if place.is_dir() else [place]
    size = sum(file.stat().st_size for file in files if file.is_file())
    return f", {number(size / 1e9, 1)} GB" if size >= 1e8 else ""


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


def several(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Whether it is a list of prompts: its first entry is text, token ids or a list of messages.

    Raises UserError for what is neither a prompt nor such a list.
    """
    if isinstance(prompt, str):
        return False
    if not isinstance(prompt, Sequence) or isinstance(prompt, RAW) or not all(map(is_part, prompt)):
        raise UserError(f"a prompt is {A_PROMPT}, got {prompt!r:.80}")
    return bool(prompt) and isinstance(prompt[0], Sequence)


def is_part(one: object) -> bool:
    """Whether a list of it can be a prompt or several: a token id, a message, or a prompt."""
    if isinstance(one, (bool, *RAW)):
        return False
    return isinstance(one, Mapping | Sequence) or hasattr(one, "__index__")


def several_messages(prompt: Prompt) -> bool:
    """Whether the prompt is the messages of a chat."""
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def plain_prompt(prompt: Any) -> Any:
    """The prompt with tensors and arrays as lists of token ids.

    Raises UserError for those of other shapes or types.
    """
    if isinstance(prompt, list | tuple):
        return [plain_prompt(one) if hasattr(one, "ndim") and one.ndim else one for one in prompt]
    if not hasattr(prompt, "ndim") or isinstance(prompt, RAW):
        return prompt
    # a list of one prompt needs no padding
    if prompt.ndim == 1 or (prompt.ndim == 2 and len(prompt) == 1):
        return prompt.tolist()
    raise UserError(
        f"the token ids of a prompt are one row, got an array of shape {tuple(prompt.shape)}; give"
        " a list of prompts, each without padding"
    )


def settled(text: str, stop: Sequence[str] = ()) -> str:
    """The text without what later tokens may still change.

    This is a part of a character, a space that some tokenizers remove before punctuation, and the
    beginning of a stop string.
    """
    text = text.rstrip(UNFINISHED)
    changing = [part for part in (*CLEANED, *stop) if begun(part, text)]
    return text[: len(text) - max((begun(part, text) for part in changing), default=0)]


def begun(part: str, text: str) -> int:
    """How many characters at the end of the text may be the beginning of this part."""
    return next(
        (length for length in range(len(part) - 1, 0, -1) if text.endswith(part[:length])), 0
    )


# the keys of a point's setting that determine the target's own greedy answers, if it has them
DECIDING = (
    *(
        "weights",
        "data",
        "engine",
        "dtype",
        "compile",
        "device",
        "hardware",
        "code",
        "max_source_tokens",
    ),
    *("processors", "stop", "source_language", "target_language", "weight_bits", "device_map"),
)


def with_history(
    examples: tuple[Example, ...],
    vanilla: Decoder,
    setting: dict[str, Any],
    max_new_tokens: int,
    folder: Path,
) -> tuple[Example, ...]:
    """The examples with complete prompts: later turns continue the greedy answers of `vanilla`.

    The answers are made once, before timing starts, and stored in `folder` under a hash of
    everything that determines them. All points of a sweep share them: if two policies decode a
    token differently, no prompt changes.
    """
    if not any(example.continues for example in examples):
        return examples
    deciding = {name: setting[name] for name in DECIDING if name in setting}
    own_code = code_hash(
        tuple(sorted(modules_of(resolved_policy(compose_policy("vanilla"))["decoder"])))
    )
    key = content_hash({**deciding, "own_code": own_code, "max_new_tokens": max_new_tokens})
    file = folder / f"{key}.json"
    if not file.is_file():
        answers = greedy_history(examples, vanilla, max_new_tokens, setting["max_source_tokens"])
        content = json.dumps(
            {"target": setting["target"], "answers": answers}, indent=2, ensure_ascii=False
        )
        write_atomically(file, content.encode() + b"\n")
    try:
        answers = json.loads(file.read_text(encoding="utf-8"))["answers"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"cannot read the conversations' history in {file}: {error}; remove this file"
        ) from error
    return with_answers(examples, answers)


def greedy_history(
    examples: Sequence[Example],
    vanilla: Decoder,
    max_new_tokens: int,
    max_source_tokens: int | None = None,
) -> dict[str, str]:
    """The decoder's greedy answer to every turn that a later turn continues, by the turn's id.

    max_source_tokens: prompts are cut to so many tokens, as those of the measured turns are.
    """
    wanted = {example.continues.id for example in examples if example.continues}
    whole: dict[str, Example] = {}
    answers: dict[str, str] = {}
    turns = sorted({example.turn for example in examples})
    for turn in turns:  # of all conversations at once, as each continues its own earlier turns only
        these = [example for example in examples if example.turn == turn]
        whole |= {example.id: with_earlier_turns(example, whole, answers) for example in these}
        asked = [example.id for example in these if example.id in wanted]
        if not asked:
            continue
        prompts = [whole[each].prompt for each in asked]
        found = vanilla.generate(
            prompts, max_new_tokens, max_source_tokens=max_source_tokens, batch=None
        )
        answers |= {each: answer.text.strip() for each, answer in zip(asked, found, strict=True)}
    return answers
