"""No test of Weights & Biases finds an account or a server, unless it starts its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report.wandb.loopback_wandb import KEY, LoopbackWandb, loopback_wandb


@pytest.fixture(autouse=True)
def _no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "NETRC", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there


@pytest.fixture
def server(_no_account: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackWandb]:
    """A server on the loopback, and an account on it. The client knew another one before, and forgets this one."""
    import wandb

    with loopback_wandb() as served:
        monkeypatch.setenv("WANDB_BASE_URL", served.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        wandb.teardown()
        yield served
        wandb.teardown()
    assert served.unanswered == []
