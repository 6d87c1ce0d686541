"""`--help` of every command: one form, its own keys, no side effects, at once."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bild_lab.lab.usage import WIDTH, usage

ROOT = Path(__file__).resolve().parents[2]
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
    """What a script prints for `--help`, run as a script in an empty folder, where it may leave nothing."""
    monkeypatch.chdir(tmp_path)

    def help_of(script: Path, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(script), *words, "--help"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
        out = capsys.readouterr()
        assert not ended.value.code and out.err == "" and list(tmp_path.iterdir()) == []
        return out.out

    return help_of


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_help_has_a_usage_line_and_the_commands_own_keys(script: Path, printed) -> None:
    first, blank, what = printed(script).splitlines()[:3]
    place = script.relative_to(ROOT).as_posix()
    module = place.removesuffix(".py").replace("/", ".")
    assert first.startswith((f"usage: python {place}", f"usage: python -m {module}"))
    assert blank == "" and what.endswith(".")
    if application := re.search(r'config_name="(\w+)"', script.read_text()):
        own = yaml.safe_load((ROOT / "conf" / f"{application[1]}.yaml").read_text())
        keys = set(re.findall(r"^  (\w+):", printed(script), flags=re.M))
        assert set(own) - {"defaults", "hydra"} <= keys


def test_a_word_beside_help_is_not_obeyed(printed) -> None:
    assert printed(ROOT / "scripts" / "bench.py", "t5_small").startswith("usage: python scripts/bench.py [SHAPE …]")
    assert printed(ROOT / "scripts" / "sweeps.py", "merge", "b").startswith("usage: python scripts/sweeps.py WHAT")


def test_help_loads_no_heavy_library() -> None:
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    command = [sys.executable, "-c", HELP_OF_ALL, *map(str, SCRIPTS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_keys_come_with_their_comments_and_without_wiring(printed) -> None:
    text = printed(ROOT / "scripts" / "finetune.py")
    assert "name: finetuned  # the checkpoint is written to outputs/NAME" in text
    assert "    warmup_steps: 0" in text  # of the chosen recipe, train=paper
    assert "_target_:" not in text and "hydra" not in text and "defaults:" not in text
    assert re.search(r"^  train +bita, eagle, lm_heads", text, flags=re.M)


def test_inherited_keys_and_groups_are_listed(printed) -> None:
    text = printed(ROOT / "scripts" / "screen.py")
    assert "  resume: true" in text and "  screen:\n" in text and "  experiment first_run" in text
    assert "bild/…" in text  # a folder of experiments


def test_a_script_without_configuration_prints_its_text_alone() -> None:
    text = usage("Do it: python scripts/do.py WORD\n\nA word is needed.\n", None)
    assert text == "usage: python scripts/do.py WORD\n\nDo it.\n\nA word is needed."


def test_choices_fit_the_width(printed) -> None:
    groups = printed(ROOT / "run.py").partition("Groups (")[2].partition("The whole")[0]
    assert max(map(len, groups.splitlines())) <= WIDTH
