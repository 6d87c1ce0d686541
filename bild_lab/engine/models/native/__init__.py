"""Our own decoders for the known architectures: T5 and mT5, and the Llama family."""

from bild_lab.engine.models.native.kernels import GPU_PRECISIONS, why_no_kernels
from bild_lab.engine.models.native.model import NativeModel, why_not_native
