"""A batch that notes what runs together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

from bild_lab.engine.batch_scheduler import Batch, PendingOp


class NotingBatch(Batch):
    """group_sizes: of every operation that ran, its key and how many texts took part."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.group_sizes: list[tuple[Hashable, int]] = []

    def wait(self, operation: PendingOp) -> Any:
        return super().wait(replace(operation, run=self._noting(operation.key, operation.run)))

    def _noting(
        self, key: Hashable, run: Callable[[list[Any]], Sequence[Any]]
    ) -> Callable[[list[Any]], Sequence[Any]]:
        def noting(inputs: list[Any]) -> Sequence[Any]:
            self.group_sizes.append((key, len(inputs)))
            return run(inputs)

        return noting
