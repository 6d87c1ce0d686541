"""A rehearsal of the papers' items: from download to drawn figure, on tiny checkpoints under the
published ids.

A hub on the loopback serves them, and a few rows of each data set in its published layout
(`rehearsal_hub.py`). What the models were asked, and how, is read from what the steps leave, and
compared with `rehearsal.yaml`. `scripts/paper_run.py ITEM run=true` runs as at the papers' scale,
with fewer points and steps of training; splits, limits, lengths, precisions and templates are the
item's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from bild_lab.lab.data.prompts import Example
from bild_lab.lab.store.hashing import data_hash
from bild_lab.lab.store.records import Sweep
from bild_lab.papers.recorded_quality import recorded_of, recordings_of, with_recorded_quality
from tests.loopback_hub import REPOSITORY, commit_of, loopback_hub
from tests.papers.rehearsal_heads import released_heads
from tests.papers.rehearsal_hub import ROWS, TABLES, checkpoints, datasets, gated

pytestmark = pytest.mark.slow

ASKED, REHEARSALS = TABLES["asked"], TABLES["rehearsals"]
QUICK = [*TABLES["quick"], "policy.lenience=0.3"]
# tokens of the hub: one that may read all, and one that LIMA's authors have not let in
CONSENTED, WITHOUT_LIMA = "consented", "without lima"
LIMA = "GAIR/lima"
Seen = dict[str, Any]  # of a point: what reached its models


OWN_PINS = """
import os, runpy, sys, traceback
from pathlib import Path
from bild_lab import files
files.PINS = Path("pins.yaml").absolute()
from bild_lab.lab.config.entrypoint import run_application
from scripts import paper_run
"""  # what a run pins stays in its folder
PLAIN = f"{OWN_PINS}run_application(paper_run.main, None)"
FORKING = (
    OWN_PINS
    + """
from types import SimpleNamespace
import datasets, torch, transformers
import bild_lab.lab.measure.runner, bild_lab.report.sweep, bild_lab.training.trainer
from bild_lab.papers import figures
from bild_lab.papers.runs import step_processes

def forked(command, **options):
    if (step := os.fork()) == 0:
        sys.argv, code = command[2:], 1
        try:
            runpy.run_module(sys.argv[0], run_name="__main__")
        except SystemExit as ended:
            code = ended.code
        except Exception:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(step, 0)[1])
    return SimpleNamespace(poll=lambda: status, returncode=status)

step_processes.subprocess = SimpleNamespace(Popen=forked)
run_application(paper_run.main, None)
"""
)  # paper_run.py whose steps begin with the libraries loaded, which takes each seconds


class Rehearsal:
    """Runs items' commands in a folder and reads what they leave there."""

    def __init__(self, folder: Path, endpoint: str, token: str = CONSENTED) -> None:
        self.folder = folder
        switches = {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(folder / "cache"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": token,
        }
        (folder / "pins.yaml").write_text("models: {}\ndatasets: {}\n")
        self.environment = {
            **os.environ,
            **switches,
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
        }

    def run(self, *words: str, script: str = FORKING) -> tuple[int, str]:
        command = [sys.executable, "-c", script, *words, "run=true", "force=true"]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def points(self, name: str) -> list[Path]:
        return sorted((self.folder / "outputs" / name).glob("points/*/result.json"))

    def figure(self, item: str) -> str:
        path = self.folder / f"outputs/figures/{item.replace('/', '_')}"
        assert path.with_suffix(".png").is_file()
        return path.with_suffix(".md").read_text()


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    consent = {CONSENTED: gated(), WITHOUT_LIMA: [name for name in gated() if name != LIMA]}
    models = checkpoints(tmp_path_factory.mktemp("models")) | released_heads()
    with loopback_hub(datasets(), models, gated=gated(), consent=consent) as url:
        yield url


@pytest.fixture
def rehearsal(tmp_path: Path, endpoint: str) -> Rehearsal:
    return Rehearsal(tmp_path, endpoint)


def flat(words: list[Any]) -> list[str]:
    """The overrides of a table, in which lists may lie in lists."""
    return [one for word in words for one in (flat(word) if isinstance(word, list) else [word])]


def task(family: str, data: str) -> dict[str, Any]:
    """How a paper asks a data set; what is not said of the one is said of all of its data sets."""
    whole = {key: value for key, value in ASKED[family].items() if not isinstance(value, dict)}
    return {**whole, **ASKED[family][data]}


def written(template: str, **values: str) -> str:
    for name, value in {**TABLES["systems"], **values}.items():
        template = template.replace(f"{{{name}}}", value)
    return template


def prompts(family: str, data: str, answers: Mapping[str, str]) -> list[str]:
    """The whole prompts of a data set. answers: to the first turn, by the row."""
    asked = task(family, data)
    rows = [f"{asked['split']} {number}" for number in range(ROWS[asked["split"]])]
    return [
        written(one, n=row, answer=answers.get(row, "")) for row in rows for one in asked["prompts"]
    ]


def seen(file: Path, family: str, knobs: Mapping[str, set[str]]) -> Seen:
    """What reached the models of a point. knobs: which of them are looked at, by policy.

    Those of modules that a knob names, and of a pipeline, have dotted names.
    """
    result = json.loads(file.read_text())
    setting, policy, values = result["setting"], result["policy"], dict(result["knobs"])
    for part, own in {
        **result["facts"]["trained"],
        "pipeline": result.get("pipeline") or {},
    }.items():
        values |= {f"{part}.{key}": value for key, value in own.items()}
    examples = [
        json.loads(line) for line in (file.parent / "examples.jsonl").read_text().splitlines()
    ]
    drafts = Counter(len(each["drafted"]) for one in examples for each in one["rounds"])
    values["baseline"] = setting["baseline"]
    values["tokens a draft"] = drafts.most_common(1)[0][0] if drafts else None
    answers = {one["id"]: one.get("baseline_prediction", "").strip() for one in examples}
    asked, known = [one["prompt"] for one in examples], prompts(family, setting["dataset"], answers)
    return {
        **{key: setting[key] for key in ("target", "draft", "dataset", "split", "metric", "dtype")},
        "rows": setting["n_examples"],
        "device_map": setting.get("device_map"),
        "longest": setting["decoding"]["max_new_tokens"],
        "temperature": setting["decoding"]["temperature"],
        "policy": policy,
        "knobs": {key: values.get(key) for key in sorted(knobs.get(policy, ()))},
        "other prompts": [one for one, other in zip_longest(asked, known) if one != other],
    }


def expected(entry: Mapping[str, Any]) -> Iterator[Seen]:
    """The points that an entry of the table stands for."""
    each, policies = entry.get("each", {}), entry.get("policies") or [entry["policy"]]
    choices = (
        entry["pairs"],
        entry["data"],
        entry.get("temperatures", [0]),
        policies,
        *each.values(),
    )
    for pair, data, temperature, policy, *several in product(*choices):
        (target, draft), asked = TABLES["models"][pair], task(entry["by"], data)
        knobs = {**entry.get("knobs", {}), **dict(zip(each, several, strict=True))}
        point = {
            "target": target,
            "draft": draft,
            "dataset": data,
            "temperature": temperature,
            "policy": policy,
        }
        point |= {key: asked[key] for key in ("split", "metric", "dtype", "rows", "longest")}
        point |= {
            "device_map": entry.get("device_map"),
            "knobs": dict(sorted(knobs.items())),
            "other prompts": [],
        }
        yield from [point] * entry.get("times", 1)


def compared(
    rehearsal: Rehearsal, folder: str, entries: list[Mapping[str, Any]]
) -> tuple[list[Seen], list[Seen]]:
    """The points of a folder, and those that it should hold, in the same order."""
    should = [one for entry in entries for one in expected(entry)]
    knobs: dict[str, set[str]] = {}
    for one in should:
        knobs.setdefault(one["policy"], set()).update(one["knobs"])
    found = [seen(file, entries[0]["by"], knobs) for file in rehearsal.points(folder)]
    return sorted(found, key=ordered), sorted(should, key=ordered)


def require_recorded(rehearsal: Rehearsal, folder: str) -> None:
    """Every greedy point was screened on the same examples, with the same texts."""
    sweep = rehearsal.folder / "outputs" / folder
    points = [point for point in Sweep(sweep).results() if not point.setting.temperature]
    recordings = recordings_of([sweep])
    joined = with_recorded_quality(points, recordings)
    compared = [(recorded_of(point) or {}).get("compared") for point in joined]
    assert compared == [point.setting.n_examples for point in points]
    assert not any(recorded_of(point)["differing"] for point in joined)
    data = {point.setting["data"] for point in points}
    assert data == {recording.setting["data"] for recording in recordings}


def ordered(point: Seen) -> str:
    return json.dumps(point, sort_keys=True)


def require_commits(rehearsal: Rehearsal) -> None:
    """Everything that was read of the hub is stated with its commit, and pinned."""
    pins = yaml.safe_load((rehearsal.folder / "pins.yaml").read_text())
    pinned = {key: pin["revision"] for kind in pins.values() for key, pin in kind.items()}
    assert pinned and all(
        commit == commit_of(*filter(None, key.split("@"))) for key, commit in pinned.items()
    )
    for file in (rehearsal.folder / "outputs").glob("*/points/*/result.json"):
        point = json.loads(file.read_text())
        decoding = (point["setting"].get(role) for role in point["facts"]["parameters"])
        models = {model for model in decoding if model in pins["models"]}
        read = point["facts"]["commits"]
        assert read.items() <= pinned.items() and read.keys() & pins["datasets"].keys()
        assert models <= read.keys(), file
    for file in (rehearsal.folder / "outputs").glob("*/metrics.json"):
        told = json.loads(file.read_text())
        read = {**told["commits"], **told.get("answers", {}).get("commits", {})}
        assert read.items() <= pinned.items() and read.keys() & pins["datasets"].keys(), file


def require_answers(rehearsal: Rehearsal, pair: str, family: str, left_out: Sequence[str]) -> None:
    """The answers that an adapter learned: to which questions, in which templates, how long, how
    precise.
    """
    for data, question in TABLES["answers"]["questions"].items():
        folder = rehearsal.folder / f"outputs/calibration_{pair}_{data}"
        assert folder.is_dir() is (data not in left_out)
        if data in left_out:
            continue
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["decoding"] == {
            "method": "greedy",
            "max_new_tokens": 1600,
            "dtype": "float16",
        }
        tables = map(pq.read_table, sorted(folder.glob("*.parquet")))
        answered = [prompt for table in tables for prompt in table["prompt"].to_pylist()]
        rows = [written(question, n=f"train {number}") for number in range(ROWS["train"])]
        assert answered == [
            written(one, question=row) for row in rows for one in TABLES["answers"][family]
        ]


def require_rates(rehearsal: Rehearsal, name: str, rates: Mapping[str, Any]) -> None:
    """What match rates were measured of: the hash of the data is of all ids, prompts and
    references.
    """
    settings = json.loads((rehearsal.folder / f"outputs/{name}/metrics.json").read_text())[
        "settings"
    ]
    asked, texts = task("ppd", rates["data"]), prompts("ppd", rates["data"], {})
    examples = [
        Example(
            written(rates["id"], i=str(number), n=row),
            "",
            text,
            (written(rates["reference"], n=row),),
        )
        for number, text in enumerate(texts)
        for row in [f"{asked['split']} {number}"]
    ]
    assert settings["data"] == data_hash(examples)
    found = [
        settings[key] for key in ("decoding.max_new_tokens", "runtime.dtype", "heads", "positions")
    ]
    assert found == [asked["longest"], asked["dtype"], rates["heads"], rates["positions"]]
    assert (settings["model.path"], settings["top_k"]) == ("lmsys/vicuna-13b-v1.3", [1, 3, 5])
    assert settings["layers"] == [10, 20, 30, 35, 37]


@pytest.mark.parametrize("name", REHEARSALS)
def test_an_item_runs_from_download_to_figure_and_asks_as_its_paper_does(
    name: str, tmp_path: Path, endpoint: str
) -> None:
    table = REHEARSALS[name]
    left_out = table.get("left_out", [])
    rehearsal = Rehearsal(tmp_path, endpoint, WITHOUT_LIMA if left_out else CONSENTED)
    for item, title in table["items"].items():
        code, printed = rehearsal.run(item, *flat(table["overrides"]))
        assert code == 0, printed
        if title is not None:
            figure = rehearsal.figure(item)
            assert figure.startswith(f"# {title}") and (
                item == "bild/fig10" or "| verdict |" in figure
            )
            assert (f"learned no answers to {LIMA}" in figure) is bool(left_out)
            assert (f"without {LIMA}: it is gated" in printed) is bool(left_out)
    for folder, entries in table.get("points", {}).items():
        found, should = compared(rehearsal, folder, entries)
        assert found == should, folder
        if folder in TABLES["recorded"]:
            require_recorded(rehearsal, folder)
    for folder, count in table.get("validated", {}).items():
        metrics = json.loads((rehearsal.folder / f"outputs/{folder}/metrics.json").read_text())
        assert metrics["validation_examples"] == count and len(metrics["learning_rates"]) == 4
    for pair in table.get("calibrated", []):
        require_answers(rehearsal, pair, pair.partition("_")[0], left_out)
    for folder, rates in table.get("rates", {}).items():
        require_rates(rehearsal, folder, rates)
    require_commits(rehearsal)


def test_what_is_asked_otherwise_than_in_the_paper_is_found(rehearsal: Rehearsal) -> None:
    """Each value that the rehearsals look at is planted wrong: pair, template, split, rows, metric,
    precision, …
    """
    faults = {
        "pair": "t5_11b_base", "dataset.prompt_template": "German: {source}", "dataset.split": "train",
        "dataset.limit": "1", "dataset.metric": "chrf", "runtime.dtype": "float32", "decoding.max_new_tokens": "9",
        "decoding.temperature": "1", "policy.window": "3",
    }  # fmt: skip
    code, printed = rehearsal.run(
        "spec/tab5",
        *(f"{key}={value}" for key, value in faults.items()),
        *QUICK,
        *TABLES["pickles"],
        script=PLAIN,
    )
    assert code == 0, printed
    (found,), (should, _) = compared(
        rehearsal, "spec_tab5_paper", REHEARSALS["spec_tab5"]["points"]["spec_tab5_paper"]
    )
    same = {"target", "dataset", "device_map", "policy"}
    assert {key for key, value in found.items() if value == should[key]} == same
