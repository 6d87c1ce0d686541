"""Our own Triton kernels for one forward pass on a GPU."""

import os
import re

import triton

from bild_lab.engine.models.native.gpu.decoder import TritonDecoder

# the first that lets matrix units which read memory by themselves (compute capability 9 to 11) wait
# for what threads copied there (triton#10537)
SAFE_TRITON = (3, 7, 1)

if tuple(map(int, re.findall(r"\d+", triton.__version__)[:3])) < SAFE_TRITON:
    # products go to the units that read registers, as at compute capability 8; Triton compiles anew
    os.environ |= {"DISABLE_MMA_V3": "1", "DISABLE_MMA_V5": "1"}
