"""Any Hugging Face checkpoint, causal or encoder–decoder, run with the modules of Transformers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedModel,
)

from bild_lab.engine.draft import Tree
from bild_lab.engine.models.cached_session import CachedSession, Pass
from bild_lab.engine.models.checkpoint import Checkpoint, decoder_depth
from bild_lab.engine.models.layer_control import (
    Plan,
    SlotCache,
    decoder_layers,
    following,
    logits_equal,
    sets_positions,
    wrap_layers,
)
from bild_lab.engine.models.ranks import ONE_PROCESS, Ranks
from bild_lab.engine.request import Source
from bild_lab.engine.session import Prefix, Rows, Scores, Session, Want
from bild_lab.engine.trace import Forward
from bild_lab.errors import UserError


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
    compiled: ClassVar[bool] = False
    compiled_steps: ClassVar[int] = 0
    ranks: ClassVar[Ranks] = ONE_PROCESS  # the processes that hold its weights
    parts: ClassVar[dict[str, int] | None] = None  # on each device, of a model that is spread over several

    layers_wanted: bool = field(default=False, init=False)  # whether a method runs only some layers

    @cached_property
    def module(self) -> PreTrainedModel:
        module = self.checkpoint.weights(self.dtype).to(self.device).eval()
        if self.layers_wanted:
            require_same_by_layers(module, self.checkpoint.path)
        return module

    @property
    def transformers(self) -> HuggingFaceModel:
        """Itself: the model that runs the modules of Transformers."""
        return self

    @property
    def depth(self) -> int:
        return self.checkpoint.depth

    def load(self) -> None:
        """Read the weights now rather than at the first decoding."""
        _ = self.module

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work, in all processes that hold a part of the model."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.ranks.wait()

    def require_layers(self, what: str) -> None:
        """Raise UserError unless the layers can be found; once weights are loaded, also check that they give the same.

        what: the method that needs them, for the message.
        """
        self.layers_wanted = True
        if "module" in vars(self):
            require_same_by_layers(self.module, self.checkpoint.path)
        elif decoder_layers(weightless(self.checkpoint)) is None:
            raise UserError(
                f"{what} runs some of the target's layers, and those of {self.checkpoint.path} "
                f"({self.checkpoint.config.model_type}) are not in one list; choose another policy or target"
            )

    @torch.inference_mode()
    def start(
        self,
        source: Source,
        room: int,
        forwards: list[Forward] | None = None,
        target: Session | None = None,
        prefix: Prefix | None = None,
    ) -> CachedSession:
        layers = ModuleLayers(self.module, source, prefix)
        return CachedSession(layers, source.prompt, [] if forwards is None else forwards)

    @torch.inference_mode()
    def prompt_cache(self, embeddings: Float[Tensor, "p dim"]) -> Prefix:
        """Keys and values of a shallow prompt, [p, dim] embeddings: causal attention, no rotary positions."""
        cache, count = DynamicCache(), embeddings.shape[0]
        among = torch.ones(count, count, dtype=torch.bool, device=embeddings.device).tril()
        self.module.base_model(
            inputs_embeds=embeddings[None],
            attention_mask=additive(among, embeddings.dtype)[None, None],
            position_ids=torch.zeros(1, count, dtype=torch.long, device=embeddings.device),
            past_key_values=cache,
            use_cache=True,
        )
        parts = ([getattr(layer, name).to(embeddings.device) for layer in cache.layers] for name in ("keys", "values"))
        keys, values = (torch.cat(part) for part in parts)
        return Prefix(keys, values)

    def source(self, prompt: str, max_tokens: int | None = None) -> Source:
        """The prompt as token ids, with the special tokens of the checkpoint's tokenizer."""
        return self.checkpoint.source(prompt, max_tokens).to(self.device)


class ModuleLayers:
    """A module's decoder layers and the KV cache of one sequence. A prefix fills the cache's first slots."""

    longest_joined = None

    def __init__(self, module: PreTrainedModel, source: Source, prefix: Prefix | None = None) -> None:
        self.module, self.config = module, module.config
        self.device, self.depth = input_device(module), decoder_depth(module.config)
        self.reserved = 0 if prefix is None else prefix.length
        self.source = 0 if source.encoder_ids is None else source.encoder_ids.shape[1]
        self._prefix = prefix
        self._encoded: dict[str, Any] = {}
        self._cache = SlotCache()
        self._past: SlotCache | EncoderDecoderCache = self._cache
        self._ids_name = "input_ids"
        if source.encoder_ids is not None:
            self._past = EncoderDecoderCache(self._cache, DynamicCache())
            self._ids_name = "decoder_input_ids"
            self._encoded["encoder_outputs"] = module.get_encoder()(input_ids=source.encoder_ids, return_dict=True)
        with following(Plan(start=0)):
            for layer in range(0 if self.reserved == 0 else prefix.keys.shape[0]):
                self._cache.update(prefix.keys[None, layer], prefix.values[None, layer], layer)
        self._keeps_logits = "logits_to_keep" in inspect.signature(module.forward).parameters
        wrap_layers(module)

    def run(self, work: Pass) -> Scores:
        tree = work.tree
        if tree is None and self.reserved:  # a chain needs a mask too, to hide the prefix
            tree = Tree(torch.arange(-1, work.count - 1, device=work.tokens.device))
        plan = Plan(work.start, work.layers, work.states, work.hidden, work.fill, stop=not work.logits)
        inputs = {} if tree is None else self._placed(tree, work, plan)
        reads_head = head_input(self.module) if work.head_input else nullcontext([])
        logits = None
        with reads_head as read, following(plan):
            logits = self.module(
                **self._tokens(work.tokens),
                **self._encoded,
                **inputs,
                **({"logits_to_keep": work.logits} if self._keeps_logits and work.logits else {}),
                past_key_values=self._past,
                use_cache=True,
            ).logits
        hidden = tuple(plan.outputs[depth].to(self.device) for depth in work.hidden)
        if not work.logits:
            return Scores(None, hidden=hidden)
        logits = logits[0, -work.logits :]
        read_there = read[0][0, -work.logits :].to(logits.device) if read else None
        return Scores(logits, read_there, hidden)

    def draft(self, start: int, tokens: Sequence[int], chain: Chain) -> None:
        """Transformers has no program for a chain."""

    def grow(self, start: int, tokens: Sequence[int], growth: Growth) -> None:
        """Nor for a tree."""

    def scored(self, work: Pass) -> int:
        """Some models of Transformers run their head for all rows."""
        return work.logits if self._keeps_logits or not work.logits else work.count

    def gather(self, start: int, rows: Sequence[int], layers: Sequence[int] | None = None) -> None:
        taken = torch.tensor([*range(start), *(start + row for row in rows)], device=self.device)
        for layer in self._cache.layers if layers is None else [self._cache.layers[index] for index in layers]:
            taken = taken.to(layer.keys.device)  # a spread model has layers on several devices
            layer.keys = layer.keys.index_select(-2, taken)
            layer.values = layer.values.index_select(-2, taken)

    def _tokens(self, fed: Int[Tensor, " m"]) -> dict[str, Tensor]:
        """The module's inputs: token ids, or embeddings if the prefix has masks (ids beyond the vocabulary)."""
        if self._prefix is None or self._prefix.masks is None:
            return {self._ids_name: fed[None]}
        look_up = self.module.get_input_embeddings()
        return {"inputs_embeds": self._prefix.embed(fed, look_up.num_embeddings, look_up)[None]}

    def _placed(self, tree: Tree, work: Pass, plan: Plan) -> dict[str, Any]:
        """Mask and positions: every row attends to the text and its own ancestors, at its logical position."""
        module, start, device = self.module, work.start, work.tokens.device
        root = start + work.count - len(tree)  # the slot of the tree's first row
        behind = root - self.reserved + tree.depths
        positions = behind[-work.count :]  # [m]
        keys = torch.cat([torch.arange(-self.reserved, root - self.reserved, device=device), behind])
        visible = torch.ones(work.count, start + work.count, dtype=torch.bool, device=device)
        visible[:, root:] = tree.ancestors[-work.count :]
        if self.reserved:
            probe = self._prefix.probe(work.tokens, module.get_input_embeddings().num_embeddings)
            visible[:, : self.reserved] = False if probe is None else probe[:, None]
        if not module.config.is_encoder_decoder:
            return {"attention_mask": masks_by_kind(module, visible, positions, keys), "position_ids": positions[None]}
        if not sets_positions(module):
            raise UserError(
                f"tree drafts need a T5, mT5 or decoder-only target, got {module.config.model_type}; "
                "use a chain drafter"
            )
        plan.distances = keys[None, :] - positions[:, None]
        return {"decoder_attention_mask": additive(visible, module.dtype)[None, None]}


def masks_by_kind(
    module: PreTrainedModel, visible: Bool[Tensor, "m n"], positions: Int[Tensor, " m"], keys: Int[Tensor, " n"]
) -> Tensor | dict[str, Tensor]:
    """The additive mask of a tree, [1 1 m n]; one for each kind of layer if some have sliding-window attention.

    Raises UserError for kinds of attention that tree drafts do not support.
    """
    config = module.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or []))
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise UserError(
            f"tree drafts need full or sliding attention, got a {config.model_type} with {', '.join(sorted(unknown))}; "
            "use a chain drafter"
        )
    whole = additive(visible, module.dtype)[None, None]
    if window is None or kinds == ["full_attention"] or getattr(config, "use_sliding_window", True) is False:
        return whole
    near = (positions[:, None] - keys < window) | (keys < 0)  # a prefix has no position
    narrow = additive(visible & near, module.dtype)[None, None]
    if "full_attention" not in kinds:
        return narrow
    return {"full_attention": whole, "sliding_attention": narrow}


def weightless(checkpoint: Checkpoint) -> PreTrainedModel:
    """The checkpoint's architecture on the meta device, without weights, for checks before they load."""
    auto = AutoModelForSeq2SeqLM if checkpoint.encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(copy.deepcopy(checkpoint.config), dtype=torch.bfloat16)


def require_same_by_layers(module: PreTrainedModel, name: str) -> None:
    """Raise UserError unless a few rows give the same logits in one forward and through two ranges of layers."""
    tokens = [token % module.config.get_text_config(decoder=True).vocab_size for token in (3, 5, 7, 11)]
    encoder_ids = torch.tensor([tokens], device=input_device(module)) if module.config.is_encoder_decoder else None
    source = Source(tuple(tokens[:1]), encoder_ids, input_device(module))
    layers, middle = decoder_depth(module.config), decoder_depth(module.config) // 2
    whole = CachedSession(ModuleLayers(module, source), source.prompt, []).extend(tokens).logits
    session = CachedSession(ModuleLayers(module, source), source.prompt, [])
    states = session.extend(tokens, Want(layers=range(middle), hidden=(middle,), logits=0)).hidden[0]
    parts = session.extend(Rows(tokens, states=states), Want(layers=range(middle, layers))).logits
    if not logits_equal(whole, parts):
        raise UserError(
            f"the layers of {name} ({module.config.model_type}) do not give the same one by one as all together; "
            "choose a policy that does not run some of them"
        )


def input_device(module: PreTrainedModel) -> torch.device:
    """The device of a model's tokens and logits. Weights of a spread model may be elsewhere, or on disk."""
    hook = getattr(module, "_hf_hook", None)  # of Accelerate
    return module.device if hook is None else torch.empty(0, device=hook.execution_device).device


def additive(visible: Bool[Tensor, "m n"], dtype: torch.dtype) -> Float[Tensor, "m n"]:
    """The mask as a term added to attention scores. A boolean 4-D mask is silently wrong with eager attention."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)


@contextmanager
def head_input(module: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Collect the head's inputs in the forwards inside, [1, m, dim] each; nothing if the model has no head."""
    read: list[Tensor] = []
    head = module.get_output_embeddings()
    hook = None if head is None else head.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    try:
        yield read
    finally:
        if hook is not None:
            hook.remove()
