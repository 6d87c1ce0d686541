"""A checkpoint that runs on our own decoders."""

from __future__ import annotations

import copy
import weakref
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from bild_lab.engine.batch_scheduler import current_batch
from bild_lab.engine.models.cached_session import CachedSession
from bild_lab.engine.models.checkpoint.checkpoint import Prompt, quantization
from bild_lab.engine.models.checkpoint.vocabulary import head_bias
from bild_lab.engine.models.checkpoint.weights import Weights, file_weights, module_weights
from bild_lab.engine.models.hf.model import HuggingFaceModel
from bild_lab.engine.models.native import llama, t5
from bild_lab.engine.models.native.attention import KeyValueCache
from bild_lab.engine.models.native.compiled import Workspace, roomy
from bild_lab.engine.models.native.cpu import PackedDecoder
from bild_lab.engine.models.native.layers import SPARE_ROWS, Decoder, NativeLayers
from bild_lab.engine.models.native.packed_pass import KernelDecoder
from bild_lab.engine.models.native.quantized_matrix import for_pytorch, quantize_weights
from bild_lab.engine.models.native.side_by_side import Pool
from bild_lab.engine.models.native.stack import numbers_of
from bild_lab.engine.models.placed_rows import PlacedRows
from bild_lab.engine.models.processed_session import processed
from bild_lab.engine.request import Source
from bild_lab.engine.session import (
    DEFAULT_OPTIONS,
    DraftShape,
    OutputSpec,
    Prefix,
    Session,
    SessionOptions,
)


class NativeModel:
    """Our decoder for a checkpoint. The weights load at the first use of `decoder`.

    transformers: the same checkpoint as a module of Transformers, for methods that run that.
    compiled: run steps of fixed shape through torch.compile, and on a GPU as CUDA graphs. Each
        shape is compiled at its first use.
    graphs: on a GPU the same graphs of PyTorch's own kernels, which take no compiler; texts of a
        batch run without.
    kernels: run by our C++ on a CPU, by our Triton kernels on a GPU, which also draft a chain or a
        tree as one program.
    bits: of the weights, 8 or 4; gguf: a GGUF file's own blocks; None: those of the precision.
    """

    fused_drafting = True
    # rotations and relative positions have no end; those that change with the length do not run
    # here
    positions = session_positions = source_positions = None

    def __init__(
        self,
        transformers: HuggingFaceModel,
        compiled: bool = False,
        kernels: bool = False,
        bits: int | str | None = None,
        graphs: bool = False,
    ) -> None:
        self.transformers = transformers
        self.compiled = compiled
        self.kernels = kernels
        self.triton = kernels and transformers.device.type == "cuda"
        self.bits = bits
        self.graphs = graphs
        self.checkpoint = transformers.checkpoint
        self.device = transformers.device
        self.dtype = transformers.dtype
        self.engine = "kernels" if kernels else "native"
        self._workspace_steps = 0  # how many steps of workspaces were compiled so far
        self._free: list[Workspace] = []  # workspaces that no session uses

    @property
    def family(self) -> type[Decoder]:
        """What decodes this architecture, made of a module of Transformers."""
        return t5.T5Decoder if self.checkpoint.encoder_decoder else llama.LlamaDecoder

    @cached_property
    def decoder(self) -> Decoder:
        """For the kernels it holds no layers: what they pack is read layer by layer, and so is what
        is rounded.
        """
        module, weights = self._weights()
        decoder = self.family(module, weights, preload=not self._packs and self.bits is None)
        if not self._packs and self.bits is not None:
            self._quantize(decoder)
        decoder.head_bias = head_bias(self.checkpoint, self.dtype, self.device)
        return decoder

    @property
    def _rounded_for(self) -> tuple[bool, int | str] | None:
        """Whether Triton runs the decoder's matrices, and their bits; None where the decoder has the
        weights as they are read.
        """
        return None if self._packs or self.bits is None else (self.triton, self.bits)

    def _quantize(self, decoder: Decoder) -> None:
        """Have a decoder's matrices in this model's bits. Its layers are new ones."""
        rounded = partial(for_pytorch, bits=self.bits)
        if self.triton:  # which is not everywhere
            from bild_lab.engine.models.native.gpu.block_matrix import in_blocks

            rounded = partial(in_blocks, bits=self.bits, device=self.device, dtype=self.dtype)
        quantize_weights(decoder, rounded)
        if self.checkpoint.encoder_decoder:
            decoder.encoder = copy.copy(decoder.encoder)
            quantize_weights(decoder.encoder, rounded)

    def _weights(self) -> tuple[PreTrainedModel, Weights]:
        """The module of Transformers, on the meta device where weights are read from files, and its
        weights.
        """
        if (files := self.checkpoint.weight_files) is not None:
            module = self.checkpoint.weightless()
            if (weights := file_weights(files, module, self.dtype, self.device)) is not None:
                if not self._packs:
                    self.transformers.lent = weights
                if self.bits == "gguf":
                    weights.packed = self.checkpoint.kernel_blocks
                return module, weights
        module = self.checkpoint.weights(self.dtype).eval()
        return module, module_weights(module, self.dtype, self.device)

    @property
    def _packs(self) -> bool:
        """Whether kernels hold the weights in an order of their own, as those of a CPU do."""
        return self.kernels and not self.triton

    @cached_property
    def packed(self) -> KernelDecoder | None:
        """The decoder as kernels run it; None where PyTorch does."""
        if not self.kernels:
            return None
        if not self.triton:  # whose weights are as the decoder holds them
            return PackedDecoder(self.decoder, None if self.bits == "gguf" else self.bits)
        from bild_lab.engine.models.native.gpu import TritonDecoder  # Triton is not everywhere

        return TritonDecoder(self.decoder)

    @property
    def compiled_steps(self) -> int:
        """How many steps were compiled, or captured as graphs, so far: a timing during which it
        grew measured these.
        """
        packed = self.__dict__.get("packed")  # without loading it
        return self._workspace_steps + (0 if packed is None else packed.captures)

    @cached_property
    def packed_encoder(self) -> PackedDecoder | None:
        """The encoder's weights packed for the CPU kernels; None without an encoder."""
        encodes = self._packs and self.checkpoint.encoder_decoder
        return PackedDecoder(self.decoder.encoder, self.bits) if encodes else None

    @cached_property
    def _pool(self) -> Pool:
        """The caches of the texts of a batch."""
        return Pool(self.decoder.cache_shape, self.decoder.embedding.dtype, self.device)

    @property
    def pooled_bytes(self) -> int:
        """The memory of earlier batches' caches, which those of the next one lie in."""
        pool = self.__dict__.get("_pool")  # without making one
        return 0 if pool is None else pool.nbytes

    @property
    def depth(self) -> int:
        return self.checkpoint.depth

    def load(self) -> None:
        """Read the weights now rather than at the first decoding."""
        _ = self.decoder, self.packed, self.packed_encoder

    def admit(self, draft_shape: DraftShape) -> None:
        """Read the weights.

        The tests compare these decoders with Transformers, for every architecture they know.
        """
        self.load()

    def text_logits(self, text: Source, count: int | None = None) -> Float[Tensor, "n vocab"]:
        length = len(text.prompt)
        rows = length if count is None else min(count, length)
        output_spec = OutputSpec(logits=rows, prompt=True)
        return self.start(text, 1).extend([text.prompt[-1]], output_spec).logits

    def vocabulary_weights(self) -> tuple[Float[Tensor, "vocab dim"], Float[Tensor, "vocab dim"]]:
        return self.decoder.embedding[:], numbers_of(self.decoder.head, self.dtype)

    def scores_of_products(
        self, products: Float[Tensor, "*rows vocab"], tokens: Int[Tensor, " vocab"] | None = None
    ) -> Float[Tensor, "*rows vocab"]:
        return products

    def source(self, prompt: Prompt, max_tokens: int | None = None) -> Source:
        return self.transformers.source(prompt, max_tokens)

    def require_layers(self, what: str, at_once: bool = False, by_block: bool = False) -> None:
        """Nothing to check: every native decoder can run its layers and their blocks one by one."""

    def with_backend(self, **backend: Any) -> NativeModel:
        """A model of the same weights that another backend runs: in memory, unless these are rounded
        otherwise. backend: keywords of `NativeModel`; without any, PyTorch runs it.
        """
        model = NativeModel(self.transformers, **backend)
        if model._rounded_for == self._rounded_for:
            model.decoder = self.decoder
        elif self._rounded_for is None and "gguf" not in (self.bits, model.bits):
            model.decoder = copy.copy(self.decoder)
            model._quantize(model.decoder)
        return model

    def without_fused_drafting(self) -> NativeModel:
        """A model of the same weights and backend that drafts by one forward after another."""
        model = copy.copy(self)
        model.fused_drafting = False
        return model

    @torch.inference_mode()
    def start(
        self, source: Source, room: int, session_options: SessionOptions = DEFAULT_OPTIONS
    ) -> Session:
        batch = current_batch()
        prefix = session_options.prefix
        workspace = pool = None
        runs_in_steps = self.compiled or (self.graphs and batch is None)
        if runs_in_steps and prefix is None:
            workspace = self._workspace(len(source.prompt) + room + SPARE_ROWS, source)
        if batch is not None and not self.kernels:
            pool = self._pool
        layers = NativeLayers(
            self.decoder,
            source,
            room,
            prefix=prefix,
            workspace=workspace,
            packed=self.packed,
            packed_encoder=self.packed_encoder,
            batch=batch,
            pool=pool,
        )
        layers.fused_drafting = self.fused_drafting
        session = CachedSession(layers, source.prompt, session_options.forwards)
        if pool is not None:
            weakref.finalize(session, pool.give_back, layers.cache.place)
        if workspace is not None:
            weakref.finalize(session, self._free.append, workspace)
        return processed(session, source)

    @torch.inference_mode()
    def prompt_cache(self, embeddings: Float[Tensor, "p dim"]) -> Prefix:
        """Keys and values of a shallow prompt, [p, dim] embeddings: causal attention, no rotary
        positions.
        """
        decoder, (layers, heads, dim) = self.decoder, self.decoder.cache_shape
        count = embeddings.shape[0]
        cache = KeyValueCache((layers, heads, count, dim), embeddings.dtype, embeddings.device)
        nowhere = torch.zeros(count, dtype=torch.long, device=embeddings.device)
        among = torch.ones(count, count, dtype=torch.bool, device=embeddings.device).tril()
        rows = PlacedRows(slice(0, count), count, nowhere, among, key_positions=nowhere)
        decoder.run(embeddings, rows, cache, layers=range(layers))
        return Prefix(cache.keys, cache.values)

    def _workspace(self, capacity: int, source: Source) -> Workspace:
        """A workspace that no session uses.

        The last used that fits is reused, with its compiled steps.
        """
        length = source.encoder_length
        for workspace in reversed(self._free):
            if workspace.fits(capacity, length):
                self._free.remove(workspace)
                return workspace
        self._free.clear()  # all too small
        shape = roomy(capacity), roomy(length) if length else 0
        return Workspace(self.decoder, *shape, self._count_step, self.compiled)

    def _count_step(self) -> None:
        self._workspace_steps += 1


def why_not_native(config: PreTrainedConfig, dtype: torch.dtype) -> str | None:
    """Why a configuration cannot run natively in this precision, or None if it can."""
    if config.is_encoder_decoder and dtype == torch.float16:
        return "T5 overflows in float16 without the clamping that Transformers does"
    if (method := quantization(config)) is not None:
        return f"its weights are quantized ({method})"
    return (t5 if config.is_encoder_decoder else llama).why_not(config)
