"""A pretended GPU: tensors that say they are on CUDA and hold their values in the CPU's memory.

See `machine`.
"""

from tests.pretended.gpu import pretended_gpu
from tests.pretended.machine import CudaFault, Machine, Wait
from tests.pretended.node import Node, pretended_node

__all__ = ["CudaFault", "Machine", "Node", "Wait", "pretended_gpu", "pretended_node"]
