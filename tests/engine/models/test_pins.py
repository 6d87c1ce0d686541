"""Commits that are pinned: written by a hub on the loopback, read wherever no revision is named,
stated in results.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from bild_lab import files
from tests.lab.data.test_hub_datasets import jsonl
from tests.loopback_hub import (
    CONVERSION,
    commit_of,
    contents,
    loopback_hub,
    printed_in_a_fresh_process,
)

MODEL, DATA = "google-t5/t5-small", "EdinburghNLP/xsum"
WRITE = """
import sys
from pathlib import Path
from bild_lab import files
from scripts import paper_run
files.PINS = Path(sys.argv.pop())
try:
    paper_run.pin_named(sys.argv[1:])
except Exception as error:
    print(error)
"""
READ = """
import json, sys
from pathlib import Path
from bild_lab import files
files.PINS = Path(sys.argv[1])
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.point.prepare import prepare
words = [f"pair.target=me/model", "pair.draft=null", "policy=vanilla", "dataset=local", "dataset.hub_id=me/data"]
words += ["dataset.source_column=translation.de", "dataset.path=null"]
for more in ([], ["pair.target_revision=main", "dataset.hub_revision=main"]):
    point = prepare(compose_config([*words, *more]))
    source, facts = point.examples[0].source, point.facts
    print(json.dumps([point.setting["weights"], source, facts.get("pins"), facts["commits"]]))
"""


def test_none_is_pinned_that_no_hub_was_asked_for() -> None:
    assert yaml.safe_load(files.PINS.read_text()) == {"models": {}, "datasets": {}}


@pytest.mark.slow
def test_the_script_pins_what_experiments_read_and_names_what_the_hub_lacks(tmp_path: Path) -> None:
    kept = tmp_path / "pins.yaml"
    kept.write_text(
        "# why\nmodels: {}\ndatasets: {other/data: {revision: abc, date: '2026-01-01'}}\n"
    )
    served = {f"{DATA}@{CONVERSION}": {"default/test/0000.parquet": b""}}
    with loopback_hub(served, {MODEL: {"config.json": b"{}"}}) as endpoint:
        asked = [MODEL, DATA, "google-t5/t5-base", str(kept)]
        printed = printed_in_a_fresh_process(WRITE, endpoint, tmp_path, *asked)
        (unknown,) = printed_in_a_fresh_process(WRITE, endpoint, tmp_path, "me/unknown", str(kept))
    assert (
        printed[0] == f"{MODEL}: {commit_of(MODEL)}"
        and "not pinned: google-t5/t5-base (" in printed[-1]
    )
    assert "no experiment reads me/unknown" in unknown
    found = yaml.safe_load(kept.read_text())
    assert kept.read_text().startswith("# why\n") and found["models"][MODEL][
        "revision"
    ] == commit_of(MODEL)
    assert found["datasets"].keys() == {"other/data", f"{DATA}@{CONVERSION}"}
    assert found["datasets"][f"{DATA}@{CONVERSION}"]["revision"] == commit_of(DATA, CONVERSION)
    assert len(found["models"][MODEL]["date"]) == 10


@pytest.mark.slow
def test_a_pinned_commit_is_read_and_stated_and_another_revision_goes_before_it(
    checkpoints: Path, tmp_path: Path
) -> None:
    """The branch `old` is where main was when it was pinned."""
    old = {name: commit_of(f"me/{name}", "old") for name in ("model", "data")}
    pins = {
        f"{kind}s": {f"me/{name}": {"revision": old[name], "date": "2026-11-25"}}
        for kind, name in KINDS
    }
    file = tmp_path / "pins.yaml"
    file.write_text(yaml.safe_dump(pins))
    model = contents(checkpoints / "llama")
    data = {"me/data": {"test.jsonl": jsonl("Neu")}, "me/data@old": {"test.jsonl": jsonl("Alt")}}
    with loopback_hub(data, {"me/model": model, "me/model@old": model}) as endpoint:
        pinned, free = map(
            json.loads, printed_in_a_fresh_process(READ, endpoint, tmp_path, str(file))[-2:]
        )
    read = {f"me/{name}": commit for name, commit in old.items()}
    assert pinned == [old["model"], "Alt", {**pins["models"], **pins["datasets"]}, read]
    read = {f"me/{name}@main": commit_of(f"me/{name}") for name in old}
    assert free == [commit_of("me/model"), "Neu", None, read]


KINDS = (("model", "model"), ("dataset", "data"))
