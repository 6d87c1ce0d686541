"""The arms of the benchmark: the methods that are compared on one model."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bild_lab.engine.acceptance import ExactMatch, SpeculativeSampling
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.drafters import ModelDrafter, NoDraft
from bild_lab.engine.hf_generation import HuggingFaceAssisted, HuggingFaceGenerate
from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.engine.models.hf import HuggingFaceModel
from bild_lab.engine.models.native import NativeModel, why_no_kernels
from bild_lab.engine.peers import CTranslate2, OpenVINO, OpenVINOSpeculative
from bild_lab.engine.peers.environment import why_no_peers
from bild_lab.engine.peers.methods import Peer
from bild_lab.engine.protocols import Method
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.errors import UserError
from bild_lab.lab.measure.bench.shapes import SHAPES, SyntheticCheckpoint, save

log = logging.getLogger(__name__)

WINDOW = 5
Models = tuple[NativeModel, HuggingFaceModel]


@dataclass(frozen=True)
class Bench:
    """The arms of one shape, ready to run, and the texts that each decodes."""

    shape: str
    native: NativeModel
    requests: tuple[Request, ...]
    methods: dict[str, Method]
    kernels: NativeModel | None = None  # None where they cannot run

    def precision(self, arm: str) -> str:
        """In what the arm computes."""
        method = self.methods[arm]
        dtype = method.dtype if isinstance(method, Peer) else self.native.dtype
        return str(dtype).removeprefix("torch.")

    def close(self) -> None:
        """End the processes of peers."""
        for method in self.methods.values():
            if isinstance(method, Peer):
                method.close()


def prepare(
    shape: str,
    models: Models,
    drafts: Models | None,
    requests: tuple[Request, ...],
    peers: dict[str, Peer] | None = None,
) -> Bench:
    """The arms of a shape. Arms with a drafter are left out if it has none."""
    native, hf = models
    methods: dict[str, Method] = {
        "hf_generate": HuggingFaceGenerate(hf),
        "hf_loop": DraftThenVerify(hf, NoDraft(hf), ExactMatch()),
        "native": DraftThenVerify(native, NoDraft(native), ExactMatch()),
        "native_compiled": DraftThenVerify(compiled := native.as_compiled(), NoDraft(compiled), ExactMatch()),
    }
    kernels = native.by_kernels() if why_no_kernels(native.device, native.dtype) is None else None
    if kernels is not None:
        methods["kernels"] = DraftThenVerify(kernels, NoDraft(kernels), ExactMatch())
    if drafts is not None:
        native_draft, hf_draft = drafts
        try:
            methods["hf_assisted"] = HuggingFaceAssisted(hf, hf_draft, window=WINDOW)
            if hf.checkpoint.encoder_decoder:
                methods["hf_assisted_workaround"] = HuggingFaceAssisted(hf, hf_draft, decoder_mask=True, window=WINDOW)
        except UserError as error:  # another vocabulary
            log.warning("hf_assisted is left out: %s", error)
        drafter = ModelDrafter(native_draft, WINDOW)
        methods["native_speculative"] = DraftThenVerify(native, drafter, SpeculativeSampling())
        if native.device.type == "cuda":  # a window is one CUDA graph
            drafter = ModelDrafter(native_draft.as_compiled(), WINDOW)
            methods["native_compiled_speculative"] = DraftThenVerify(compiled, drafter, SpeculativeSampling())
        if kernels is not None:
            drafter = ModelDrafter(native_draft.by_kernels(), WINDOW)
            methods["kernels_speculative"] = DraftThenVerify(kernels, drafter, SpeculativeSampling())
    return Bench(shape, native, requests, methods | started(peers or {}, requests[0]), kernels)


def why_no_peer_arms(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why other engines are no arms here, or None if they can be."""
    if device.type != "cpu" or dtype not in OpenVINO.precisions:
        return "CTranslate2 and OpenVINO are arms on a CPU only, in float32 and bfloat16"
    return why_no_peers()


def peer_methods(
    target: Checkpoint, draft: Checkpoint | None, dtype: torch.dtype, cache: Path | None = None
) -> dict[str, Peer]:
    """The other engines for files on disk, each in the nearest precision that it has.

    cache: where they keep converted checkpoints; None: with those of all other commands.
    """
    device = torch.device("cpu")
    model, exact = HuggingFaceModel(target, device, dtype), HuggingFaceModel(target, device, torch.float32)
    methods: dict[str, Peer] = {"ctranslate2": CTranslate2(exact, cache), "openvino": OpenVINO(model, cache)}
    if draft is not None and not target.encoder_decoder:
        small = HuggingFaceModel(draft, device, dtype)
        methods["openvino_speculative"] = OpenVINOSpeculative(model, small, WINDOW, cache)
    return methods


def started(peers: dict[str, Peer], request: Request) -> dict[str, Peer]:
    """The peers that can run this model, with it loaded."""
    running = {}
    for arm, method in peers.items():
        try:
            method.prepare(request)
        except UserError as error:
            log.warning("%s is left out: %s", arm, error)
            continue
        method.pause()
        running[arm] = method
    return running


def synthetic_benches(
    device: torch.device, dtype: torch.dtype, shapes: Collection[str] = tuple(SHAPES), peers: bool = False
) -> Iterator[Bench]:
    """These synthetic shapes in turn. Large ones take gigabytes, so each pair is freed after its turn.

    peers: with other engines, which read files; these are removed after their turn.
    """
    models: dict[str, Models] = {}
    drafters = {SHAPES[name].drafter for name in shapes if name in SHAPES}
    for name, shape in SHAPES.items():
        if name not in shapes and name not in drafters:
            continue
        checkpoint = SyntheticCheckpoint(name, shape=shape.config())
        hf = HuggingFaceModel(checkpoint, device, dtype)
        models[name] = (NativeModel(hf), hf)
        if name in shapes:
            request = synthetic_request(checkpoint, shape.new_tokens, device)
            drafts = models.get(shape.drafter)
            with TemporaryDirectory() as folder:
                others = synthetic_peers(hf, drafts and drafts[1], Path(folder)) if peers else {}
                bench = prepare(name, models[name], drafts, (request,), others)
                try:
                    yield bench
                finally:
                    bench.close()
        if shape.drafter is not None:
            models.clear()


def synthetic_peers(target: HuggingFaceModel, draft: HuggingFaceModel | None, folder: Path) -> dict[str, Peer]:
    """The other engines for models in memory, by way of this folder."""
    saved = save(target.module, folder / "target")
    small = None if draft is None else save(draft.module, folder / "draft")
    return peer_methods(saved, small, target.dtype, folder)


def synthetic_request(checkpoint: Checkpoint, new_tokens: int, device: torch.device) -> Request:
    """A text of 24 made-up tokens, and where its continuation ends."""
    ids = torch.randint(3, 1000, (1, 24), generator=torch.Generator().manual_seed(0))
    source = Source((0,), ids) if checkpoint.encoder_decoder else Source(tuple(ids[0].tolist()))
    return Request(source.to(device), Limits(len(source.prompt), new_tokens))
