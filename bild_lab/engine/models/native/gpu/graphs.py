"""CUDA graphs of forwards, a bounded number of them; without a GPU the kernels run one by one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bild_lab.engine.models.native.gpu.plan import Launch

MAX_GRAPHS = 96


class GraphCache:
    """Runs lists of launches, as one CUDA graph each on a GPU.

    All graphs share the buffers of one model, so one of them runs at a time. The least recently
    used graph goes when there are too many. captures: False runs the kernels one by one.
    """

    def __init__(self, device: torch.device, max_graphs: int = MAX_GRAPHS) -> None:
        self.captures = device.type == "cuda"
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

    def rerun_last(self) -> None:
        """Run the launches of the last key again, on what lies in the tables."""
        next(reversed(self._runs.values()))()

    def clear(self) -> None:
        """Forget all graphs, as memory that they read has moved."""
        self._runs.clear()

    def _prepared(self, launches: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
        def run_all() -> None:
            for launch in launches:
                launch()

        if not self.captures:
            return run_all
        for launch in launches:
            prepare(launch)
        # as `torch.cuda.graph` does, which also collects garbage and waits for the device
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin()
            try:
                run_all()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return Replay(graph, launches)


@dataclass(frozen=True)
class Replay:
    """Replays a graph. launches: with the memory whose addresses the graph has."""

    graph: torch.cuda.CUDAGraph
    launches: Sequence[Callable[[], Any]]

    def __call__(self) -> None:
        self.graph.replay()


def prepare(launch: Callable[[], Any]) -> None:
    """Load what a launch needs, as a capture can neither compile nor load.

    A kernel of ours is compiled and not run, as it may count steps. PyTorch's operators only fill
    buffers, so they run.
    """
    if not isinstance(launch, Launch):
        launch()
        return
    compiled = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.constants)
    _ = compiled.run  # loads the kernel onto the GPU
