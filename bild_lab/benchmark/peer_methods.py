"""CTranslate2, OpenVINO and llama.cpp behind the protocol of a method, timed in the same harness as
ours.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from bild_lab.benchmark.peer_process import Worker, converted, package_versions
from bild_lab.engine.models.checkpoint.gguf_file import SUFFIX, GgufCheckpoint
from bild_lab.engine.models.checkpoint.vocabulary import same_vocabulary
from bild_lab.engine.models.device import dtype_name
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import LoadedModel
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError, require_choice, require_whole
from bild_lab.files import FilePath

log = logging.getLogger(__name__)

TRIALS = 3  # decodings with each of several settings; the quickest counts


class Peer:
    """Greedy decoding by another engine, in a process of its own that has as many threads as
    PyTorch has here.

    Outside the clock (`prepare`) the checkpoint is converted and loaded, and the process woken;
    inside are the decoding and one message each way, about a tenth of a millisecond. versions: of
    the engine's packages.
    cache: where converted checkpoints are kept, if not in the cache of bild_lab. Raises UserError
    without the environment of `make peers`, and for a device or a precision that the engine lacks.
    bits: of quantized weights, with which it is never called lossless; None: those of the
    precision.
    """

    engine: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    quantizers: ClassVar[tuple[str, ...]] = ()  # further packages, which round weights
    precisions: ClassVar[tuple[torch.dtype, ...]]
    known_bits: ClassVar[tuple[int, ...]] = ()
    # environment variables to try; the quickest stay
    settings: ClassVar[tuple[Mapping[str, str], ...]] = ({},)
    draft_shape: ClassVar[None] = None
    _draft: LoadedModel | None = None
    _window: int | None = None

    def __init__(
        self, target: LoadedModel, bits: int | None = None, cache: Path | None = None
    ) -> None:
        require_choice("policy.bits", bits, (*self.known_bits, None))
        self.bits = bits
        rounded_by = () if bits is None else self.quantizers
        self.versions = package_versions([*self.packages, *rounded_by])
        if target.device.type != "cpu":
            raise UserError(
                f"{self.engine} is run on a CPU, got {target.device}; set runtime.device=cpu"
            )
        if target.dtype not in self.precisions and (bits is None or target.dtype == torch.float16):
            known = " and ".join(map(dtype_name, self.precisions))
            raise UserError(
                f"{self.engine} computes in {known} on a CPU, got {dtype_name(target.dtype)}; set"
                " runtime.dtype=float32"
            )
        self._target, self._cache = target, cache
        self._worker: Worker | None = None
        self._threads = 0

    def lossless(self, sampling: Sampling) -> bool:
        return sampling.greedy and self.bits is None

    def prepare(self, request: Request) -> None:
        if (
            self._worker is None
            or not self._worker.alive
            or self._threads != torch.get_num_threads()
        ):
            self._worker, self._threads = None, torch.get_num_threads()
            self._worker = self._quickest(request)
        self._worker.wake()

    def decode(self, request: Request, trace: Trace) -> list[int]:
        self.prepare(request)
        return request.limits.append(
            request.source.prompt, self._worker.decode(worker_request(request))
        )

    @property
    def precision(self) -> str:
        """The precision of the weights that it decodes with, such as float32 or int8."""
        return dtype_name(self._target.dtype) if self.bits is None else f"int{self.bits}"

    @property
    def emission_s(self) -> list[float]:
        """After how many seconds each new token of the last text was there; of most engines all at
        the end.
        """
        return self._worker.seconds

    def pause(self) -> None:
        """Stop the process until the next request."""
        if self._worker is not None and self._worker.alive:
            self._worker.stop()

    def close(self) -> None:
        """End the process. The next request starts another."""
        if self._worker is not None:
            self._worker.close()

    def cpu_seconds(self) -> float:
        return 0.0 if self._worker is None else self._worker.cpu_seconds()

    def _quickest(self, request: Request) -> Worker:
        """A process with the settings that decode this request in the least time; the others
        end.
        """
        workers = [Worker(self._job(), variables) for variables in self.settings]
        if len(workers) == 1:
            return workers[0]
        times = [
            min(decoding_s(worker, worker_request(request)) for _ in range(TRIALS))
            for worker in workers
        ]
        best = times.index(min(times))
        log.info(
            "%s decodes with %s here: %s s",
            self.engine,
            self.settings[best] or "its own settings",
            times,
        )
        for place, worker in enumerate(workers):
            if place != best:
                worker.close()
        return workers[best]

    def _job(self) -> dict[str, Any]:
        model, draft = self._files()
        return {
            "engine": self.engine,
            "encoder_decoder": self._target.checkpoint.encoder_decoder,
            "model": str(model),
            "draft": None if draft is None else str(draft),
            "window": self._window,
            "dtype": dtype_name(self._target.dtype),
            "bits": self.bits,
            "threads": self._threads,
        }

    def _files(self) -> tuple[Path, Path | None]:
        """The folder or file of the target, and that of the drafter if there is one."""
        options = {"versions": self.versions, "cache": self._cache, "bits": self.bits}
        convert = partial(converted, engine=self.engine, **options)
        return convert(self._target.checkpoint), (
            None if self._draft is None else convert(self._draft.checkpoint)
        )


class CTranslate2(Peer):
    """CTranslate2: greedy search of its Translator or Generator, in float32, its only exact
    precision on a CPU.

    bits: 8, which rounds activations too. On Intel's processors it multiplies by MKL, with whose
    threads it can be several times as slow as with oneDNN's, so both are tried.
    """

    engine = "ctranslate2"
    packages = ("ctranslate2", "transformers")
    precisions = (torch.float32,)
    known_bits = (8,)
    settings = ({}, {"CT2_USE_MKL": "0"})


class OpenVINO(Peer):
    """OpenVINO: GenAI's pipeline; an encoder–decoder, for which GenAI has none, in Transformers'
    loop (Optimum).

    bits: 8 or 4, by NNCF without data: 4 bits by groups of 128, the first and the last layer in 8.
    Activations and the cache are then rounded to 8 bits, as OpenVINO does unless asked otherwise.
    """

    engine = "openvino"
    packages = ("openvino", "openvino-genai", "optimum-intel", "transformers")
    precisions = (torch.float32, torch.bfloat16)
    known_bits = (8, 4)
    quantizers = ("nncf",)


class OpenVINOSpeculative(OpenVINO):
    """Speculative decoding of OpenVINO GenAI, for decoder-only models.

    window: how many tokens are drafted in a round.
    """

    def __init__(
        self, target: LoadedModel, draft: LoadedModel, window: int, cache: Path | None = None
    ) -> None:
        require_whole("the draft window", window, 1)
        super().__init__(target, cache=cache)
        if target.checkpoint.encoder_decoder:
            raise UserError(
                "OpenVINO decodes speculatively with decoder-only models, got"
                f" {target.checkpoint.path} ({target.checkpoint.config.model_type}); use"
                " policy=openvino"
            )
        if not same_vocabulary(target.checkpoint, draft.checkpoint):
            raise UserError(
                f"OpenVINO decodes speculatively with one vocabulary, got {target.checkpoint.path}"
                f" and {draft.checkpoint.path}; use policy=speculative"
            )
        self._draft, self._window = draft, window


class LlamaCpp(Peer):
    """llama.cpp by llama-cpp-python: greedy decoding from a GGUF file of the target, at the
    precision of that file.

    file: the GGUF file; None: the target's own, where pair.target is one. Our token ids go in and
    come out. It is never called lossless: its weights are mostly quantized, and it rounds
    activations too. Its drafting is that of llama-server (`policy=server`). Raises UserError for an
    encoder–decoder, without a file, and for a file of another vocabulary.
    """

    engine = "llama_cpp"
    reads_gguf_blocks: ClassVar[bool] = True
    packages = ("llama_cpp_python",)
    # the baseline's precisions: its own is the file's
    precisions = (torch.float32, torch.bfloat16, torch.float16)
    precision = ""
    _positions = 4096  # tokens for which its cache has room

    def __init__(self, target: LoadedModel, file: FilePath | None = None) -> None:
        super().__init__(target)
        if target.checkpoint.encoder_decoder:
            raise UserError(
                f"llama.cpp runs decoder-only models here, got {target.checkpoint.path} "
                f"({target.checkpoint.config.model_type}); use policy=ctranslate2"
            )
        self._file, self.precision = _gguf(file or target.checkpoint.path, target)

    def lossless(self, sampling: Sampling) -> bool:
        return False

    def prepare(self, request: Request) -> None:
        needed = request.max_length
        if needed > self._positions:
            self.close()  # a cache cannot grow
            self._positions = 1 << (needed - 1).bit_length()
        super().prepare(request)

    def _job(self) -> dict[str, Any]:
        return super()._job() | {"positions": self._positions}

    def _files(self) -> tuple[Path, Path | None]:
        return self._file, None


def _gguf(file: str, target: LoadedModel) -> tuple[Path, str]:
    """A GGUF file and its precision.

    Raises UserError if it is none, or has another vocabulary than the target.
    """
    path, checkpoint = Path(file).expanduser().resolve(), target.checkpoint
    if path.suffix != SUFFIX:
        raise UserError(
            f"llama.cpp reads a GGUF file, got {file}; set policy.file=FILE.gguf or give one in the"
            " pair"
        )
    if isinstance(checkpoint, GgufCheckpoint) and file == checkpoint.path:
        gguf_checkpoint = checkpoint
    else:
        changed_ns = path.stat().st_mtime_ns if path.is_file() else 0
        gguf_checkpoint = _gguf_checkpoint(path, changed_ns)
    pieces = {token: piece for piece, token in gguf_checkpoint.vocabulary.items()}
    differing = [
        (token, piece)
        for piece, token in checkpoint.vocabulary.items()
        if pieces.get(token, piece) != piece
    ]
    if differing:
        token, piece = min(differing)
        raise UserError(
            f"{file} has another vocabulary than {checkpoint.path}, as token {token} is"
            f" {pieces[token]!r} in the file and {piece!r} in the checkpoint; set policy.file to a"
            " file of the same model"
        )
    return path, gguf_checkpoint.precision


@lru_cache(maxsize=4)
def _gguf_checkpoint(path: Path, changed_ns: int) -> GgufCheckpoint:
    """The file, whose vocabulary takes seconds to build."""
    return GgufCheckpoint(str(path))


def worker_request(request: Request) -> dict[str, Any]:
    """A request in the words of `peer_worker.py`."""
    source, limits = request.source, request.limits
    return {
        "encoder": None if source.encoder_ids is None else source.encoder_ids[0].tolist(),
        "prompt": list(source.prompt),
        "most": limits.max_new_tokens,
        "end": sorted(limits.end_tokens),
    }


def decoding_s(worker: Worker, question: dict[str, Any]) -> float:
    """How long a process takes to decode this, once it is awake."""
    worker.wake()
    started = time.perf_counter()
    worker.decode(question)
    return time.perf_counter() - started
