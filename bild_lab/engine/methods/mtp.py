"""Multi-token prediction (DeepSeek-V3, DeepSeek-AI, 2024, §2.2): layers that a checkpoint brings along
after those of the model, as DeepSeek's, GLM's and Qwen3.5's do, draft.

Layer j reads, at each position, the output of layer j − 1 there and the token j + 1 places later.
Layer 0 reads the target's state after its final norm, as Transformers and vLLM pass it on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from bild_lab.engine.draft import Draft, Verdict, empty_draft
from bild_lab.engine.methods.state_layers import states_of_text
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.checkpoint.hub import no_progress_bars
from bild_lab.engine.models.checkpoint.vocabulary import biased, head_bias
from bild_lab.engine.models.checkpoint.weights import StoredWeights
from bild_lab.engine.models.hf.layer_control import Plan, following
from bild_lab.engine.models.hf.slot_cache import SlotCache
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Request
from bild_lab.engine.session import OutputSpec, Scores, Session, on_device
from bild_lab.engine.trace import Forward
from bild_lab.errors import UserError, first_line, require_whole
from bild_lab.files import FilePath

if TYPE_CHECKING:
    from transformers.modeling_layers import MtpModel

    from bild_lab.engine.session import LoadedModel

# how checkpoints name the layers: by themselves, or with numbers after those of the model
SEPARATE_LAYER = re.compile(r"^mtp\.(?:layers\.(\d+)\.)?")
NUMBERED_LAYER = re.compile(r"^(?:model\.)?(?:language_model\.)?layers\.(\d+)\.")
# copies of the target's embedding and head
SHARED = re.compile(r"(?:^|\.)(?:embed_tokens|shared_head\.head|lm_head)\.weight$")
# what a target and the checkpoint of the layers have in common
SIZES = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
REMEDY = (
    "choose a target that brings them along, or name a checkpoint of it that does in policy.heads;"
    " policy=eagle takes a layer that you train"
)


@dataclass(frozen=True)
class MtpHeads:
    """The layers of a checkpoint, and the target whose embedding and head they share."""

    model: MtpModel
    target: LoadedModel

    @cached_property
    def vocabulary(
        self,
    ) -> tuple[
        Float[Tensor, "vocab dim"], Float[Tensor, "vocab dim"], Float[Tensor, " vocab"] | None
    ]:
        """The embedding, the head, and −inf for ids without a token (`head_bias`). Loads the target's
        weights, so it is asked for before a text, not when the parts are checked.
        """
        target = self.target
        bias = head_bias(target.checkpoint, target.dtype, target.device)
        return *target.vocabulary_weights(), bias

    @property
    def config(self) -> PreTrainedConfig:
        return self.model.config

    @property
    def depth(self) -> int:
        """How many layers there are."""
        return len(self.model.layers)

    def run(
        self,
        layer: int,
        tokens: Int[Tensor, " m"],
        states: Float[Tensor, "m dim"],
        cache: SlotCache,
        start: int,
    ) -> Float[Tensor, "m dim"]:
        """The outputs of a layer, after its norm, for these rows.

        start: the slot of the first row in the cache, whose rows from there on are dropped. A row's
        position is that of its token.
        """
        embedding, _, _ = self.vocabulary
        position = start + layer + 1
        positions = torch.arange(position, position + len(tokens), device=tokens.device)
        with following(Plan(start=start)):
            outputs = self.model.forward_layer(
                layer,
                states[None],
                positions[None],
                cache,
                inputs_embeds=embedding[tokens][None],
            )
        return outputs[0]

    def most_likely(self, state: Float[Tensor, " dim"]) -> Int[Tensor, "1"]:
        """The token with the largest score after this state."""
        _, head, bias = self.vocabulary
        return biased(state[None] @ head.mT, bias).argmax(-1)


class MtpDrafter(Drafter):
    """A chain of tokens, one by each layer; a step beyond the last layer repeats it.

    The first round of a text drafts nothing: the states of the prompt come out of its verification.
    No token depends on a random number, so q is one-hot, and speculative sampling is lossless. A
    forward is recorded as one layer of the target's kind; the projection before it is not.
    heads: the layers. window: how many tokens are drafted at most. Raises UserError for a window
    below 1.
    """

    required_outputs = OutputSpec(head_input=True, prompt=True)

    def __init__(self, target: LoadedModel, heads: MtpHeads, window: int = 1) -> None:
        require_whole("policy.window", window, 1)
        self._target, self._heads, self._window = target, heads, window

    def prepare(self, request: Request) -> None:
        _ = self._heads.vocabulary  # made of blocks where weights are rounded

    def begin(self, request: Request, target: Session) -> None:
        self._request, self._forwards = request, target.forwards
        self._cache = SlotCache(self._heads.config)
        used = min(self._heads.depth, self._window)
        # for each layer: how many of its rows are those of committed tokens, and the states of
        # committed tokens that its next rows read
        self._lengths = [0] * used
        self._states: list[list[Tensor]] = [[] for _ in range(used)]

    @torch.inference_mode()
    def propose(self, tokens: list[int]) -> Draft:
        device = self._target.device
        count = min(self._window, self._request.limits.room(tokens))
        if not self._states[0]:
            return empty_draft(device)
        committed, last_layer = len(tokens), len(self._lengths) - 1
        text = on_device(tokens, device)
        outputs = None
        for step in range(count):
            if step <= last_layer:
                outputs = self._run_layer(step, text, outputs, committed)
            else:
                start = committed - 1 + step - last_layer - 1
                outputs = self._run(last_layer, text[-1:], outputs[-1:], start)
            text = torch.cat([text, self._heads.most_likely(outputs[-1])])
        return Draft(text[committed:], calls=count)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        self._states[0].append(states_of_text(scores.head_input, draft, verdict))

    def _run_layer(
        self,
        layer: int,
        text: Int[Tensor, " n"],
        outputs: Float[Tensor, "k dim"] | None,
        committed: int,
    ) -> Float[Tensor, "m dim"]:
        """Run all rows of a layer that are not those of committed tokens in its cache.

        A row is one of committed tokens if the token that it reads is; it stays. text: the
        committed tokens, and one that each layer before has drafted. outputs: of the layer before,
        for its last rows. Row i is the one at position i of the target.
        """
        start, stop = self._lengths[layer], committed - 1
        states = committed_states = torch.cat(self._states[layer])
        if missing := stop - start - len(states):  # states of drafted tokens
            states = torch.cat([states, outputs[-missing:]])
        result = self._run(layer, text[start + layer + 1 :], states, start)
        staying = max(stop - layer - start, 0)
        self._lengths[layer] += staying
        self._states[layer] = [committed_states[staying:]]
        if layer + 1 < len(self._states):
            self._states[layer + 1].append(result[:staying])
        return result

    def _run(
        self, layer: int, tokens: Int[Tensor, " m"], states: Float[Tensor, "m dim"], start: int
    ) -> Float[Tensor, "m dim"]:
        self._forwards.append(
            Forward(self._heads.config, rows=len(tokens), cached=start, scored=1, layers=1)
        )
        return self._heads.run(layer, tokens, states, self._cache, start)


def load_mtp(target: LoadedModel, path: FilePath | None = None) -> MtpHeads:
    """Load the layers of a checkpoint in the target's precision and on its device.

    path: the checkpoint, a folder or a hub id; None: the target's own. Raises UserError if it has
    none, or others than Transformers knows, and for an encoder–decoder.
    """
    checkpoint = target.checkpoint
    if checkpoint.encoder_decoder:
        raise UserError(f"policy mtp needs a decoder-only target, got {checkpoint.path}; {REMEDY}")
    source = checkpoint
    if path is not None:
        source = Checkpoint(str(path), trust_remote_code=checkpoint.trust_remote_code)
    _require_same_sizes(checkpoint, source)
    stored = source.weight_files
    if stored is None:
        raise UserError(
            f"{source.path} has no safetensors files, from which layers of multi-token prediction"
            f" are read; {REMEDY}"
        )
    names, depth = layer_names(stored, checkpoint.depth)
    if not names:
        raise UserError(f"{source.path} has no layers of multi-token prediction; {REMEDY}")
    model = _read_model(checkpoint, source, names, depth, target.dtype, target.device)
    _require_all_numbers(model, stored, names, source.path)
    return MtpHeads(model, target)


def _require_same_sizes(checkpoint: Checkpoint, source: Checkpoint) -> None:
    """Raise UserError unless the layers come from a checkpoint like the target's."""
    target_config = checkpoint.config.get_text_config(decoder=True)
    source_config = source.config.get_text_config(decoder=True)
    for name in SIZES:
        target_size, source_size = getattr(target_config, name), getattr(source_config, name)
        if source_size != target_size:
            raise UserError(
                f"the layers of {source.path} are for a model whose {name} is {source_size}, but"
                f" that of {checkpoint.path} is {target_size}; {REMEDY}"
            )


def layer_names(stored: StoredWeights, target_depth: int) -> tuple[list[str], int]:
    """The names of the layers' weights in a checkpoint's files, and how many layers there are.

    target_depth: how many layers the target has; those after them are the ones that draft.
    """
    names, layers = [], {-1}
    for name in stored.shapes:
        if separate := SEPARATE_LAYER.match(name):
            names.append(name)
            layers.add(int(separate[1] or 0))
        elif (numbered := NUMBERED_LAYER.match(name)) and int(numbered[1]) >= target_depth:
            names.append(name)
            layers.add(int(numbered[1]) - target_depth)
    return names, max(layers) + 1


def _read_model(
    checkpoint: Checkpoint,
    source: Checkpoint,
    names: Sequence[str],
    depth: int,
    dtype: torch.dtype,
    device: torch.device,
) -> MtpModel:
    """The layers as a module of Transformers, filled with these weights of a checkpoint's files."""
    # late: takes a while to load
    from transformers.modeling_layers import MtpModel

    outline = checkpoint.weightless()
    if type(outline.get_input_embeddings()) is not nn.Embedding:
        raise UserError(
            f"the embeddings of {checkpoint.path} ({checkpoint.config.model_type}) are no plain"
            f" table, so its layers of multi-token prediction cannot be run; {REMEDY}"
        )
    _describe_layers(outline.config, depth)
    outline.config.dtype = dtype
    outline.config.name_or_path = source.location if source.in_folder else str(source.files)
    # Transformers reads these patterns, and drops those with the number of a layer of the target
    outline._keys_to_ignore_on_load_unexpected = list(
        {r"^mtp\." if SEPARATE_LAYER.match(name) else rf"^{re.escape(name)}$" for name in names}
    )
    try:
        with no_progress_bars():
            model = MtpModel.from_pretrained(outline)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            f"transformers cannot read the layers of multi-token prediction of {source.path}"
            f" ({checkpoint.config.model_type}): {first_line(error)}; {REMEDY}"
        ) from error
    # these came from the outline, whose tensors hold no numbers of the checkpoint
    model.embed_tokens = model.shared_head = None
    if (rotary := getattr(outline.get_decoder(), "rotary_emb", None)) is not None:
        model.rotary_emb = type(rotary)(outline.config.get_text_config(decoder=True))
    return model.to(device).eval().requires_grad_(False)


def _describe_layers(config: PreTrainedConfig, depth: int) -> None:
    """Say in a configuration what Transformers reads of the layers, where the model's own does
    not, as Qwen3.5's.
    """
    text = config.get_text_config(decoder=True)
    text.num_mtp_layers = depth
    for kinds, kind in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
        if getattr(text, kinds, None) and not getattr(text, f"mtp_{kinds}", None):
            setattr(text, f"mtp_{kinds}", [kind] * depth)


def _require_all_numbers(
    model: PreTrainedModel, stored: StoredWeights, names: Iterable[str], path: str
) -> None:
    """Raise UserError unless the module has as many numbers as the files: whatever was left out
    would draft other tokens, and nobody would notice.
    """
    in_files = sum(
        torch.Size(stored.shapes[name]).numel() for name in names if not SHARED.search(name)
    )
    in_module = sum(weight.numel() for weight in model.state_dict().values())
    if in_files != in_module:
        raise UserError(
            f"the layers of multi-token prediction of {path} hold {in_files:,} numbers, and those"
            f" that transformers builds {in_module:,}; {REMEDY}"
        )
