"""Hugging Face's own generation methods, run in the same harness for comparison."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    EncoderDecoderCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from bild_lab.engine.logits_processors import STOP_STRINGS, score_settings, search_settings
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint, decoder_depth
from bild_lab.engine.models.checkpoint.vocabulary import shares_token_ids, tokens_without_embedding
from bild_lab.engine.models.hf.generation import cache_of_its_own, with_settings
from bild_lab.engine.models.hf.model import HuggingFaceModel
from bild_lab.engine.request import Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import LoadedModel
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError, require_flag, require_whole, warn_once


class GenerateMethod:
    """A method of Transformers' `generate`. options: what it passes besides the request's own
    settings.
    """

    engine = "hf"
    draft_shape = None

    def __init__(self, target: LoadedModel, **options: Any) -> None:
        self._target, self._options = target.transformers, options

    def lossless(self, sampling: Sampling) -> bool:
        return True

    @torch.inference_mode()
    def decode(self, request: Request, trace: Trace) -> list[int]:
        return generate(self._target, [request], **self._options)[0]


class HuggingFaceGenerate(GenerateMethod):
    """`generate` of Transformers as shipped, with the request's limits, sampling settings and
    processors.
    """

    def __init__(self, target: LoadedModel) -> None:
        super().__init__(target)

    @torch.inference_mode()
    def decode_batch(self, requests: Sequence[Request]) -> list[list[int]]:
        return generate(self._target, requests)


class HuggingFaceAssisted(GenerateMethod):
    """Assisted generation of Transformers: a small model drafts, `generate` verifies.

    decoder_mask: pass the decoder an attention mask of ones. Without it, encoder–decoders run the
    drafter on the whole sequence again in every round (seen in transformers 5.23). False is as
    shipped.
    window: draft exactly this many tokens in each round, at least 1; None leaves the draft length
    as shipped.

    Raises UserError for a draft model of another vocabulary, and for one that cannot read every
    token of the target.
    """

    def __init__(
        self,
        target: LoadedModel,
        draft: LoadedModel,
        decoder_mask: bool = False,
        window: int | None = None,
    ) -> None:
        super().__init__(target)
        require_flag("decoder_mask", decoder_mask)
        if window is not None:
            require_whole("the draft window", window, 1)
        for model in (target, draft):
            require_cache("assisted generation", model)
        require_shared_tokens(target, draft)
        self._draft = draft.transformers
        self._settings = drafter_settings(draft.checkpoint.generation, window)
        self._decoder_mask = decoder_mask and target.checkpoint.encoder_decoder

    @torch.inference_mode()
    def decode(self, request: Request, trace: Trace) -> list[int]:
        draft = with_settings(self._draft.module, self._settings)
        options: dict[str, Any] = {"assistant_model": draft}
        if self._decoder_mask:
            options["decoder_attention_mask"] = torch.ones(
                1, 1, dtype=torch.long, device=self._target.device
            )
        with with_target_sizes(self._target.module, draft):
            masks = unknown_token_masks(self._target, self._draft)
            return generate(self._target, [request], masks, **options)[0]


def require_shared_tokens(target: LoadedModel, draft: LoadedModel) -> None:
    """Raise UserError for a draft model of another vocabulary, and for one that cannot read every
    token of the target.
    """
    checkpoints = target.checkpoint, draft.checkpoint
    if tokens_without_embedding(*checkpoints) or not shares_token_ids(*checkpoints):
        raise UserError(
            "assisted generation needs a draft model of the target's vocabulary, got"
            f" {model_label(draft)} for {model_label(target)}, which has other tokens, or more"
            " than the draft model has embeddings; use policy=speculative, which takes the tokens"
            " that both have"
        )


def drafter_settings(generation: GenerationConfig, window: int | None) -> GenerationConfig:
    """How an assistant generates. window: as in `HuggingFaceAssisted`."""
    # `generate` adapts the drafter's settings from call to call: a copy of our own keeps methods
    # independent
    settings = copy.deepcopy(generation)
    # the drafter passes through the target's processors, and its drafts end where the target's
    # text does
    for name in (*score_settings(settings), *search_settings(settings), STOP_STRINGS):
        setattr(settings, name, None)
    if window is not None:
        settings.num_assistant_tokens = window
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0.0
    return settings


class HuggingFacePromptLookup(GenerateMethod):
    """Prompt lookup of Transformers: `generate` drafts a copy of what followed the same tokens
    earlier, and verifies.

    On encoder–decoders it searches only the text so far; `drafters.PromptLookup` also searches the
    encoder's input.

    window: how many tokens to copy at most. longest_match: the longest suffix to search for;
    shorter ones follow. Raises UserError for a model whose state cannot roll back to an earlier
    token.
    """

    def __init__(self, target: LoadedModel, window: int, longest_match: int) -> None:
        require_whole("the draft window", window, 1)
        require_whole("longest_match", longest_match, 1)
        require_cache("prompt lookup", target)
        super().__init__(
            target, prompt_lookup_num_tokens=window, max_matching_ngram_size=longest_match
        )

    @torch.inference_mode()
    def decode(self, request: Request, trace: Trace) -> list[int]:
        limits, window = request.limits, self._options["prompt_lookup_num_tokens"]
        max_tokens = limits.prompt_length + limits.max_new_tokens + window - 2
        if limits.positions is not None and max_tokens > limits.positions:
            excess = max_tokens - limits.positions
            raise UserError(
                f"prompt lookup of transformers drafts {window} tokens however little room is left,"
                f" so it may read {max_tokens} of the {limits.positions} that"
                f" {model_label(self._target)} reads; lower decoding.max_new_tokens by {excess},"
                " or use policy=prompt_lookup"
            )
        return super().decode(request, trace)


class StopStringCriteria(StoppingCriteria):
    """Ends each row of `generate` with the token that completes a stop string, found as by our own
    loops.

    prompt_width: the place of the first new token in every row. Transformers' own `stop_strings`
    compares pieces of the vocabulary, which miss characters of several tokens.
    """

    def __init__(self, requests: Sequence[Request], prompt_width: int) -> None:
        self._requests, self._prompt_width = requests, prompt_width
        self._texts = [list(request.source.prompt) for request in requests]

    def __call__(
        self, input_ids: Int[Tensor, "rows n"], scores: Any, **options: Any
    ) -> Bool[Tensor, " rows"]:
        for place, row in enumerate(input_ids[:, self._prompt_width :].tolist()):
            text, limits = self._texts[place], self._requests[place].limits
            seen = len(text) - limits.prompt_length
            if not limits.ended(text):
                self._texts[place] = limits.append(text, row[seen:])
        ended = [
            request.limits.ended(text)
            for request, text in zip(self._requests, self._texts, strict=True)
        ]
        return torch.tensor(ended, device=input_ids.device)


def stopping_options(requests: Sequence[Request], prompt_width: int) -> dict[str, Any]:
    """The option of `generate` that ends texts at their stop strings; none without them."""
    if all(request.limits.stop is None for request in requests):
        return {}
    return {"stopping_criteria": StoppingCriteriaList([StopStringCriteria(requests, prompt_width)])}


class UnknownTokenMask(LogitsProcessor):
    """−inf for ids without a token.

    width: of the target's scores, which a drafter's become too: `generate` compares them. unknown:
    the ids.
    """

    def __init__(self, width: int, unknown: Sequence[int], device: torch.device) -> None:
        self._bias = torch.zeros(width, device=device)
        self._bias[list(unknown)] = float("-inf")

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        missing = self._bias.shape[0] - scores.shape[-1]
        if missing:
            scores = pad(scores, (0, missing), value=float("-inf"))  # a negative number cuts
        return scores + self._bias


def unknown_token_masks(
    target: HuggingFaceModel, draft: LoadedModel | None = None
) -> LogitsProcessorList:
    """What keeps ids without a token from being chosen; nothing if all have one, and scores of a
    drafter one width.
    """
    checkpoint = target.checkpoint
    if not checkpoint.ids_without_token and (
        draft is None or draft.checkpoint.columns == checkpoint.columns
    ):
        return LogitsProcessorList()
    return LogitsProcessorList(
        [UnknownTokenMask(checkpoint.columns, checkpoint.ids_without_token, target.device)]
    )


@contextmanager
def with_target_sizes(target: PreTrainedModel, draft: PreTrainedModel) -> Iterator[None]:
    """While inside, the drafter's configuration names the target's vocabulary size, and its
    decoder's depth alone.

    transformers 5.23 takes models of two sizes for models of two tokenizers, and models padded to
    two sizes have one. And it sizes the drafter's cache by the depth of its encoder.
    """
    config, vocab_size = draft.config.get_text_config(), target.config.get_text_config().vocab_size
    drafter_sizes = config.vocab_size, config.num_hidden_layers
    config.vocab_size, config.num_hidden_layers = vocab_size, decoder_depth(draft.config)
    try:
        yield
    finally:
        config.vocab_size, config.num_hidden_layers = drafter_sizes


def generate(
    target: HuggingFaceModel,
    requests: Sequence[Request],
    processors: LogitsProcessorList | None = None,
    **options: Any,
) -> list[list[int]]:
    """Call `generate` for one or several prompts, padded to one length; it ends when the last text ends.
    A module that reads the padding decodes prompts of several lengths one after the other.

    Returns each prompt and its continuation, cut by its limits. processors: what scores pass before
    the requests' own; None: those of `unknown_token_masks`. Raises UserError for several texts that
    are sampled, whose draws would depend on the batch, or whose scores are processed.
    """
    sources = [request.source for request in requests]
    if len(requests) > 1:
        for request in requests:
            require_plain(request.sampling, request.source.processors is not None)
        if len({source.length for source in sources}) > 1 and target.reads_padding:
            warn_once(
                f"{model_label(target)} gives other texts in a padded batch, as its modules read the"
                " padding; prompts of several lengths are decoded one after the other"
            )
            return [generate(target, [request], processors, **options)[0] for request in requests]
    # 1. the settings of the longest text: without these the checkpoint's own would apply
    longest = max(requests, key=lambda request: request.limits.max_new_tokens)
    settings = plain_generation_config(target, longest)
    module = with_settings(target.module, settings)
    # 2. the prompts, and what the scores pass
    inputs, prompt_width = padded_inputs(target, sources, settings.pad_token_id)
    options |= inputs
    processors = unknown_token_masks(target) if processors is None else processors
    if processors := LogitsProcessorList([*processors, *(sources[0].processors or ())]):
        options["logits_processor"] = processors
    options |= stopping_options(requests, prompt_width)
    # 3. the texts
    # a text that is sampled is alone in its batch
    with drawing_from(longest.generator, target.device):
        texts = module.generate(**options).tolist()
    return [
        request.limits.append(list(request.source.prompt), text[prompt_width:])
        for request, text in zip(requests, texts, strict=True)
    ]


def padded_inputs(
    target: HuggingFaceModel, sources: Sequence[Source], pad_token: int
) -> tuple[dict[str, Any], int]:
    """The options of `generate` for prompts that are padded to one length, and the place of the
    first new token in every row.
    """
    inputs: dict[str, Any] = {}
    if target.checkpoint.encoder_decoder:
        rows, side = [source.encoder_ids[0] for source in sources], "right"
        prompts = torch.tensor([source.prompt for source in sources], device=target.device)
        inputs = {"decoder_input_ids": prompts, **cache_option(target)}
        prompt_width = prompts.shape[1]
    else:
        rows, side = [torch.tensor(source.prompt) for source in sources], "left"
        prompt_width = max(map(len, rows))
    pad_rows = partial(pad_sequence, batch_first=True, padding_side=side)
    inputs["input_ids"] = pad_rows(rows, padding_value=pad_token).to(target.device)
    inputs["attention_mask"] = pad_rows([torch.ones_like(row) for row in rows]).to(target.device)
    return inputs, prompt_width


@contextmanager
def drawing_from(generator: torch.Generator | None, device: torch.device) -> Iterator[None]:
    """Inside the block the global generator, from which `generate` draws, begins with the seed of
    this one; afterwards it is as before. None: nothing is drawn.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices, enabled=generator is not None):
        if generator is not None:
            torch.manual_seed(generator.initial_seed())
        yield


def require_plain(sampling: Sampling, processed: bool) -> None:
    """Raise UserError for a batch of `generate` that is sampled, or whose scores are processed."""
    if not sampling.greedy or processed:
        raise UserError(
            "batched generate decodes greedily and without processors here; set decoding=greedy "
            "decoding.processors=none, or runtime.batch=1"
        )


def cache_option(target: HuggingFaceModel) -> dict[str, EncoderDecoderCache]:
    """A cache for an encoder–decoder of two depths."""
    if target.depth == target.checkpoint.config.get_text_config().num_hidden_layers:
        return {}
    return cache_of_its_own(target.module)


def plain_generation_config(target: HuggingFaceModel, request: Request) -> GenerationConfig:
    """Only the request's settings.

    What else the checkpoint says counts where the request has processors of it.
    """
    sampling, limits = request.sampling, request.limits
    sampling_options: dict[str, Any] = {"do_sample": False}
    if not sampling.greedy:
        sampling_options = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or 0,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        }
    end = sorted(limits.end_tokens)
    return GenerationConfig(
        max_new_tokens=limits.max_new_tokens,
        eos_token_id=end or None,
        pad_token_id=padding_token(target.checkpoint, end),
        # `generate` puts another start token before a prompt
        decoder_start_token_id=(
            request.source.prompt[0] if target.checkpoint.encoder_decoder else None
        ),
        use_cache=True,
        **sampling_options,
    )


def padding_token(checkpoint: Checkpoint, end: Sequence[int]) -> int:
    """What `generate` writes beside shorter texts of a batch, which nothing reads.

    The checkpoint's own token, unless it has no embedding: −1, or one that was added to the
    tokenizer alone. Then the first of the end tokens, or 0.
    """
    pad = checkpoint.generation.pad_token_id
    if isinstance(pad, int) and 0 <= pad < min(checkpoint.rows, checkpoint.source_rows):
        return pad
    return end[0] if end else 0


def require_cache(what: str, model: LoadedModel) -> None:
    """Raise UserError for a model whose state cannot go back to an earlier token."""
    if model.checkpoint.weightless()._is_stateful:
        raise UserError(
            f"{what} of transformers needs a model with a key-value cache, got {model_label(model)}; "
            "use policy=hf_generate, or policy=speculative or prompt_lookup, which save states"
        )


def model_label(model: LoadedModel) -> str:
    return f"{model.checkpoint.path} ({model.checkpoint.config.model_type})"
