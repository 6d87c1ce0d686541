"""Each row of README's table and of the register names a command of a page that composes, and a
commit.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bild_lab.lab.config.command_line import quote_free_text
from bild_lab.lab.config.compose import compose_config, config_dir
from bild_lab.papers.runs.paper_runs import application_of
from bild_lab.screening.candidates import grid_of
from tests.test_docs import ROOT, command_lines, composed

README, REGISTER = ROOT / "README.md", ROOT / "docs/results/README.md"
COMMIT = re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{7,8}\b\+?")
LINKED = re.compile(r"\[`([^`]+)`\]\(([^)#]+)[^)]*\)")


@dataclass(frozen=True)
class Claim:
    """A row of a table of claims. words: of its command; none where it names none. page: where the
    command is.
    """

    row: str
    words: tuple[str, ...]
    page: Path


def claims_of(page: Path) -> list[Claim]:
    """The rows of the page's table with a column "Command"."""
    lines = page.read_text().splitlines()
    (title,) = (at for at, line in enumerate(lines) if re.match(r"\|.*\| Command", line))
    column = next(
        at for at, cell in enumerate(lines[title].split("|")) if cell.strip().startswith("Command")
    )
    claims = []
    for line in lines[title + 2 :]:
        if not line.startswith("|"):
            break
        linked = LINKED.findall(line.split("|")[column])
        words, target = linked[0] if len(linked) == 1 else ("", "")
        claims.append(Claim(line, tuple(words.split()), page.parent / target))
    return claims


def commands_with(words: tuple[str, ...], page: Path) -> list[str]:
    """The page's command lines that have these words; of a sweep's list, one value is enough."""
    found = []
    for line in command_lines(page):
        if words[0] == "make":
            found += [line] if f"`{' '.join(words)}`" in page.read_text() else []
            break
        if not re.match(r"python (?:scripts/\w+|run)\.py\b", line):
            continue
        values: dict[str, str] = {}  # of a key that comes twice the last counts
        for word in shlex.split(line, comments=True):
            key, equals, value = word.partition("=")
            if equals:
                values[key] = value
        wanted = dict(word.split("=", 1) for word in words)
        if all(value in values.get(key, "").split(",") for key, value in wanted.items()):
            found.append(line)
    return found


def compose_line(line: str, tmp_path: Path) -> None:
    """Compose the command, as `--cfg job` would; of a sweep its first job."""
    script, *words = shlex.split(line, comments=True)[1:]
    if "--config-dir" in words:
        at = words.index("--config-dir")
        del words[at : at + 2]
        words.append(f"hydra.searchpath=[file://{reader_folder(tmp_path)}]")
    words = [word for word in words if re.match(r"[\w./]+=", word)]
    if script.endswith("screen.py"):
        lists = [word for word in words if re.search(r"=[^\[]*(,|range\()", word)]
        fixed = [quote_free_text(word) for word in words if word not in lists]
        assert grid_of(fixed, lists).candidates
        return
    composed(application_of(script), tuple(quote_free_text(word) for word in words))
    named = dict(word.split("=", 1) for word in words)
    if baseline := named.get("measure.baseline"):
        search = [word for word in words if word.startswith("hydra.searchpath")]
        assert compose_config([f"policy={baseline}", *search]).policy.name == baseline


def reader_folder(tmp_path: Path) -> Path:
    """`DIR` of docs/results/real.md: `speculative8` and `copying` as the page describes them."""
    policy = tmp_path / "policy"
    policy.mkdir(exist_ok=True)
    text = (config_dir() / "policy/speculative.yaml").read_text()
    text = re.sub(r"^name: speculative$", "name: speculative8", text, flags=re.M)
    changed = re.sub(r"^window: \d+", "window: 8", text, flags=re.M)
    (policy / "speculative8.yaml").write_text(changed)
    hybrid = (config_dir() / "policy/hybrid.yaml").read_text()
    copying = re.sub(r"^name: hybrid$", "name: copying", hybrid, flags=re.M)
    (policy / "copying.yaml").write_text(
        re.sub(r"^second: \w+", "second: speculative", copying, flags=re.M)
    )
    return tmp_path


@pytest.mark.parametrize("page", [README, REGISTER], ids=["README", "register"])
def test_every_row_has_one_command_on_its_page_and_a_commit(page: Path) -> None:
    claims = claims_of(page)
    assert len(claims) >= 6
    assert [claim.row for claim in claims if not claim.words] == []
    found = {" ".join(claim.words): commands_with(claim.words, claim.page) for claim in claims}
    assert {words: lines for words, lines in found.items() if len(lines) != 1} == {}
    assert [claim.row for claim in claims if not COMMIT.search(claim.row)] == []


def test_the_table_of_the_readme_is_short_and_part_of_the_register() -> None:
    rows, register = claims_of(README), claims_of(REGISTER)
    assert len(rows) <= 6
    named = {claim.words: claim.row for claim in register}
    for claim in rows:
        speedup = re.search(r"\d\.\d\d \[[^\]]+\]", claim.row)[0]
        assert speedup in named[claim.words], claim.row


def composed_claims() -> Iterator[Any]:
    """Each command of both tables once; those of README that are quick are in the fast tests."""
    readme = [claim for claim in claims_of(README) if claim.words]
    named = {claim.words for claim in readme}
    for claim in readme:
        lines = commands_with(claim.words, claim.page)
        is_slow = any("scripts/screen.py" in line for line in lines)
        marks = [pytest.mark.slow] if is_slow else []
        yield pytest.param(claim, id=" ".join(claim.words), marks=marks)
    for claim in claims_of(REGISTER):
        if claim.words and claim.words not in named:
            yield pytest.param(claim, id=" ".join(claim.words), marks=[pytest.mark.slow])


@pytest.mark.parametrize("claim", [*composed_claims()])
def test_the_command_of_a_row_composes(claim: Claim, tmp_path: Path) -> None:
    (line,) = commands_with(claim.words, claim.page)
    if claim.words[0] == "make":
        assert re.search(rf"^{claim.words[1]}:", (ROOT / "Makefile").read_text(), flags=re.M)
    else:
        compose_line(line, tmp_path)


def test_a_row_without_its_command_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```\npython run.py -m name=a policy=x,y\npython run.py name=a name=b\n```\n")
    assert len(commands_with(("name=a", "policy=y"), page)) == 1
    assert commands_with(("name=a", "policy=z"), page) == []
    assert len(commands_with(("name=b",), page)) == 1 == len(commands_with(("name=a",), page))
    page.write_text("| Claim | Command |\n|---|---|\n| fast | 2.0, by hand |\n")
    assert [claim.words for claim in claims_of(page)] == [()]
