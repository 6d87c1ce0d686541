"""Our own kernels for one forward pass on a CPU."""

from bild_lab.engine.models.native.cpu.library import why_no_kernels
from bild_lab.engine.models.native.cpu.packed import PackedDecoder, PackedHeads
