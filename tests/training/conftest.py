"""Fixtures of all tests of trainings."""

from pathlib import Path

import pytest

from tests.tiny import save, tiny_llama, tiny_t5
from tests.training.targets import ending


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each family."""
    folder = tmp_path_factory.mktemp("targets")
    save(ending(tiny_t5(6), 4), folder / "t5")
    save(ending(tiny_llama(1), 2), folder / "llama")
    return folder
