"""CUDA graphs of forwards, a bounded number of them; without a GPU the kernels run one by one."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
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
        self._last: Callable[[], Any] = lambda: None
        self._loaded: set[Hashable] = set()
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self.made = 0  # so far

    def run(self, key: Hashable, make: Callable[[], Sequence[Callable[[], Any]]]) -> None:
        """Run the launches of this key. make: gives them, at their first use."""
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = self._prepared(make())
            self.made += 1
            if len(self._runs) > self._max_graphs:
                self._runs.popitem(last=False)
        else:
            self._runs.move_to_end(key)
        self._last = run
        run()

    def rerun_last(self) -> None:
        """Run the launches of the last key again, on what lies in the tables."""
        self._last()

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
            self._prepare(launch)
        pool, stream = self._capture_memory()
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), without_garbage_collection():
            # threads that run another model may allocate meanwhile
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                run_all()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)

        def replay() -> None:
            graph.replay()

        replay.launches = launches  # the memory whose addresses the graph has
        return replay

    def _capture_memory(self) -> tuple[Any, torch.cuda.Stream]:
        """The pool of what PyTorch's operators need in a graph, and the stream of all captures.

        One graph runs at a time, so all share this memory. PyTorch gives it out again in the stream
        alone that it was given out in, and refuses a pool whose graphs are all gone.
        """
        if not self._runs:
            self._pool = torch.cuda.graph_pool_handle()
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        return self._pool, self._stream

    def _prepare(self, launch: Callable[[], Any]) -> None:
        """Load what a launch needs, as a capture can neither compile nor load.

        A kernel of ours is compiled and not run, as it may count steps. PyTorch's operators only
        fill buffers, so they run.
        """
        if not isinstance(launch, Launch):
            launch()
        elif (binary := launch.binary) not in self._loaded:
            kernel, grid = launch.kernel, launch.grid
            compiled = kernel.warmup(*launch.values, grid=grid, **launch.constants)
            _ = compiled.run  # loads it onto the GPU
            self._loaded.add(binary)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """A capture breaks if the memory of an earlier graph is freed in it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
