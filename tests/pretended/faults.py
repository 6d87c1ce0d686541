"""What CUDA would refuse, or would do wrongly without a word."""


class CudaFault(RuntimeError):
    """An operation that fails on CUDA, or that gives wrong values there."""
