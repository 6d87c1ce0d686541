"""The structures of `structures.h` for ctypes, read from that file: there is one declaration of
each.
"""

from __future__ import annotations

import re
from ctypes import Structure, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

HEADER = Path(__file__).with_name("structures.h")
NUMBERS = {"int32_t": c_int32, "int64_t": c_int64, "float": c_float, "double": c_double}
# such as `const float *cos, *sin`: type, pointer, names
DECLARATION = re.compile(r"(?:const )?(\w+)(\*?) (.+)")


def declared(header: str) -> list[type[Structure]]:
    """The structures of a header, in order.

    A field is a number, a pointer, or one of the structures before it.
    """
    structures: dict[str, type[Structure]] = {}
    for name, body in re.findall(
        r"struct (\w+) \{(.*?)\};", re.sub(r"//.*", "", header), re.DOTALL
    ):
        fields = []
        for declaration in filter(None, (" ".join(line.split()) for line in body.split(";"))):
            kind, pointer, names = DECLARATION.fullmatch(declaration).groups()
            for field in names.split(", "):
                is_pointer = pointer or field.startswith("*")
                fields.append(
                    (field.lstrip("*"), c_void_p if is_pointer else (NUMBERS | structures)[kind])
                )
        structures[name] = type(name, (Structure,), {"_fields_": fields})
    return list(structures.values())


Matrix, Layer, Model, SequenceSlice, ForwardPass, ChainDraft, TreeDraft, Heads, Markov = declared(
    HEADER.read_text(encoding="utf-8")
)
