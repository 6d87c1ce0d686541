"""Tiny models are fastest on one thread, and leave the other core to the other half of the tests."""

import torch

torch.set_num_threads(1)
