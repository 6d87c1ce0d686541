"""A target and the method that decodes with it: from a prompt to text, and the answers that later turns follow."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload

import torch

from bild_lab.engine.batch import Batch
from bild_lab.engine.batched import decode_batch, quiet_batch, require_batches, require_room
from bild_lab.engine.models.admission import trained_positions
from bild_lab.engine.models.checkpoint import Prompt
from bild_lab.engine.processors import Processors
from bild_lab.engine.protocols import Method, Prepares, Streams
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import LoadedModel
from bild_lab.engine.trace import StageTrace, Trace
from bild_lab.engine.vocabularies import AlikeModel, TranslatedModel
from bild_lab.errors import UserError, require_whole
from bild_lab.files import write_atomically
from bild_lab.lab.data.examples import Example, with_answers, with_earlier_turns
from bild_lab.lab.decoding.languages import Languages, warn
from bild_lab.lab.formatting import number, short_name
from bild_lab.lab.hashing import content_hash

METHOD, BASELINE = "method", "baseline"  # the measured policy, and the policy that it is compared with
SPACE = "▁"  # how SentencePiece writes a space, of which decoding drops the first


@dataclass(frozen=True)
class Generation:
    """One continuation. token_ids: as emitted, including the end token. text: without special tokens."""

    text: str
    token_ids: list[int]
    trace: Trace
    latency_s: float


@dataclass(frozen=True)
class Timed:
    """One method's output on one example: the emitted tokens, the seconds of every repeat, and the trace.

    latency_s: in a batch, its share of the batch's seconds. waited_s: in a batch, from its place to its end. joules: as
    latency_s; empty where no counter can be read.
    """

    token_ids: list[int]
    latency_s: list[float]
    trace: Trace
    waited_s: list[float] = field(default_factory=list)
    joules: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Decoder:
    """A target model and a method that decodes with it."""

    target: LoadedModel
    method: Method
    models: tuple[LoadedModel, ...]  # the target, then the models that draft
    processors: Processors = Processors()
    languages: Languages = Languages()

    @property
    def running(self) -> tuple[LoadedModel, ...]:
        """The models that run: Transformers' own generate runs its own modules, whatever engine our loop uses.

        Of a peer in a process of its own these are the same checkpoints, as our loop would run them.
        """
        return tuple(each.transformers if self.method.engine == "hf" else each for each in self.models)

    @property
    def vocabularies(self) -> list[dict[str, Any]]:
        """Of each draft model with another vocabulary than the target's: what the two share."""
        return [model.facts for model in self.models if isinstance(model, TranslatedModel)]

    def load_weights(self, stage: Callable[[str], None] = lambda name: None) -> None:
        """Read the weights now instead of at the first decoding. stage: called with each model's name and size.

        Raises UserError for a model whose sessions would not give its own scores.
        """
        for model in self.running:
            stage(f"loading {short_name(model.checkpoint.path)}{loading_size(Path(model.checkpoint.location))}")
            model.load()
            if self.method.feeds is not None:
                model.admit(self.method.feeds)

    def request(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        seed: int = 0,
        max_source_tokens: int | None = None,
    ) -> Request:
        """Tokenize a prompt (text, token ids or messages) and set its limits and sampling."""
        require_whole("max_new_tokens", max_new_tokens, 1)
        sampling = sampling or Sampling()
        source = self.languages.text(self.target, prompt, max_source_tokens)
        for model in self.models:
            if not isinstance(model, TranslatedModel | AlikeModel):  # which read tokens of their own
                model.checkpoint.require_rows(source)
        positions = self._require_positions(source, max_new_tokens)
        limits = Limits(len(source.prompt), max_new_tokens, self.target.checkpoint.end_tokens, positions)
        if self.processors:
            processors = self.processors.for_text(source, limits, self.target.checkpoint.config)
            source = replace(source, processors=processors)
        generator = None if sampling.greedy else torch.Generator(self.target.device).manual_seed(seed)
        return Request(source, limits, sampling, generator)

    def requests(self, prompts: Iterable[Prompt], max_new_tokens: int, *options: Any) -> list[Request]:
        """Several prompts, each as `request` makes it. Warns of texts longer than a model was trained for."""
        found = [self.request(one, max_new_tokens, *options) for one in prompts]
        lengths = [len(one.source.prompt) + max_new_tokens - 1 for one in found]  # the last token is never read
        for model in self.running:
            trained = trained_positions(model.checkpoint.config)
            if beyond := sum(trained is not None and length > trained for length in lengths):
                warn(
                    f"{model.checkpoint.path} was trained for texts of {trained:,} tokens, and {beyond} of "
                    f"{len(lengths)} here may be longer; lower dataset.max_source_tokens or decoding.max_new_tokens"
                )
        return found

    def _require_positions(self, source: Source, max_new_tokens: int) -> int | None:
        """How many tokens all models can read; None for any number. Raises UserError for a longer request."""
        prompt, read = len(source.prompt), len(source.prompt) + max_new_tokens - 1  # the last token is never read
        limits = []
        for model in self.running:
            name = f"{model.checkpoint.path} ({model.checkpoint.config.model_type})"
            most = model.positions if self.method.feeds is None else model.session_positions
            if most is not None and read > most:
                unchanged = "" if most == model.positions else ", as its rotation changes with longer texts"
                remedy = "" if most == model.positions else ", or use policy=hf_generate"
                raise UserError(
                    f"{name} reads at most {most} tokens{unchanged}, got a prompt of {prompt} and {max_new_tokens} new "
                    f"tokens; lower decoding.max_new_tokens or dataset.max_source_tokens{remedy}"
                )
            limits.append(most)
            longest = 0 if source.encoder_ids is None else source.encoder_ids.shape[1]
            if (most := model.source_positions) is not None and longest > most:
                raise UserError(
                    f"the encoder of {name} reads at most {most} tokens, got a source of {longest}; "
                    "lower dataset.max_source_tokens"
                )
        return min((most for most in limits if most is not None), default=None)

    @overload
    def generate(self, prompt: Prompt, max_new_tokens: int = ..., **options: Any) -> Generation: ...
    @overload
    def generate(self, prompt: Sequence[Prompt], max_new_tokens: int = ..., **options: Any) -> list[Generation]: ...
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
    ) -> Generation | list[Generation]:
        """Continue one prompt, or translate it with an encoder–decoder. The trace holds every round and its stages.

        prompt: text, token ids, or the messages of a chat; or a list of such prompts, which gives a list.
        max_source_tokens: a longer prompt is cut to so many tokens; None: never.
        batch: how many of several prompts to decode at once, to the same texts; their traces then have no stages. None:
        as many as pay where nobody times, one for what decodes no batches.
        """
        if hasattr(prompt, "tolist"):  # a tensor or an array
            prompt = prompt.tolist()
        options = (max_new_tokens, Sampling(temperature, top_k, top_p), seed, max_source_tokens)
        if several(prompt):
            if batch == 1:
                own = (max_new_tokens, temperature, top_k, top_p, seed, max_source_tokens)
                return [self.generate(one, *own) for one in prompt]
            return self._generate_together(self.requests(prompt, *options), batch)
        (request,) = self.requests([prompt], *options)
        self.load_weights()
        if isinstance(self.method, Prepares):
            self.method.prepare(request)
        trace = StageTrace(synchronize=self.synchronize)
        started = time.perf_counter()
        tokens = self.method.decode(request, trace)
        self.synchronize()
        emitted = tokens[request.limits.prompt_length :]
        return Generation(self.text(emitted), emitted, trace, time.perf_counter() - started)

    def _generate_together(self, requests: list[Request], batch: int | None) -> list[Generation]:
        """Raises UserError for a method that decodes no batches, and for a batch that does not fit into memory."""
        self.load_weights()
        if batch is None:
            batch = quiet_batch(self.method, self.models, requests)
        else:
            require_batches(type(self.method).__name__, self.method, self.models)
            require_room(self.models, requests, batch)
        texts = decode_batch(self.method, requests, Batch(batch))
        return [Generation(self.text(one.token_ids), one.token_ids, one.trace, one.latency_s) for one in texts]

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> Iterator[str]:
        """The text of `generate` in pieces, as tokens are accepted.

        A method that cannot stream, such as a peer, gives the text in one piece.
        """
        if several(prompt):
            raise UserError(f"a stream has one prompt, got a list of {len(prompt)}; use generate, or stream each")
        (request,) = self.requests([prompt], max_new_tokens, Sampling(temperature, top_k, top_p), seed)
        self.load_weights()
        if isinstance(self.method, Streams):
            parts = self.method.stream(request, Trace())
        else:
            parts = iter([self.method.decode(request, Trace())[request.limits.prompt_length :]])
        emitted: list[int] = []
        shown = ""
        for part in parts:
            emitted += part
            text = settled(self.text(emitted))
            if text.startswith(shown) and len(text) > len(shown):
                yield text[len(shown) :]
                shown = text
        if rest := self.text(emitted)[len(shown) :]:
            yield rest

    def text(self, token_ids: list[int]) -> str:
        """Without special tokens. Behind the prompt it gives the whole text: leading spaces are kept."""
        checkpoint = self.target.checkpoint
        text = checkpoint.tokenizer.decode(token_ids, skip_special_tokens=True)
        if checkpoint.encoder_decoder:
            return text.strip()
        written = "".join(checkpoint.tokenizer.convert_ids_to_tokens(token_ids, skip_special_tokens=True))
        spaces = len(written) - len(written.lstrip(SPACE))
        return " " * spaces + text.lstrip(" ") if spaces else text

    def pieces(self, token_ids: Iterable[int]) -> dict[int, str]:
        """The text that each token adds, with its leading space, by token id. Special tokens are given by name."""
        tokenizer = self.target.checkpoint.tokenizer
        special = set(tokenizer.all_special_ids)
        anchor = tokenizer.encode("a", add_special_tokens=False)[-1]  # a token decoded alone loses its leading space
        before = tokenizer.decode([anchor])
        return {
            token: tokenizer.convert_ids_to_tokens(token)
            if token in special
            else tokenizer.decode([anchor, token])[len(before) :]
            for token in token_ids
        }

    def synchronize(self) -> None:
        """Wait until the target's device has finished its work."""
        self.target.transformers.synchronize()


def loading_size(place: Path) -> str:
    """Of the weights in this folder or file, as `, 3.1 GB`; empty below a tenth, and for a model of the hub."""
    files = list(place.iterdir()) if place.is_dir() else [place]
    size = sum(one.stat().st_size for one in files if one.suffix in (".safetensors", ".bin", ".gguf") and one.is_file())
    return f", {number(size / 1e9, 1)} GB" if size >= 1e8 else ""


def several(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Whether it is a list of prompts: its first entry is text, token ids or a list of messages.

    Raises UserError for what is neither a prompt nor such a list.
    """
    if isinstance(prompt, str):
        return False
    known = isinstance(prompt, Sequence)
    if not known or not all(isinstance(one, Mapping | Sequence) or hasattr(one, "__index__") for one in prompt):
        wanted = "text, token ids or the messages of a chat, or a list of such prompts"
        raise UserError(f"a prompt is {wanted}, got {prompt!r:.80}")
    return bool(prompt) and isinstance(prompt[0], Sequence)


def settled(text: str) -> str:
    """The text without its last two words.

    Later tokens may still change these: a character may take several tokens, and some tokenizers remove spaces
    before punctuation.
    """
    words = list(re.finditer(r"\S+", text))
    return text[: words[-2].start()].rstrip() if len(words) > 2 else ""


# the keys of a point's setting that determine the target's own greedy answers
DECIDING = (
    *("weights", "data", "engine", "dtype", "compile", "device", "hardware", "code", "max_source_tokens"),
    *("processors", "source_language", "target_language"),
)


def with_history(
    examples: tuple[Example, ...], vanilla: Decoder, setting: dict[str, Any], max_new_tokens: int, folder: Path
) -> tuple[Example, ...]:
    """The examples with complete prompts: later turns continue the greedy answers of `vanilla`.

    The answers are made once, before timing starts, and stored in `folder` under a hash of everything that determines
    them. All points of a sweep share them: if two policies decode a token differently, no prompt changes.
    """
    if not any(example.continues for example in examples):
        return examples
    deciding = {name: setting[name] for name in (*DECIDING, "weight_bits") if name in setting}
    key = content_hash({**deciding, "max_new_tokens": max_new_tokens})
    file = folder / f"{key}.json"
    if not file.is_file():
        answers = greedy_history(examples, vanilla, max_new_tokens, setting["max_source_tokens"])
        content = json.dumps({"target": setting["target"], "answers": answers}, indent=2, ensure_ascii=False)
        write_atomically(file, content.encode() + b"\n")
    try:
        answers = json.loads(file.read_text())["answers"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot read the conversations' history in {file}: {error}; remove this file") from error
    return with_answers(examples, answers)


def greedy_history(
    examples: Sequence[Example], vanilla: Decoder, max_new_tokens: int, max_source_tokens: int | None = None
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
        found = vanilla.generate(prompts, max_new_tokens, max_source_tokens=max_source_tokens, batch=None)
        answers |= {each: answer.text.strip() for each, answer in zip(asked, found, strict=True)}
    return answers
