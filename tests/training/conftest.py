"""What all tests of trainings share."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="package")
def quick_collection() -> Iterator[None]:
    """Every training collects garbage once, which takes longer than the tests' models train."""
    gc.collect()
    gc.freeze()  # what is there by now, modules above all, need not be looked at again
    yield
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that train or generate for seconds each are slow."""
    long = {"test_align.py", "test_calibration.py", "test_finetune.py", "test_trainer.py"}
    for item in items:
        if item.path.name in long and item.path.parent.name == "training":
            item.add_marker(pytest.mark.slow)
