"""CUDA graphs of forwards, a bounded number of them; without a GPU the kernels run one by one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

MAX_GRAPHS = 96


class GraphCache:
    """Runs lists of launches, as one CUDA graph each on a GPU.

    All graphs share the buffers of one model, so one of them runs at a time. The least recently
    used graph goes when there are too many.
    """

    def __init__(self, device: torch.device, max_graphs: int = MAX_GRAPHS) -> None:
        self._captures = device.type == "cuda"
        self._max_graphs = max_graphs
        self._runs: OrderedDict[Hashable, Callable[[], Any]] = OrderedDict()
        self.made = 0  # so far

    def run(self, key: Hashable, make: Callable[[], Sequence[Callable[[], Any]]]) -> None:
        """Run the launches of this key. make: gives them, at their first use."""
        if key in self._runs:
            self._runs.move_to_end(key)
        else:
            self._runs[key] = self._prepared(make())
            self.made += 1
            if len(self._runs) > self._max_graphs:
                self._runs.popitem(last=False)
        self._runs[key]()

    def clear(self) -> None:
        """Forget all graphs, as memory that they read has moved."""
        self._runs.clear()

    def _prepared(self, launches: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
        def run_all() -> None:
            for launch in launches:
                launch()

        if not self._captures:
            return run_all
        compile_kernels(launches)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.graph(graph, stream=stream):
            run_all()
        torch.cuda.current_stream().wait_stream(stream)

        def replay() -> None:
            graph.replay()

        replay.launches = launches  # a graph has addresses alone
        return replay


def compile_kernels(launches: Sequence[Callable[[], Any]]) -> None:
    """Compile what these launches need, and run nothing: a capture must not compile."""
    for launch in launches:
        if hasattr(launch, "kernel"):
            launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.constants)
