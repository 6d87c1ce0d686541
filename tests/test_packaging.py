"""An installed package holds every folder of the source, and a command that runs all others from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from bild_lab.__main__ import main

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_folder_with_code_is_a_listed_package() -> None:
    listed = PROJECT["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "bild_lab").rglob("*.py")}
    assert sorted(set(listed) - {"bild_lab.conf", "bild_lab.scripts"}) == sorted(
        ".".join(folder.parts) for folder in folders
    )
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["bild_lab"]
    assert (ROOT / "bild_lab/py.typed").is_file()


def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/bild-lab", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    return ended.value.code or 0, shown.out + shown.err


def test_the_console_command_lists_and_runs_every_command_under_its_own_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["run", *sorted(file.stem for file in (ROOT / "scripts").glob("*.py"))]
    code, overview = printed(capsys, monkeypatch)
    assert code == 0 and [line.split()[0] for line in overview.splitlines() if line[:2] == "  "] == names
    assert "  run                   Measure decoding policies\n" in overview
    for name in ("run", "screen", "paper-run"):
        code, text = printed(capsys, monkeypatch, name, "--help")
        assert code == 0 and text.startswith(f"usage: bild-lab {name.replace('-', '_')} ") and ".py" not in text
    code, text = printed(capsys, monkeypatch, "scren", "name=a")
    assert code == 2 and "there is no command 'scren'; did you mean screen? bild-lab --help lists them" in text
    code, text = printed(capsys, monkeypatch, "run", "flavour=sweet")
    assert code == 2 and "`bild-lab run --cfg job` lists them all" in " ".join(text.split())


@pytest.mark.slow
def test_an_installed_wheel_measures_from_any_folder_with_configurations_of_ones_own(tmp_path: Path) -> None:
    """In a new environment outside of the checkout, which borrows the libraries of this one."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    source = tmp_path / "source"  # a build leaves files behind
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(source)], check=True)
    subprocess.run([*pip, str(source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "new")], check=True)
    (packages,) = (tmp_path / "new/lib").glob("python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    own, bin_ = tmp_path / "own", tmp_path / "new/bin"
    subprocess.run([bin_ / "pip", "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)], check=True)
    (own / "conf/policy").mkdir(parents=True)
    (own / "conf/policy/short.yaml").write_text("defaults:\n  - speculative\n  - _self_\nname: short\nwindow: 2\n")

    def run(*words: str) -> str:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [bin_ / "bild-lab", *words], cwd=own, env=kept, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    run("run", "--config-dir", "conf", "name=mine", "policy=short", "dataset.limit=2", "measure.repeats=1")
    assert (own / "outputs/mine/commands.jsonl").read_text().count("bild-lab run --config-dir conf name=mine") == 1
    assert "mine" in run("sweeps", "list") and "short" in run("sweeps", "list", "outputs/mine")
    where = "import bild_lab; print(bild_lab.__file__)"
    found = subprocess.run([bin_ / "python", "-c", where], cwd=own, capture_output=True, text=True, check=True, env={})
    assert Path(found.stdout.strip()).is_relative_to(tmp_path / "new")
