"""The Triton kernels on a CPU, by Triton's interpreter: in float32 and float16, at tiny sizes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import pytest
from transformers import PreTrainedModel

from bild_lab.engine.models.cached_session import CachedSession
from bild_lab.engine.models.native import NativeModel
from bild_lab.engine.models.native.layers import Decoder, NativeLayers
from bild_lab.engine.request import Source
from bild_lab.engine.session import Prefix
from tests.policies import in_memory
from tests.triton_races import MemoryWatch, watch_memory

if TYPE_CHECKING:
    from bild_lab.engine.models.native.gpu.tilings import Tiling

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed: pip install triton"
)


@contextmanager
def tilings(tiling: Tiling, head_tiling: Tiling | None = None) -> Iterator[None]:
    """All products are cut by this tiling; those of normed heads by `head_tiling`."""
    from bild_lab.engine.models.native.gpu import plan

    def tiling_of(
        product: str,
        inputs: int,
        outputs: int,
        capability: tuple[int, int],
        head_dim: int | None = None,
    ) -> Tiling:
        if head_dim is not None:
            return head_tiling or plan_tiling(product, inputs, outputs, capability, head_dim)
        return tiling._replace(split=1) if product == "score" else tiling

    plan_tiling = plan.tiling_of
    plan.tiling_of = tiling_of
    try:
        yield
    finally:
        plan.tiling_of = plan_tiling


@contextmanager
def interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton's interpreter, faster, and with matrix products whose numbers do not depend on where a
    row stands, as NumPy's do.
    """
    import triton
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from bild_lab.engine.models.native.gpu.tilings import streaming

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        return TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    # it replaces Triton's language anew at each call of a function, which is half of its time
    patch_language, scopes, patched = interpreter._patch_lang, {}, set()

    def patch_once(function):
        if function in patched:
            return interpreter._LangPatchScope()
        patched.add(function)
        modules = {id(value) for value in function.__globals__.values() if inspect.ismodule(value)}
        languages = tuple(modules & {id(triton.language), id(triton.language.core)})
        if languages not in scopes:
            scopes[languages] = patch_language(function)
        return interpreter._LangPatchScope()

    # integers of tiny models do not overflow, and to check that is another third
    without_checks = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", without_checks)

    numpy_dtype_of, numpy_dtypes = interpreter._get_np_dtype, {}

    def known_numpy_dtype(dtype):
        name = dtype.scalar.name
        if name not in numpy_dtypes:
            numpy_dtypes[name] = numpy_dtype_of(dtype)
        return numpy_dtypes[name]

    monkeypatch.setattr(interpreter, "_get_np_dtype", known_numpy_dtype)
    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    with tilings(streaming(64, 32, 1, 4, 2)):  # few large programs, by whose number its time is
        yield
    for scope in reversed(scopes.values()):
        scope.restore()


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryWatch]:
    """Kernels are interpreted. Whatever a test is about, accesses to memory must have an order."""
    with interpreted_kernels(monkeypatch), watch_memory() as watch:
        yield watch
    assert not watch.conflicts, "\n".join(watch.conflicts)


def triton_session(
    decoder: Decoder,
    source: Source,
    room: int,
    prefix: Prefix | None = None,
    like: CachedSession | None = None,
) -> CachedSession:
    """A session by the Triton kernels. like: one of the same decoder, whose kernels run it too."""
    from bild_lab.engine.models.native.gpu import TritonDecoder

    packed = TritonDecoder(decoder) if like is None else like.layers.packed
    layers = NativeLayers(decoder, source, room, prefix, None, packed)
    return CachedSession(layers, source.prompt)


def triton_model(module: PreTrainedModel) -> NativeModel:
    """A module in memory that the Triton kernels run."""
    model = in_memory(copy.deepcopy(module), "kernels")
    model.triton = True
    return model
