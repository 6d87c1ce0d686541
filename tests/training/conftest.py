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
