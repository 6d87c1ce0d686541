"""Our own Triton kernels for one forward pass on a GPU."""

from bild_lab.engine.models.native.gpu.decoder import TritonDecoder
