"""Table 3's GPT-like pair, scaled down: its commands from nothing to the table's cells (speculative
decoding §4.2).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import run
from bild_lab.papers.cells import read_points
from bild_lab.papers.figures import FIGURES
from bild_lab.papers.published import load_published
from scripts import finetune, train_module

SCRIPTS = {"run.py": run, "scripts/finetune.py": finetune, "scripts/train_module.py": train_module}
NOUNS, VERBS = (
    ("The market", "A minister", "Their house", "This year"),
    ("rose", "fell", "was sold", "ended early"),
)
SMALLER = {  # in place of what the published commands say
    "scripts/finetune.py": [
        *(
            "dataset.limit=60",
            "validation.limit=4",
            "train.max_steps=12",
            "train.batch_size=8",
            "train.device=cpu",
        ),
        *(
            "train.evaluate_every=6",
            "train.log_every=3",
            "train.warmup_steps=2",
            "train.precision=float32",
        ),
        *(
            "model.config.n_layer=1",
            "model.config.n_embd=32",
            "model.config.n_inner=32",
            "model.config.n_head=2",
        ),
        "model.vocabulary=80",
    ],
    "scripts/train_module.py": ["dataset.limit=60"],
    "run.py": [
        "dataset.limit=3",
        "decoding.max_new_tokens=12",
        "measure.warmup=0",
        "runtime.device=cpu",
    ],
}


def sentences() -> Iterator[str]:
    while True:
        yield from (
            f"{noun} {verb}, in {when} ."
            for noun in NOUNS
            for verb in VERBS
            for when in ("May", "the end")
        )


@pytest.mark.slow
def test_the_published_commands_train_a_pair_from_nothing_and_fill_the_rows_of_lm1b(
    command: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    for split in ("train", "test"):
        file = tmp_path / "lm1b" / "plain_text" / split / "0000.parquet"
        file.parent.mkdir(parents=True)
        pq.write_table(
            pa.Table.from_pylist([{"text": text} for text in islice(sentences(), 70)]), file
        )
    commands = [one for one in load_published("spec_tab3").commands["paper"] if "lm1b" in one]
    assert len(commands) == 5
    for words in map(shlex.split, commands):
        smaller = [*words[2:], *SMALLER[words[1]], f"dataset.path={tmp_path / 'lm1b'}"]
        code, printed = command(
            SCRIPTS[words[1]], *{word.partition("=")[0]: word for word in smaller}.values()
        )
        assert code == 0, printed
    assert (
        "log_probability" in json.loads(Path("outputs/gpt_lm1b/metrics.json").read_text())["best"]
    )
    points = read_points([Path("outputs/spec_tab3_lm1b_paper")])
    assert {point.setting.temperature for point in points} == {0, 1} and len(points) == 6
    cells = [
        one
        for one in FIGURES["spec_tab3"].numbers(points)
        if one.quantity.startswith("acceptance rate")
    ]
    rows = {(one.panel, one.row) for one in cells}
    assert (
        rows == {("lm1b", row) for row in ("gpt_lm1b_small", "unigrams", "bigrams")}
        and len(cells) == 6
    )
