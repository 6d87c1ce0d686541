"""An engine of a few lines in place of the real ones: it answers with what it was told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bild_lab.benchmark import peer_process as process

# the real protocol, with an engine that needs no packages: token 666 kills it, token 13 is an
# error; it is slow where CT2_USE_MKL is what SLOW says
ENGINE = f"""
import importlib.util, json, os, sys, time
spec = importlib.util.spec_from_file_location("worker", {str(process.SCRIPT)!r})
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)

def load(job):
    if job["model"] == "broken":
        raise ValueError("no such layers")
    print("a library prints this while it loads")
    def decode(request):
        print("and this while it decodes")
        if os.environ.get("CT2_USE_MKL", "1") == os.environ.get("SLOW"):
            time.sleep(0.1)
        if 666 in request["prompt"]:
            print("first words", file=sys.stderr)
            print("Illegal instruction", file=sys.stderr, flush=True)
            os._exit(7)
        if 13 in request["prompt"]:
            raise ValueError("13 brings bad luck")
        return [job["threads"], *request["prompt"]][: request["most"]]
    return decode

def convert(job):
    if "unknown" in job["source"]:
        raise ValueError("unknown architecture")
    os.makedirs(job["folder"])
    open(os.path.join(job["folder"], "model"), "w").write(job["source"])

for engine in ("ctranslate2", "openvino", "llama_cpp"):
    worker.CONVERT[engine] = convert
    worker.LOAD[engine, True] = worker.LOAD[engine, False] = load
worker.main()
"""
VERSIONS = {"openvino": "1.0"}


def run_fake_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Workers run the fake engine in this Python, and convert into a cache of their own.

    Returns the cache.
    """
    script = tmp_path / "fake.py"
    script.write_text(ENGINE)
    monkeypatch.setattr(process, "SCRIPT", script)
    monkeypatch.setattr(process, "python", lambda: Path(sys.executable))
    monkeypatch.setattr(
        "bild_lab.benchmark.peer_methods.package_versions", lambda names: dict(VERSIONS)
    )
    monkeypatch.setenv("BILD_LAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "peers"


needs_peers = pytest.mark.skipif(
    (reason := process.why_no_peers()) is not None, reason=str(reason or "")
)
