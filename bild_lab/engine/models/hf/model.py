"""Any Hugging Face checkpoint, run with the modules of Transformers, on one device or spread over
several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from bild_lab.engine.models.cached_session import CachedSession
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint, Prompt, decoder_depth
from bild_lab.engine.models.checkpoint.hub import no_progress_bars
from bild_lab.engine.models.checkpoint.vocabulary import biased, head_bias
from bild_lab.engine.models.checkpoint.weights import Weights
from bild_lab.engine.models.device import require_float32, resolve_device
from bild_lab.engine.models.hf.admission import check, input_device, uncached_logits
from bild_lab.engine.models.hf.generation import reads_padding
from bild_lab.engine.models.hf.layer_control import (
    decoder_layers,
    logits_equal,
    wrap_blocks,
)
from bild_lab.engine.models.hf.module_layers import (
    NO_SINGLE_LAYERS,
    ModuleLayers,
    additive,
    cache_name,
)
from bild_lab.engine.models.hf.own_scores import scores_of_products
from bild_lab.engine.models.hf.positions import learned_positions, max_session_positions
from bild_lab.engine.models.hf.slot_cache import SlotCache
from bild_lab.engine.models.processed_session import processed
from bild_lab.engine.request import Source
from bild_lab.engine.session import (
    DEFAULT_OPTIONS,
    DraftShape,
    OutputSpec,
    Prefix,
    Rows,
    Session,
    SessionOptions,
    Skipped,
)
from bild_lab.errors import UserError, require_choice


@dataclass
class HuggingFaceModel:
    """A checkpoint on a device. The weights load at the first use of `module`.

    Everything that needs only the checkpoint's small files (vocabulary, end tokens, prompts)
    works before that, so that a mismatched pair fails before gigabytes are read.
    """

    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    engine: ClassVar[str] = "hf"
    bits: ClassVar[int | None] = None
    compiled: ClassVar[bool] = False
    compiled_steps: ClassVar[int] = 0
    # on each device, of a model that is spread over several
    parts: ClassVar[dict[str, int] | None] = None

    # weights of a decoder of ours, which the module then shares
    lent: Weights | None = field(default=None, init=False)
    # what policies require of the weights, once they are loaded
    _checks: list[Callable[[PreTrainedModel, str], None]] = field(default_factory=list, init=False)
    # what its sessions were checked for, and whether they must run one row at a time
    _admitted: DraftShape | None = field(default=None, init=False)
    _one_by_one: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        require_float32(self.dtype, self.device)

    @cached_property
    def module(self) -> PreTrainedModel:
        loaded = (
            self.checkpoint.weights(self.dtype)
            if self.lent is None
            else module_over(self.checkpoint, self.lent)
        )
        module = loaded.to(self.device).eval()
        self._check_weights(module)
        return module

    @cached_property
    def bias(self) -> Float[Tensor, " vocab"] | None:
        """What is added to the module's scores; None for nothing."""
        return head_bias(self.checkpoint, self.dtype, self.device)

    @property
    def transformers(self) -> HuggingFaceModel:
        """Itself: the model that runs the modules of Transformers."""
        return self

    @property
    def depth(self) -> int:
        return self.checkpoint.depth

    @cached_property
    def positions(self) -> int | None:
        outline = self._outline
        decoder = outline.get_decoder() if self.checkpoint.encoder_decoder else outline
        return learned_positions(decoder, self.checkpoint.config)

    @cached_property
    def session_positions(self) -> int | None:
        return max_session_positions(self._outline)

    @cached_property
    def source_positions(self) -> int | None:
        if not self.checkpoint.encoder_decoder:
            return None
        return learned_positions(self._outline.get_encoder(), self.checkpoint.config)

    @cached_property
    def reads_padding(self) -> bool:
        """Whether the texts of a padded batch of `generate` are others than alone."""
        return reads_padding(self.module, self.dtype)

    @property
    def _outline(self) -> PreTrainedModel:
        return vars(self).get("module") or self.checkpoint.weightless()

    def load(self) -> None:
        """Read the weights now rather than at the first decoding."""
        _ = self.module

    def admit(self, draft_shape: DraftShape) -> None:
        if self._admitted is not None and self._admitted >= draft_shape:
            return
        module = self.module
        outcome = check(
            module,
            draft_shape,
            lambda source, alone: open_session(module, source, one_by_one=alone),
        )
        if outcome is None:  # scores of NaN are looked for before a point is timed
            return
        if outcome.failed is not None:
            raise UserError(
                outcome.refusal(self.checkpoint.path, self.checkpoint.config.model_type)
            )
        self._admitted, self._one_by_one = draft_shape, outcome.one_by_one

    @torch.inference_mode()
    def text_logits(self, text: Source, count: int | None = None) -> Float[Tensor, "n vocab"]:
        return biased(uncached_logits(self.module, text, count), self.bias)

    def vocabulary_weights(self) -> tuple[Float[Tensor, "vocab dim"], Float[Tensor, "vocab dim"]]:
        ends = (self.module.get_input_embeddings(), self.module.get_output_embeddings())
        embedding, head = (module.weight.detach().to(self.device) for module in ends)
        return embedding, head

    def scores_of_products(
        self, products: Float[Tensor, "*rows vocab"], tokens: Int[Tensor, " vocab"] | None = None
    ) -> Float[Tensor, "*rows vocab"]:
        return scores_of_products(self.module, products, tokens)

    def require_layers(self, what: str, at_once: bool = False, by_block: bool = False) -> None:
        """Raise UserError unless the layers can be found; once weights are loaded, also check that
        they give the same.

        what: the method that needs them, for the message. at_once: in several forwards at a time.
        by_block: also without attention, and without feed-forward.
        """
        if not SlotCache(self.checkpoint.config).cuts:
            raise UserError(NO_SINGLE_LAYERS.format(self.checkpoint.config.model_type))
        if decoder_layers(self._outline) is None:
            raise UserError(
                f"{what} runs some of the target's layers, and those of {self.checkpoint.path}"
                f" ({self.checkpoint.config.model_type}) are not in one list; choose another policy"
                " or target"
            )
        self._require(require_same_by_layers)
        if by_block:
            self._require(require_same_by_blocks)

    def _check_weights(self, module: PreTrainedModel) -> None:
        """What policies require of the weights, as soon as they are loaded."""
        for check_weights in self._checks:
            check_weights(module, self.checkpoint.path)

    def _require(self, check_weights: Callable[[PreTrainedModel, str], None]) -> None:
        """Check the weights now, or as soon as they are loaded."""
        if "module" in vars(self):
            check_weights(self.module, self.checkpoint.path)
        elif check_weights not in self._checks:
            self._checks.append(check_weights)

    @torch.inference_mode()
    def start(
        self, source: Source, room: int, session_options: SessionOptions = DEFAULT_OPTIONS
    ) -> Session:
        session = open_session(self.module, source, session_options, self._one_by_one, self.bias)
        return processed(session, source)

    @torch.inference_mode()
    def prompt_cache(self, embeddings: Float[Tensor, "p dim"]) -> Prefix:
        """Keys and values of a shallow prompt, [p, dim] embeddings: causal attention, no rotary
        positions.
        """
        cache, count = DynamicCache(), embeddings.shape[0]
        among = torch.ones(count, count, dtype=torch.bool, device=embeddings.device).tril()
        self.module.base_model(
            inputs_embeds=embeddings[None],
            attention_mask=additive(among, embeddings.dtype)[None, None],
            position_ids=torch.zeros(1, count, dtype=torch.long, device=embeddings.device),
            **{cache_name(self.module): cache},
            use_cache=True,
        )
        # a spread model has layers on several devices
        keys = [layer.keys.to(embeddings.device) for layer in cache.layers]
        values = [layer.values.to(embeddings.device) for layer in cache.layers]
        return Prefix(torch.cat(keys), torch.cat(values))

    def source(self, prompt: Prompt, max_tokens: int | None = None) -> Source:
        """The prompt as token ids, with the special tokens of the checkpoint's tokenizer."""
        return self.checkpoint.source(prompt, max_tokens).to(self.device)


def open_session(
    module: PreTrainedModel,
    source: Source,
    session_options: SessionOptions = DEFAULT_OPTIONS,
    one_by_one: bool = False,
    bias: Float[Tensor, " vocab"] | None = None,
) -> CachedSession:
    """A session of a module, as in `Model.start` and `ModuleLayers`."""
    layers = ModuleLayers(module, source, session_options.prefix, one_by_one, bias)
    return CachedSession(layers, source.prompt, session_options.forwards)


def module_over(checkpoint: Checkpoint, weights: Weights) -> PreTrainedModel:
    """The checkpoint's module with these very tensors as its parameters; its buffers are on the
    CPU.
    """
    outline, dtype = checkpoint.weightless(), weights.dtype
    nothing = {
        name: torch.zeros((), dtype=dtype).expand(parameter.shape)
        for name, parameter in outline.state_dict().items()
    }
    with no_progress_bars():
        module = type(outline).from_pretrained(
            None, config=outline.config, state_dict=nothing, dtype=dtype
        )
    # tied names have one tensor there
    module.requires_grad_(False).load_state_dict(dict(weights), assign=True)
    return module


def require_same_by_layers(module: PreTrainedModel, name: str) -> None:
    """Raise UserError unless a few rows give the same logits in one forward and through two ranges
    of layers.
    """
    try:
        same = same_by_layers(module)
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception:  # whatever a module raises is its answer
        same = False
    if not same:
        raise UserError(
            f"the layers of {name} ({module.config.model_type}) do not give the same one by one as"
            " all together; choose a policy that does not run some of them"
        )


def same_by_layers(module: PreTrainedModel) -> bool:
    """Whether a few rows give the same logits in one forward and through two ranges of layers."""
    depth = decoder_depth(module.config)
    middle = depth // 2
    tokens, source = probe_tokens(module)
    expected = open_session(module, source).extend(tokens).logits
    session = open_session(module, source)
    first_layers = OutputSpec(layers=range(middle), hidden=(middle,), logits=0)
    (states,) = session.extend(tokens, first_layers).hidden
    if states.ndim != 2:  # a Gemma 3n has several states of a token
        return False
    last_layers = OutputSpec(layers=range(middle, depth))
    logits = session.extend(Rows(tokens, states=states), last_layers).logits
    return logits_equal(expected, logits)


def require_same_by_blocks(module: PreTrainedModel, name: str) -> None:
    """Raise UserError unless a layer without attention and feed-forward is one that does not run.

    Also runs every block once, after which its form is known.
    """
    if not wrap_blocks(module) or not same_by_blocks(module):
        raise UserError(
            f"attention and feed-forward of {name} ({module.config.model_type}) cannot be skipped"
            " apart; name whole layers in policy.skipped_layers"
        )


def same_by_blocks(module: PreTrainedModel) -> bool:
    """Whether a few rows give the same logits without a layer, and with that layer but without its
    blocks. The blocks of the module are wrapped.
    """
    layers, middle = range(decoder_depth(module.config)), decoder_depth(module.config) // 2
    tokens, source = probe_tokens(module)

    def logits(output_spec: OutputSpec) -> Tensor:
        return open_session(module, source).extend(tokens, output_spec).logits

    logits(OutputSpec())  # every block runs once
    without_layer = logits(OutputSpec(layers=[layer for layer in layers if layer != middle]))
    skipped = Skipped(attention=frozenset({middle}), feed_forward=frozenset({middle}))
    without_blocks = logits(OutputSpec(layers=layers, skipped=skipped))
    return logits_equal(without_layer, without_blocks)


def probe_tokens(module: PreTrainedModel) -> tuple[list[int], Source]:
    """A few tokens to run, and the source of a text that begins with the first."""
    vocabulary_size = module.config.get_text_config(decoder=True).vocab_size
    tokens = [token % vocabulary_size for token in (3, 5, 7, 11)]
    device = input_device(module)
    encoder_ids = None
    if module.config.is_encoder_decoder:
        encoder_ids = torch.tensor([tokens], device=device)
    return tokens, Source(tuple(tokens[:1]), encoder_ids, device)


DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def require_device_map(device_map: str | None, device: torch.device) -> None:
    """Raise UserError for an unknown map, and for a chosen device of tokens and drafters beside a
    map.
    """
    if device_map is None:
        return
    require_choice("runtime.device_map", device_map, (None, *DEVICE_MAPS))
    if device != resolve_device("auto"):
        raise UserError(
            "a target that is spread takes all devices that CUDA_VISIBLE_DEVICES names; "
            f"set runtime.device=auto, got {device}"
        )


@dataclass
class SpreadModel(HuggingFaceModel):
    """A checkpoint whose layers Accelerate distributes over GPUs, main memory and disk, in this
    order.

    device_map: one of DEVICE_MAPS, or the device of every part. Parts in memory or on disk are
    copied to `device` to run. Its layers run in one forward at a time, as Accelerate copies their
    inputs and weights around it.
    """

    device_map: str | dict[str, str | int] = "auto"

    @cached_property
    def module(self) -> PreTrainedModel:
        module = self.checkpoint.weights(self.dtype, device_map=self.device_map).eval()
        input_place = input_device(module)
        drafter_device = torch.empty(0, device=self.device).device
        if input_place != drafter_device:
            raise UserError(
                f"{self.checkpoint.path} takes its tokens on {input_place}, as no part of it found"
                f" room on {drafter_device}, where drafters lie; free that device, or leave it out"
                " of CUDA_VISIBLE_DEVICES"
            )
        self._check_weights(module)
        return module

    def vocabulary_weights(self) -> tuple[Float[Tensor, "vocab dim"], Float[Tensor, "vocab dim"]]:
        """Raises UserError if one of them is on disk or in memory only until it runs."""
        ends = (self.module.get_input_embeddings(), self.module.get_output_embeddings())
        if any(module.weight.is_meta for module in ends):
            self._refuse("this drafter reads the target's vocabulary matrices")
        return super().vocabulary_weights()

    def require_layers(self, what: str, at_once: bool = False, by_block: bool = False) -> None:
        if at_once:
            self._refuse(f"{what} runs the target's layers in several forwards at a time")
        super().require_layers(what, by_block=by_block)

    def _refuse(self, what: str) -> NoReturn:
        raise UserError(
            f"{what}, and {self.checkpoint.path} is spread over devices; leave out"
            " runtime.device_map"
        )

    @property
    def parts(self) -> dict[str, int]:
        """How many parts, mostly layers, are on each device, in memory (cpu) and on disk."""
        # GPUs are numbers there
        places = getattr(self.module, "hf_device_map", {"": self.device}).values()
        names = [f"cuda:{place}" if isinstance(place, int) else str(place) for place in places]
        return dict(Counter(names))
