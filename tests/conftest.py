"""Fixtures that several test modules share."""

from pathlib import Path

import pytest
import torch

from tests.checkpoints import write_checkpoints, write_data

torch.set_num_threads(1)  # fastest for tiny models, and leaves the other core to the other half of the tests


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))
