"""The models of a process: decoders of the same files share one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any
from weakref import WeakValueDictionary

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.session import LoadedModel

KEPT = 4  # models that stay for a sweep's next point, such as two pairs


class SharedModels:
    """Gives one model for the same arguments and unchanged files, as long as somebody has it.

    read: makes a model; its first argument is the checkpoint's path. The last few models stay
    without anybody who has them: the points of a sweep have theirs one after the other.
    """

    def __init__(self, read: Callable[..., LoadedModel]) -> None:
        self._read = read
        self._models: WeakValueDictionary[Any, LoadedModel] = WeakValueDictionary()
        self._kept: deque[LoadedModel] = deque(maxlen=KEPT)
        self._lock = RLock()  # two threads would read the same weights twice

    def __call__(self, path: str, *arguments: Any, **options: Any) -> LoadedModel:
        """The model of this checkpoint. Arguments: as those of the function that makes it."""
        # a training may have written other weights to the same place
        key = (path, *arguments, *sorted(options.items()), Checkpoint(path).file_stamps())
        with self._lock:
            model = self._models.get(key)
            if model is None:
                model = self._models[key] = self._read(path, *arguments, **options)
            other_models = [kept_model for kept_model in self._kept if kept_model is not model]
            self._kept = deque([*other_models, model], KEPT)
            return model

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """After the block only the models that it asked for stay without anybody who has them."""
        with self._lock:
            earlier, self._kept = self._kept, deque(maxlen=KEPT)
        try:
            yield
        except BaseException:
            self._kept = earlier
            raise

    def release(self) -> None:
        """Let every model go that nobody has."""
        with self._lock:
            self._kept.clear()

    def cache_clear(self) -> None:
        """Forget all models: the next ones are read anew, also where somebody still has them."""
        with self._lock:
            self._models.clear()
            self._kept.clear()
