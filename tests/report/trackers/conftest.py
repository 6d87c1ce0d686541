"""No test of Weights & Biases finds an account or a server."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("API_KEY", "MODE", "DIR", "PROJECT", "ENTITY", "SWEEP_ID"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    for name in ("HOME", "NETRC", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
