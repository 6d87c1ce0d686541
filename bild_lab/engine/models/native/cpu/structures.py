"""The structures of `structures.h` for ctypes. Those of the compiled kernels are compared with these at load."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import Structure, c_double, c_float, c_int32, c_int64, c_void_p

NORMS = "norm head_norm out_norm cross_norm feed_norm feed_out_norm"
MATRICES = "qkv out cross_query cross_out inner outer"


def fields(kind: type, names: str) -> tuple[tuple[str, type], ...]:
    """Fields of one type, in order."""
    return tuple((name, kind) for name in names.split())


class Matrix(Structure):
    _fields_ = (*fields(c_void_p, "packed bias"), *fields(c_int32, "outputs inputs"))


class Layer(Structure):
    _fields_ = (*fields(c_void_p, NORMS), *fields(Matrix, MATRICES), *fields(c_int32, "window kind"))


class Model(Structure):
    _fields_ = (
        *fields(
            c_int32, "dim heads kv_heads head_dim hidden vocab half activation gated rotary farthest bidirectional"
        ),
        *fields(c_float, "epsilon scale final_scale embedding_scale"),
        *fields(c_void_p, "layer final_norm"),
        *fields(Matrix, "head"),
        *fields(c_void_p, "embedding distance_bias"),
    )


class Text(Structure):
    _fields_ = (
        *fields(c_int32, "count start reserved source scored tree"),
        *fields(c_int64, "capacity"),
        *fields(c_void_p, "parents keys values memory_keys memory_values"),
        *fields(c_void_p, "visible positions key_positions"),  # these and `first` are made by the kernels
        *fields(c_int32, "first"),
    )


class Pass(Structure):
    _fields_ = (
        *fields(c_int32, "texts layers threads fill"),
        *fields(c_void_p, "text tokens states masks"),
        *fields(c_int64, "first_mask"),
        *fields(c_void_p, "layer skipped cos sin"),
        *fields(c_int64, "table"),
        *fields(c_void_p, "hidden head_input logits before ran"),
        *fields(c_double, "bar"),
        *fields(c_int32, "count scored"),  # these and the following are made by the kernels
        *fields(c_void_p, "text_of scored_row"),
    )


class Chain(Structure):
    _fields_ = (
        *fields(c_int32, "steps stops end_count forwards drafted fallback rows"),
        *fields(c_double, "threshold"),
        *fields(c_float, "temperature"),
        *fields(c_void_p, "ends uniforms tokens confidences probs own_probs states"),
    )


class Growth(Structure):
    _fields_ = (
        *fields(c_int32, "nodes depth width children end_count prunes grown forwards"),
        *fields(c_double, "prune_confidence min_prob"),
        *fields(c_float, "temperature"),
        *fields(c_void_p, "ends tokens parents rows counts"),
    )


class Heads(Structure):
    _fields_ = (*fields(c_int32, "dim vocab half layers shared"), *fields(c_void_p, "blocks outputs"))


STRUCTURES = (Matrix, Layer, Model, Text, Pass, Chain, Growth, Heads)


class LayoutError(Exception):
    """A structure is not the same in C++ and in Python."""


def layout() -> Iterator[tuple[str, int]]:
    """The offset and the size of every field and the size of every structure: as C++ writes it, and its value here."""
    for structure in STRUCTURES:
        name = structure.__name__
        for field, *_ in structure._fields_:
            place = getattr(structure, field)
            yield f"offsetof({name}, {field})", place.offset
            yield f"sizeof({name}::{field})", place.size
        yield f"sizeof({name})", ctypes.sizeof(structure)


def layout_source() -> str:
    """C++ that exports the same values as the compiler sees them."""
    return f'#include <cstddef>\nextern "C" const int64_t layout[] = {{{", ".join(each for each, _ in layout())}}};\n'


def check_layout(kernels: ctypes.CDLL) -> None:
    """Raise LayoutError, which names structure and field, unless the kernels were compiled with these structures."""
    values = list(layout())
    for (what, here), there in zip(values, (c_int64 * len(values)).in_dll(kernels, "layout"), strict=True):
        if here != there:
            raise LayoutError(f"{what} is {there} in structures.h and {here} in structures.py; make them the same")
