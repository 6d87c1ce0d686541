"""A rehearsal of the papers' items: from download to drawn figure, on tiny checkpoints under the published ids.

A hub on the loopback serves them, and a few rows of each data set in its published layout. What a model was asked, and
how, is read from the points. `scripts/paper_run.py ITEM run=true` runs as at the papers' scale, with fewer texts.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as pq
import pytest

from bild_lab.papers.paper_runs import hub
from tests.loopback_hub import CONVERSION, REPOSITORY, contents, loopback_hub, pickled
from tests.tiny import relative_of, save, tiny_llama, tiny_t5

pytestmark = pytest.mark.slow

SENTENCES = [("w4 w5 w6", "w7 w8"), ("w9 w10 w11 w12", "w13 w14 w15"), ("w16 w17", "w18 w19 w20")]
TRANSLATIONS = [{"translation": {"de": one, "en": other, "fr": other}} for one, other in SENTENCES]
STORIES = [{"article": one, "highlights": other, "id": one} for one, other in SENTENCES]
SUMMARIES = [{"document": one, "summary": other, "id": one} for one, other in SENTENCES]
QUESTIONS = [
    {"id": one, "title": "", "context": one, "question": other, "answers": {"text": [other], "answer_start": [0]}}
    for one, other in SENTENCES
]
SPLITS = ("train", "validation", "test")
FEW = ["dataset.limit=2", "decoding.max_new_tokens=8", "measure.warmup=1", "measure.traced_examples=1"]


def parquet(rows: list[dict]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


def files(rows: list[dict], folder: str, of_config: str | None = None) -> dict[str, bytes]:
    """A data set of parquet files; with a configuration of its own name, which its card maps to them."""
    found = {f"{folder}/{split}-00000-of-00001.parquet": parquet(rows) for split in SPLITS}
    if of_config is not None:
        listed = "\n".join(f"  - split: {split}\n    path: {folder}/{split}-*" for split in SPLITS)
        found["README.md"] = f'---\nconfigs:\n- config_name: "{of_config}"\n  data_files:\n{listed}\n---\n'.encode()
    return found


def converted(rows: list[dict], folder: str) -> dict[str, bytes]:
    """What the hub makes of a data set that is a script, on the branch of its conversion."""
    return {f"{folder}/{split}/0000.parquet": parquet(rows) for split in SPLITS}


DATASETS = {
    f"IWSLT/iwslt2017@{CONVERSION}": converted(TRANSLATIONS, "iwslt2017-de-en"),
    "wmt/wmt14": files(TRANSLATIONS, "de-en", "de-en"),
    "wmt/wmt15": files(TRANSLATIONS, "fr-en", "fr-en"),
    f"EdinburghNLP/xsum@{CONVERSION}": converted(SUMMARIES, "default"),
    "abisee/cnn_dailymail": files(STORIES, "3.0.0", "3.0.0"),
    "rajpurkar/squad": files(QUESTIONS, "plain_text"),
}


@cache
def checkpoints(folder: Path) -> dict[str, Mapping[str, bytes]]:
    """A tiny model for every T5, mT5 and Vicuna-13B of hub.yaml: the outline's depth for a Llama, BiLD's as pickles."""
    several = {}
    t5, llama = tiny_t5(1), tiny_llama(1, layers=40)
    for seed, (name, card) in enumerate(hub()["models"].items(), 2):
        outline = card["outline"] or ""
        if card["stored"] and outline.startswith(("t5", "mt5")):
            model = t5 if "large" in outline or "11b" in outline else relative_of(t5, seed, noise=0.2)
            several[name] = contents(save(model, folder / name))
    several["lmsys/vicuna-13b-v1.3"] = contents(save(llama, folder / "vicuna"))
    return several


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    models = checkpoints(tmp_path_factory.mktemp("models"))
    models["kssteven/T5-large-cnndm"] = pickled(models["kssteven/T5-large-cnndm"])  # as it may be on the hub
    with loopback_hub(DATASETS, models) as url:
        yield url


class Rehearsal:
    """Runs an item's command in a folder and reads the points that it leaves."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.folder = folder
        switches = {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "cache"), "HF_HUB_DISABLE_XET": "1"}
        self.environment = {**os.environ, **switches, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}

    def run(self, *words: str) -> tuple[int, str]:
        command = [sys.executable, str(REPOSITORY / "scripts" / "paper_run.py"), *words, "run=true", "force=true"]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=1200, check=False
        )
        return done.returncode, done.stdout + done.stderr

    def points(self, name: str) -> list[dict[str, Any]]:
        found = sorted((self.folder / "outputs" / name).glob("points/*/result.json"))
        return [json.loads(file.read_text()) for file in found]

    def figure(self, item: str) -> str:
        assert (self.folder / f"outputs/figures/{item}.png").is_file()
        return (self.folder / f"outputs/figures/{item}.md").read_text()


@pytest.fixture
def rehearsal(tmp_path: Path, endpoint: str) -> Rehearsal:
    return Rehearsal(tmp_path, endpoint)


def asked(point: dict[str, Any]) -> tuple[Any, ...]:
    """What reached the models: which, on which split and how many rows, in which prompt, how long, how precise."""
    setting = point["setting"]
    keys = ("target", "draft", "dataset", "split", "n_examples", "prompt_template", "metric", "dtype")
    return (*(setting[key] for key in keys), setting["decoding"]["temperature"], setting["decoding"]["max_new_tokens"])


def test_bilds_figure_2_is_of_the_validation_splits_with_a_window_as_long_as_a_text(rehearsal: Rehearsal) -> None:
    code, told = rehearsal.run("bild/fig2", *FEW, "policy.rollback=2", "runtime.allow_pickles=true")
    assert code == 0, told
    points = rehearsal.points("bild_fig2_paper")
    assert sorted(map(asked, points)) == [
        (f"kssteven/{target}", f"kssteven/{draft}", data, "validation", 2, prompt, metric, "float32", 0.0, 8)
        for target, draft, data, prompt, metric in [
            ("T5-large-cnndm", "T5-small-cnndm", "cnn_dailymail", "summarize: {source}", "rougeLsum"),
            ("mT5-large-wmt2014-de-en", "mT5-small-wmt2014-de-en", "wmt14", "{source}", "bleu"),
        ]
    ]
    assert [(one["policy"], one["knobs"]["window"]) for one in points] == [("bild_no_fallback", 128)] * 2
    assert rehearsal.figure("bild_fig2").startswith("# Figure 2")


def test_the_speculative_papers_table_5_asks_t5_in_its_own_words_at_both_temperatures(rehearsal: Rehearsal) -> None:
    code, told = rehearsal.run("spec/tab5", *FEW, "policy.lenience=0.3")
    assert code == 0, told
    points = rehearsal.points("spec_tab5_paper")
    prompt = "translate English to German: {source}"
    assert sorted(map(asked, points)) == [
        ("google-t5/t5-11b", "google-t5/t5-small", "wmt14_en_de", "test", 2, prompt, "bleu", "bfloat16", warm, 8)
        for warm in (0.0, 1.0)
    ]
    assert all((one["knobs"]["window"], one["knobs"]["lenience"]) == (7, 0.3) for one in points)
    assert "lenience 0.3" in rehearsal.figure("spec_tab5")
