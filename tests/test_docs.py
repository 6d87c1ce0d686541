"""What the documents show works as shown."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

import bild_lab
from bild_lab.engine.acceptance import ExactMatch
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.drafters import NoDraft
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.trace import Trace
from bild_lab.lab.cli import quote_free_text
from bild_lab.lab.config import compose_config, policy_names
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.screening.candidates import grid_of
from tests.policies import is_lossless
from tests.report.sample import sample_sweep
from tests.stubs import StubModel

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "notebooks/README.md",
]
PLACES = (ROOT, ROOT / "bild_lab", ROOT / "tests", ROOT / "scripts")  # what paths in documents are relative to
TO_BE_WRITTEN = {"bild_lab/engine/drafters/repeat.py", "conf/policy/repeat.yaml"}  # by who follows CONTRIBUTING.md
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", flags=re.M | re.S)


def blocks(page: str | Path, language: str) -> list[str]:
    found = BLOCK.findall((ROOT / page).read_text())
    return [dedent(block) for named, block in found if named == language]


def anchors(page: Path) -> set[str]:
    """What a link to one of the page's headings may end in."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), flags=re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code_in(page: Path) -> list[str]:
    """The inline code of a page."""
    return re.findall(r"`([^`\n]+)`", BLOCK.sub("", page.read_text()))


def is_module(name: str) -> bool:
    """Whether there is such a module, or such a name in the package itself, as `bild_lab.load`."""
    if name.removeprefix("bild_lab.") in bild_lab.__all__:
        return True
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False


def command_lines(page: Path) -> list[str]:
    """The page's command lines, each on one line and with its variables filled in."""
    lines = [line for block in blocks(page, "") for line in block.replace("\\\n", " ").splitlines()]
    variables = dict(match.groups() for line in lines if (match := re.fullmatch(r'([A-Z])="(.*)"', line)))
    return [re.sub(r"\$([A-Z])\b", lambda name: variables[name[1]], line) for line in [*lines, *code_in(page)]]


def commands(page: Path) -> Iterator[tuple[Path, list[str]]]:
    """Every script that a command line of the page runs, with its words."""
    for line in command_lines(page):
        if found := re.match(r"(?:python|torchrun|accelerate launch)\b[^#]* ((?:scripts/\w+|run)\.py)\b(.*)", line):
            words = shlex.split(found[2], comments=True)
            yield ROOT / found[1], [word for word in words if "…" not in word]


@lru_cache
def composed(name: str, overrides: tuple[str, ...]) -> None:
    """Compose the first job of a sweep, and every other that takes other files."""
    jobs = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(list(overrides)), None)[0]
    first = dict(word.split("=", 1) for word in jobs[0])
    for job in jobs:
        values = dict(word.split("=", 1) for word in job)
        if job == jobs[0] or any("." not in key and values[key] != first[key] for key in values):
            compose_config(job, name)


def test_the_drafter_of_the_contributing_guide_is_lossless() -> None:
    names: dict = {}
    exec(blocks("CONTRIBUTING.md", "python")[0], names)  # the guide's own code
    table = torch.randn(7, 7, generator=torch.Generator().manual_seed(0)) + 2 * torch.eye(7)
    target = StubModel(lambda tokens: table[tokens[-1]])
    request = Request(Source((3,)), Limits(1, 20))
    trace = Trace()
    drafted = DraftThenVerify(target, names["RepeatDrafter"](target, 4), ExactMatch()).decode(request, trace)
    assert drafted == DraftThenVerify(target, NoDraft(target), ExactMatch()).decode(request, Trace())
    assert trace.accepted > 0


def test_the_policy_of_the_contributing_guide_has_the_shape_of_a_policy() -> None:
    policy = OmegaConf.create({"policy": OmegaConf.create(blocks("CONTRIBUTING.md", "yaml")[0])}).policy
    assert policy.decoder.drafter.window == policy.window == 4


def test_the_python_of_the_page_prints_texts_and_rounds(
    checkpoints: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, stream, chat, _ = blocks("docs/python.md", "python")
    names: dict = {}

    def printed(example: str) -> str:
        for member, folder in {"toy:large": checkpoints / "llama", "toy:small": checkpoints / "llama-draft"}.items():
            assert member in example
            example = example.replace(member, str(folder))
        exec(example, names)  # the page's own code
        return capsys.readouterr().out

    text, tokens, summary, *steps = printed(rounds).splitlines()
    result = names["result"]
    assert (text, tokens) == (result.text, str(result.token_ids))
    assert summary.startswith(f"{len(steps)} rounds, ") and len(steps) == len(result.trace.rounds)
    assert printed(stream) == text
    prompts = iter(["w5 w9 w30 w12", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(prompts))
    answer = printed(chat)
    assert answer == f"{names['decoder'].generate('w5 w9 w30 w12', max_new_tokens=256).text}\n" != "\n"


def test_the_python_of_the_page_prints_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    for result in sample_sweep():
        Sweep(Path("outputs/quickstart")).write_point(result.point, "", result, [])
    exec(blocks("docs/python.md", "python")[-1], {})  # the page's own code
    title, fastest, *others = capsys.readouterr().out.splitlines()
    assert title.split() == "fallback rollback speedup speedup_low speedup_high quality_difference".split()
    assert fastest.split() == "0.3 5.0 1.83 1.78 1.88 -1.31".split() and len(others) == 2


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_the_table_of_policies_has_each_policy_with_its_file_and_says_whether_it_is_lossless() -> None:
    rows = [
        line.split(" | ") for line in (ROOT / "docs/policies.md").read_text().splitlines() if line.startswith("| `")
    ]
    told = {row[0].strip("| `"): row for row in rows}
    assert sorted(told) == sorted(policy_names()) and len(rows) == len(told)
    assert [policy for policy, row in told.items() if f"(../conf/policy/{policy}.yaml)" not in row[3]] == []
    assert [policy for policy, row in told.items() if row[2].startswith("yes") != is_lossless(policy)] == []


def test_the_page_of_commands_has_every_script_and_every_target_of_make() -> None:
    told = set(code_in(ROOT / "docs/commands.md"))
    scripts = {script for line in told for script in re.findall(r"^python (?:-m )?scripts[/.](\w+)", line)}
    assert scripts == {file.stem for file in (ROOT / "scripts").glob("*.py")}
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), flags=re.M)
    assert {line for line in told if line.startswith("make ")} == {f"make {target}" for target in targets}


@pytest.mark.parametrize("group", ["pair", "dataset", "template", "decoding", "runtime", "measure", "logger"])
def test_the_table_of_groups_has_every_file_of_a_group(group: str) -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    (row,) = re.findall(rf"^\|[^|]*`{group}`[^|]*\| (.*) \|$", page.partition("## Keys")[0], flags=re.M)
    told = set(re.findall(r"`(\w+)`", row))
    files = {file.stem for file in (ROOT / "conf" / group).glob("*.yaml")}
    assert told - {"_aligned"} == {name for name in files if name.removesuffix("_aligned") not in files - {name}}
    assert ("_aligned" in told) == any(name.endswith("_aligned") for name in files)


@every_page
def test_links_between_files_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#([\w-]+))?\)", page.read_text())
    assert [target for target, _ in links if not (page.parent / target).exists()] == []
    assert [link for link in links if link[1] and link[1] not in anchors(page.parent / link[0])] == []


@every_page
def test_files_and_modules_that_the_documents_name_exist(page: Path) -> None:
    """Files as `lab/build.py` or `engine/draft.py::Draft`, folders from the root, modules as `bild_lab.lab.build`."""
    missing = []
    for code in code_in(page):
        if found := re.fullmatch(r"([\w/.-]+\.py|conf/[\w/]+\.yaml)(?:::(\w+))?", code):
            files = [place / found[1] for place in PLACES if (place / found[1]).is_file()]
            named = found[2] is None or any(re.search(rf"(def|class) {found[2]}\b", file.read_text()) for file in files)
            missing += [] if (files and named) or code in TO_BE_WRITTEN else [code]
        elif re.fullmatch(r"(bild_lab|tests|conf|docs|scripts|notebooks)(/\w+)*/?", code):
            missing += [] if (ROOT / code).is_dir() else [code]
        missing += [name for name in re.findall(r"\b(?:bild_lab|tests)(?:\.[a-z]\w*)+", code) if not is_module(name)]
    assert missing == []


@every_page
def test_experiments_that_the_documents_name_exist(page: Path) -> None:
    """Those as `experiment=bild_fig4/{wmt14,xsum}_aligned` too."""
    named = [code.partition("=")[2] for code in code_in(page) if re.fullmatch(r"experiment=[\w/{},]+", code)]
    parts = [[part.strip("{}").split(",") for part in re.findall(r"\{[^}]*\}|[^{}]+", name)] for name in named]
    files = ["".join(chosen) for choices in parts for chosen in product(*choices)]
    assert [file for file in files if not (ROOT / "conf/experiment" / f"{file}.yaml").is_file()] == []


@every_page
def test_command_lines_of_the_documents_compose(page: Path) -> None:
    for script, words in commands(page):
        assert script.is_file(), script
        application = re.search(r'config_name="(\w+)"', script.read_text())
        if script.stem == "screen":  # each list is of one of the policies
            words = [word for word in words if re.match(r"[\w./]+=", word)]
            lists = [word for word in words if re.search(r",|range\(", word)]
            assert grid_of([word for word in words if word not in lists], lists, "screen").candidates
        elif application:
            composed(application[1], tuple(quote_free_text(word) for word in words if re.match(r"[\w./]+=", word)))


@every_page
def test_overrides_that_the_documents_name_compose(page: Path) -> None:
    """Every `group=choice` and every `group.key=` of a document exists."""
    config = compose_config([])
    text = page.read_text()
    for group, choice in re.findall(r"`(pair|dataset|policy|decoding|logger|experiment)=([a-z0-9_]+)`", text):
        assert (ROOT / "conf" / group / f"{choice}.yaml").is_file(), f"{group}={choice}"
    for key in re.findall(r"\b((?:dataset|decoding|runtime|measure|pair)\.[a-z_]+)=", text):
        group, name = key.split(".")
        assert name in config[group], key


def test_the_documents_name_enough_for_these_checks() -> None:
    """A change of style in the pages must not leave the checks above with nothing to look at."""
    inline = [code for page in PAGES for code in code_in(page)]
    assert sum(len(list(commands(page))) for page in PAGES) > 80
    assert sum(bool(re.fullmatch(r"[\w/]+\.py(::\w+)?", code)) for code in inline) > 100
    assert sum(code.startswith("experiment=") for code in inline) > 30
