"""What a training changes for the whole process, and restores when it ends."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch
from accelerate.state import AcceleratorState
from transformers.utils import logging


@contextmanager
def isolated(seed: int, threads: int | None) -> Iterator[None]:
    """Seed the global generators and set PyTorch's threads (None: keep them) inside the block; restore both after it.

    Transformers' messages and progress bars are off inside the block, because they would disturb ours.
    """
    before, level, bars = torch.get_num_threads(), logging.get_verbosity(), logging.is_progress_bar_enabled()
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.set_num_threads(before if threads is None else threads)
            torch.manual_seed(seed)
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)  # or every later user of Accelerate gets bfloat16
        torch.set_num_threads(before)
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
