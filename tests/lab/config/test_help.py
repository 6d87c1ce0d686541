"""`--help` of every command: one form, its own keys, no side effects, at once; and the words that
it explains.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bild_lab.lab.config.entrypoint import WIDTH
from bild_lab.lab.schema.glossary import TERMS, terms_text
from bild_lab.papers.runs.paper_runs import application_of

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = [ROOT / "run.py", *sorted((ROOT / "scripts").glob("*.py"))]
HELP_OF_ALL = """
import runpy, sys
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, script
heavy = {"torch", "pandas", "matplotlib", "plotly", "transformers", "datasets", "wandb"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """What a script prints for `--help`, run as a script in an empty folder, where it may leave
    nothing.
    """
    monkeypatch.chdir(tmp_path)

    def help_of(script: str | Path, *words: str, option: str = "--help") -> str:
        monkeypatch.setattr(sys, "argv", [str(ROOT / script), *words, option])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        out = capsys.readouterr()
        assert not ended.value.code and out.err == "" and list(tmp_path.iterdir()) == []
        return out.out

    return help_of


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_help_has_a_usage_line_and_the_commands_own_keys(script: Path, printed) -> None:
    text = printed(script)
    first, blank, what = text.splitlines()[:3]
    assert re.match(
        rf"usage: python (-m )?{script.relative_to(ROOT)}".replace("/", "[/.]").removesuffix(".py"),
        first,
    )
    assert blank == "" and what.endswith(".")
    if application := application_of(script.relative_to(ROOT).as_posix()):
        own = yaml.safe_load((ROOT / "conf" / f"{application}.yaml").read_text())
        assert set(own) - {"hydra"} <= set(re.findall(r"^(\w+):", text, flags=re.M))


def test_the_short_option_shows_the_same_help(printed) -> None:
    assert printed("run.py", option="-h") == printed("run.py")


def test_help_loads_no_heavy_library() -> None:
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    command = [sys.executable, "-c", HELP_OF_ALL, *map(str, SCRIPTS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_keys_come_with_their_comments_and_groups_with_their_files(printed) -> None:
    text = printed("scripts/finetune.py", "a word that is not obeyed")
    assert (
        "name: finetuned  # the checkpoint is written to outputs/NAME" in text
        and "\nhydra:" not in text
    )
    assert (
        re.search(r"^  train +bita, bita_released, eagle, lm1b", text, flags=re.M)
        and "bild/…" in text
    )


def test_help_of_the_main_command_explains_the_words(printed) -> None:
    text = printed("run.py")
    assert (
        terms_text(WIDTH) in text
        and "policy.fallback=0.3,0.5" in text
        and "bild_early_exit" in text
    )
    groups = text.partition("Groups (")[2].partition("Every key")[0]
    assert max(map(len, groups.splitlines())) <= WIDTH


def test_every_term_is_explained_once_within_the_width() -> None:
    assert len({term.words for term in TERMS}) == len(TERMS)
    assert all(term.words and term.meaning.endswith(".") for term in TERMS)
    assert max(map(len, terms_text(60).splitlines())) <= 60
