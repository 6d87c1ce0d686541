"""llama-server itself, started by the policy, on a tiny file in float32.

LLAMA_SERVER names its program; without it, the one on the path.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.measure.runner import run_point
from bild_lab.lab.point.prepare import prepare
from bild_lab.lab.store.records import Sweep
from tests.engine.models.gguf_files import tiny, write

PROGRAM = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="llama-server is not here: set LLAMA_SERVER=FILE"),
]
PROMPTS = ["w5 w9 w12", "w7 w8 w7 w8", "w21 w5 w6"]


DRAFTING = {  # of the whole model itself, and of what followed the last token before
    "draft-simple": "--spec-type draft-simple -md {file} --spec-draft-n-max 3",
    "ngram-simple": (
        "--spec-type ngram-simple --spec-ngram-simple-size-n 1 --spec-ngram-simple-size-m 2"
    ),
}


@pytest.mark.parametrize("kind", DRAFTING)
def test_its_texts_are_the_targets_own_and_it_tells_of_its_drafting(
    kind: str, tmp_path: Path
) -> None:
    file = write(tiny("qwen2"), tmp_path / "tiny.gguf", **{"general.file_type": 0})
    data = tmp_path / "test.jsonl"
    data.write_text("".join(json.dumps({"de": prompt, "en": "w7"}) + "\n" for prompt in PROMPTS))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = (
        f"{PROGRAM} -m {file} --port {port} -c 256 --no-warmup -t 1 -np 1"
        f" {DRAFTING[kind].format(file=file)}"
    )
    point = prepare(
        compose_config(
            [
                "policy=server",
                f"policy.url=http://127.0.0.1:{port}/v1",
                f"policy.launch='{command}'",
                f"pair.target={file}",
                "pair.draft=null",
                "dataset=multi30k",
                f"dataset.path={data}",
                "runtime.dtype=float32",
                "decoding.max_new_tokens=24",
                "measure.certify=true",
            ]
        )
    )
    result = run_point(point, Sweep(tmp_path / "sweep"))
    assert result.certificate.defects == 0 and result.streamed.errors == 0
    assert result.counts.drafted > 0
    assert kind == "ngram-simple" or result.counts.accepted_share > 0.9  # it drafts for itself
    assert (result.folder / "method_server.log").read_text()
