"""An installed package holds every folder of the source, and a command that runs all others from
any folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import grimp
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


def printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str
) -> tuple[int, str]:
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
    assert (
        code == 0
        and [line.split()[0] for line in overview.splitlines() if line[:2] == "  "] == names
    )
    assert "  run                   Measure decoding policies\n" in overview
    for name in ("run", "screen", "paper-run"):
        code, text = printed(capsys, monkeypatch, name, "--help")
        assert (
            code == 0
            and text.startswith(f"usage: bild-lab {name.replace('-', '_')} ")
            and ".py" not in text
        )
    code, text = printed(capsys, monkeypatch, "scren", "name=a")
    assert (
        code == 2
        and "there is no command 'scren'; did you mean screen? bild-lab --help lists them" in text
    )
    code, text = printed(capsys, monkeypatch, "run", "flavour=sweet")
    assert code == 2 and "`bild-lab run --cfg job` lists them all" in " ".join(text.split())


def borrowing(folder: Path) -> Path:
    """The `bin` of a new environment, which has the libraries of this one behind its own, and not
    our package.
    """
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


@pytest.mark.slow
def test_an_installed_wheel_measures_from_any_folder_with_configurations_of_ones_own(
    tmp_path: Path,
) -> None:
    source, own, programs = tmp_path / "source", tmp_path / "own", borrowing(tmp_path / "new")
    # a build leaves files behind
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(source)], check=True)
    wheel = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        str(source),
    ]
    subprocess.run([*wheel, "--wheel-dir", str(tmp_path)], check=True)
    install = [
        programs / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--ignore-installed",
    ]
    subprocess.run([*install, *tmp_path.glob("*.whl")], check=True)
    (own / "conf/policy").mkdir(parents=True)
    (own / "conf/policy/short.yaml").write_text(
        "defaults:\n  - speculative\n  - _self_\nname: short\nwindow: 2\n"
    )
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(program: str, *words: str) -> str:
        done = subprocess.run(
            [programs / program, *words], cwd=own, env=kept, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(
        "bild-lab",
        "run",
        "--config-dir",
        "conf",
        "name=mine",
        "policy=short",
        "dataset.limit=2",
        "measure.repeats=1",
    )
    assert (
        "bild-lab run --config-dir conf name=mine"
        in (own / "outputs/mine/commands.jsonl").read_text()
    )
    assert "short" in run("bild-lab", "sweeps", "list", "outputs/mine")
    where = run("python", "-c", "import bild_lab; print(bild_lab.__file__)")
    assert Path(where.strip()).is_relative_to(tmp_path / "new")


NEXT = [
    "omegaconf>=2.4",
    *(f"hydra-{part}>=1.4.0rc3" for part in ("core", "joblib-launcher", "submitit-launcher")),
]
WITH_NEXT = [
    "tests/test_experiments.py",
    "tests/lab/config/test_compose.py",
    "tests/lab/test_application.py",
]
WITH_NEXT += [
    "tests/lab/config/test_entrypoint.py::test_a_sweep_leaves_everything_it_promises",
    "tests/faults/test_launchers.py",
]


@pytest.mark.slow
def test_every_experiment_composes_and_sweeps_run_with_the_next_hydra_without_what_it_deprecates(
    tmp_path: Path,
) -> None:
    python = [borrowing(tmp_path) / "python", "-m"]
    install = [*python, "pip", "install", "--quiet", "--no-deps", "--pre", "--ignore-installed"]
    installed = subprocess.run(
        [*install, *NEXT, "hydra-submitit-launcher>=1.4.0rc3"], stderr=subprocess.PIPE, text=True
    )
    if installed.returncode:
        pytest.skip(
            f"Hydra 1.4 cannot be installed here: {installed.stderr.strip().splitlines()[-1]}"
        )
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "HYDRA_DEPRECATION_WARNINGS_AS_ERRORS": "1"}
    done = subprocess.run(
        [*python, "pytest", *WITH_NEXT], cwd=ROOT, env=settings, stdout=subprocess.PIPE, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert list(tmp_path.glob("lib/python*/site-packages/hydra_core-1.4*"))


def pinned() -> set[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(line.split("==")[0]) for line in lines if "==" in line}


def declared() -> list[Requirement]:
    """What pyproject.toml asks for, with all extras."""
    extras = PROJECT["project"]["optional-dependencies"].values()
    listed = [*PROJECT["project"]["dependencies"], *(each for extra in extras for each in extra)]
    return [one for one in map(Requirement, listed) if one.name != PROJECT["project"]["name"]]


def needed(requirements: Iterable[Requirement]) -> dict[str, str]:
    """These packages and all that they need here, each with the one that asks for it; of missing
    ones nothing more.
    """
    found: dict[str, str] = {}
    waiting = [(one, "pyproject.toml") for one in requirements]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement, asking = waiting.pop()
        name = canonicalize_name(requirement.name)
        found.setdefault(name, asking)
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            with suppress(PackageNotFoundError):
                further = map(Requirement, requires(name) or ())
                waiting += [
                    (one, name)
                    for one in further
                    if one.marker is None or one.marker.evaluate({"extra": extra})
                ]
    return found


def test_every_package_that_is_installed_is_pinned() -> None:
    missing = {name: asking for name, asking in needed(declared()).items() if name not in pinned()}
    # an environment has these before anything is installed
    free = {"pip", "setuptools"}
    assert {name: asking for name, asking in missing.items() if name not in free} == {}


def test_every_package_that_our_code_imports_is_declared() -> None:
    graph = grimp.build_graph("bild_lab", include_external_packages=True, cache_dir=None)
    graph.remove_module("bild_lab.benchmark.peer_worker")  # it runs in the environment of a peer
    asked_for = {canonicalize_name(one.name) for one in declared()}
    distributions = packages_distributions()
    undeclared = {}
    for module in graph.modules - set(sys.stdlib_module_names):
        importing = graph.find_modules_that_directly_import(module)
        names = {canonicalize_name(name) for name in distributions.get(module, [module])}
        if graph.is_module_squashed(module) and importing and not names & asked_for:
            undeclared[module] = sorted(importing)
    assert undeclared == {}
