"""What the documents show works as shown."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest
import torch
import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import get_object
from omegaconf import OmegaConf

import bild_lab
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import Draft
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.methods.vanilla import target_alone
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.trace import Trace
from bild_lab.lab.config.command_line import quote_free_text
from bild_lab.lab.config.compose import compose_config, policy_names
from bild_lab.lab.config.schemas import typed
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.metrics.quality import score
from bild_lab.lab.store.records import Sweep
from bild_lab.papers.runs.paper_runs import application_of, lists_of
from bild_lab.screening.candidates import grid_of
from tests.policies import EXTERNAL, GREEDY_ONLY, REFUSED, SERVER, is_lossless
from tests.pretended import pretended_gpu
from tests.pretended.tensor import DEVICE
from tests.report.sample import sample_sweep
from tests.stubs import StubModel

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "notebooks/README.md",
    *sorted((ROOT / "bild_lab").rglob("README.md")),
]
# what paths in documents are relative to
PLACES = (ROOT, ROOT / "bild_lab", ROOT / "tests", ROOT / "scripts")
# by who follows docs/adding.md
TO_BE_WRITTEN = {"bild_lab/engine/methods/repeat.py", "conf/policy/repeat.yaml"}
every_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix()
)
# in the fast tests
QUICK = ["README.md", *(f"docs/{name}.md" for name in ("start", "commands", "adding", "models"))]
every_page_of_commands = pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page, marks=[] if page in [ROOT / one for one in QUICK] else [pytest.mark.slow]
        )
        for page in PAGES
    ],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)

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
    """Of a module, or of what the package offers by its own name, such as `bild_lab.load`."""
    if name.removeprefix("bild_lab.") in bild_lab.__all__:
        return True
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False


def command_lines(page: Path) -> list[str]:
    """The page's command lines, each on one line and with its variables filled in."""
    lines = [line for block in blocks(page, "") for line in block.replace("\\\n", " ").splitlines()]
    variables: dict[str, str] = {}

    def filled_in(line: str) -> str:
        return re.sub(r"\$([A-Z])\b", lambda name: variables[name[1]], line)

    for line in lines:
        if assigned := re.fullmatch(r'([A-Z])="(.*)"', line):
            variables[assigned[1]] = filled_in(assigned[2])
    return [filled_in(line) for line in [*lines, *code_in(page)]]


def commands(page: Path) -> Iterator[tuple[Path, list[str]]]:
    """Every script that a command line of the page runs, with its words."""
    for line in command_lines(page):
        if "--config-dir" in line:  # which has files of the reader's own
            continue
        if found := re.match(
            r"(?:python|torchrun|accelerate launch)\b[^#]* ((?:scripts/\w+|run)\.py)\b(.*)", line
        ):
            words = shlex.split(found[2], comments=True)
            yield ROOT / found[1], [word for word in words if "…" not in word]


@lru_cache
def composed(name: str, overrides: tuple[str, ...]) -> None:
    """Compose the first job of a sweep, and every other that takes other files."""
    jobs = BasicSweeper.split_arguments(
        OverridesParser.create().parse_overrides(list(overrides)), None
    )[0]
    first = dict(word.split("=", 1) for word in jobs[0])
    for job in jobs:
        values = dict(word.split("=", 1) for word in job)
        if job == jobs[0] or any("." not in key and values[key] != first[key] for key in values):
            compose_config(job, name)


def test_the_drafter_of_the_page_on_methods_is_lossless() -> None:
    names: dict = {}
    exec(blocks("docs/adding.md", "python")[0], names)  # the page's own code
    table = torch.randn(7, 7, generator=torch.Generator().manual_seed(0)) + 2 * torch.eye(7)
    target = StubModel(lambda tokens: table[tokens[-1]])
    request = Request(Source((3,)), Limits(1, 20))
    trace = Trace()
    drafted = DraftThenVerify(target, names["RepeatDrafter"](target, 4), ExactMatch()).decode(
        request, trace
    )
    assert drafted == target_alone(target).decode(request, Trace())
    assert trace.accepted > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="a real GPU takes its place")
def test_the_drafter_of_the_page_on_methods_does_not_wait_for_a_gpu() -> None:
    """Its drafts are made on the host: copied plainly, they would wait in each round."""
    names: dict = {}
    exec(blocks("docs/adding.md", "python")[0], names)  # the page's own code
    with pretended_gpu() as machine, machine.counting() as waits:
        draft = names["RepeatDrafter"](SimpleNamespace(device=DEVICE), 4).propose([3, 5])
    assert not waits and draft.token_list == [5] * 4


def test_the_policy_of_the_page_on_methods_has_the_shape_of_a_policy() -> None:
    policy = OmegaConf.create(
        {"policy": OmegaConf.create(blocks("docs/adding.md", "yaml")[0])}
    ).policy
    assert policy.decoder.drafter.window == policy.window == 4


def test_the_rule_of_the_page_on_methods_accepts_what_is_among_the_most_likely() -> None:
    names: dict = {}
    exec(blocks("docs/adding.md", "python")[1], names)  # the page's own code
    rule, draft = names["AmongMostLikely"](2), Draft(torch.tensor([1, 0, 0]))
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 1.0, 2.0], [1.0, 2.0, 3.0], [0.0, 1.0, 2.0]])
    verdict = rule(draft, logits, None)
    # the last drafted token is the least likely
    assert (verdict.path, verdict.next_token) == ((0, 1), 2)
    assert [names["AmongMostLikely"](k).lossless(Sampling()) for k in (1, 2)] == [True, False]


def test_the_metric_of_the_page_on_methods_says_its_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "page_metric.py").write_text(blocks("docs/adding.md", "python")[2])
    monkeypatch.syspath_prepend(tmp_path)
    assert score("page_metric.f1", ["a b", "a"], [["a b"], ["x", "a c"]]).value == pytest.approx(
        100 * (1 + 2 / 3) / 2
    )


def test_the_data_set_of_ones_own_composes_as_the_page_shows(tmp_path: Path) -> None:
    (block,) = blocks("docs/models.md", "yaml")
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset/faq.yaml").write_text(block)
    config = compose_config([f"hydra.searchpath=[file://{tmp_path}]", "dataset=faq", "policy=bild"])
    spec = typed(DatasetSpec, config.dataset, "dataset")
    assert (spec.name, spec.path, spec.source_column, spec.metric) == (
        "faq",
        "/data/faq",
        ("question",),
        "rouge",
    )


def test_the_python_of_the_page_prints_texts_and_rounds(
    checkpoints: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, stream, chat, *_ = blocks("docs/python.md", "python")
    names: dict = {}

    def printed(example: str) -> str:
        for member, folder in {
            "toy:large": checkpoints / "llama",
            "toy:small": checkpoints / "llama-draft",
        }.items():
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
    assert (
        answer == f"{names['decoder'].generate('w5 w9 w30 w12', max_new_tokens=256).text}\n" != "\n"
    )


def test_the_python_of_the_page_prints_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    for result in sample_sweep():
        Sweep(Path("outputs/quickstart")).write_point(result.point, "", result, [])
    frame, folders = blocks("docs/python.md", "python")[-2:]
    exec(frame, {})  # the page's own code
    title, fastest, *others = capsys.readouterr().out.splitlines()
    assert (
        title.split()
        == "fallback rollback speedup speedup_low speedup_high quality_difference".split()
    )
    assert fastest.split() == "0.3 5.0 1.83 1.78 1.88 -1.31".split() and len(others) == 2
    exec(folders, {})
    assert len(capsys.readouterr().out.splitlines()) == len(sample_sweep())


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 700


def test_the_pages_are_fourteen_and_short() -> None:
    words = {page.name: len(page.read_text().split()) for page in (ROOT / "docs").glob("*.md")}
    assert len(words) == 14
    assert sum(words.values()) + len((ROOT / "README.md").read_text().split()) <= 17_500


@lru_cache
def policies() -> dict[str, list[str]]:
    """The cells of the table of all policies, by policy: what it does, needs, whether lossless,
    models, knobs.
    """
    table = (
        (ROOT / "docs/policies.md")
        .read_text()
        .partition("## All policies")[2]
        .partition("\n## ")[0]
    )
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert len({row[0] for row in rows}) == len(rows)
    return {row[0].strip("`"): row[1:] for row in rows}


def policy_file(policy: str) -> dict:
    return yaml.safe_load((ROOT / f"conf/policy/{policy}.yaml").read_text())


def test_the_table_of_policies_has_each_policy_and_says_what_is_lossless_what_samples_and_which_models_fit() -> (
    None
):
    told = policies()
    assert sorted(told) == sorted(policy_names())
    assert [
        policy
        for policy, row in told.items()
        if row[2].startswith(("yes", "at")) != is_lossless(policy)
    ] == []
    greedily = {policy for policy, row in told.items() if "greedily" in row[2]}
    sampled = told.keys() - GREEDY_ONLY
    assert [policy for policy in sampled & greedily if is_lossless(policy, temperature=1.0)] == []
    assert [
        policy
        for policy in sampled - greedily
        if told[policy][2].startswith("yes") and not is_lossless(policy, temperature=1.0)
    ] == []
    assert {policy for policy, row in told.items() if "greedy" in row[3]} == GREEDY_ONLY
    assert {policy for policy, row in told.items() if row[3].startswith("decoder-only")} == {
        *(policy for policy, family in REFUSED if family == "t5"),
        "openvino_speculative",
        "llama_cpp",
        SERVER,
    }


def test_the_table_of_policies_names_knobs_that_they_have() -> None:
    for policy, row in policies().items():
        assert set(re.findall(r"`(\w+)`", row[4])) <= policy_file(policy).keys()


def test_the_table_of_policies_says_which_draft_with_a_model() -> None:
    wanted = {policy: asks(policy_file(policy)["decoder"]) for policy in policy_names()}
    assert {policy: "draft model" in row[1] for policy, row in policies().items()} == wanted
    assert [policy for policy, row in policies().items() if "two draft models" in row[1]] == [
        "speculative_hierarchy"
    ]


def asks(part: object) -> bool:
    """Whether a part of a decoder has a parameter for the draft model, which is not given in its
    place.
    """
    if not isinstance(part, dict):
        return False
    own = (
        "_target_" in part and "draft" in inspect.signature(get_object(part["_target_"])).parameters
    )
    return (own and "draft" not in part) or any(asks(value) for value in part.values())


def test_the_table_of_policies_says_what_must_be_made_first() -> None:
    made = re.compile(r"`(scripts/\w+\.py|module=\w+|make \w+)`(?! helps)")
    files = {
        policy
        for policy in policy_names()
        for knob, value in policy_file(policy).items()
        if knob in ("adapter", "heads", "table") and value is None
    }
    assert {policy for policy, row in policies().items() if made.search(row[1])} == {
        *(files - {"dflash", "mtp"}),  # which are released, not made here
        *EXTERNAL,
    }


def test_the_page_of_commands_has_every_script_and_every_target_of_make() -> None:
    told = set(code_in(ROOT / "docs/commands.md"))
    scripts = {
        script for line in told for script in re.findall(r"^python (?:-m )?scripts[/.](\w+)", line)
    }
    assert scripts == {file.stem for file in (ROOT / "scripts").glob("*.py")}
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), flags=re.M)
    assert {line for line in told if line.startswith("make ")} == {
        f"make {target}" for target in targets
    }


@every_page
def test_links_between_files_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)(?:#([\w-]+))?\)", page.read_text())
    assert [target for target, _ in links if not (page.parent / target).exists()] == []
    led = [
        ((page.parent / target) if target else page, anchor) for target, anchor in links if anchor
    ]
    assert [(target.name, anchor) for target, anchor in led if anchor not in anchors(target)] == []


@every_page
def test_files_and_modules_that_the_documents_name_exist(page: Path) -> None:
    """Files as `lab/build.py` or `engine/draft.py::Draft`, folders from the root, modules as
    `bild_lab.lab.config.schemas`.
    """
    missing = []
    for code in code_in(page):
        if found := re.fullmatch(r"([\w/.-]+\.py|conf/[\w/]+\.yaml)(?:::(\w+))?", code):
            places = (*PLACES, page.parent)  # a wing's own page names its files without the folder
            files = [place / found[1] for place in places if (place / found[1]).is_file()]
            named = found[2] is None or any(
                re.search(rf"(def|class) {found[2]}\b", file.read_text()) for file in files
            )
            missing += [] if (files and named) or code in TO_BE_WRITTEN else [code]
        elif re.fullmatch(r"(bild_lab|tests|conf|docs|scripts|notebooks)(/\w+)*/?", code):
            missing += [] if (ROOT / code).is_dir() else [code]
        missing += [
            name
            for name in re.findall(r"\b(?:bild_lab|tests)(?:\.[a-z]\w*)+", code)
            if not is_module(name)
        ]
    assert missing == []


@every_page
def test_experiments_that_the_documents_name_exist(page: Path) -> None:
    """Those as `experiment=bita/tab{1,7}` too."""
    named = [
        code.partition("=")[2]
        for code in code_in(page)
        if re.fullmatch(r"experiment=[\w/{},]+", code)
    ]
    parts = [
        [part.strip("{}").split(",") for part in re.findall(r"\{[^}]*\}|[^{}]+", name)]
        for name in named
    ]
    files = ["".join(chosen) for choices in parts for chosen in product(*choices)]
    assert [
        file for file in files if not (ROOT / "conf/experiment" / f"{file}.yaml").is_file()
    ] == []


@every_page_of_commands
def test_command_lines_of_the_documents_compose(page: Path) -> None:
    for script, words in commands(page):
        assert script.is_file(), script
        application = application_of(script.relative_to(ROOT).as_posix())
        if script.stem == "screen":  # each list is of one of the policies
            words = [word for word in words if re.match(r"[\w./]+=", word)]
            lists = [word for word in words if re.search(r"=[^\[]*(,|range\()", word)]
            fixed = [quote_free_text(word) for word in words if word not in lists]
            assert grid_of(fixed, lists).candidates
        elif application:
            words = [quote_free_text(word) for word in words if re.match(r"[\w./]+=", word)]
            composed(application, tuple(words))
            if any(word.startswith("experiment=") for word in words):
                # with what the experiment itself sweeps over
                swept = lists_of(("python", script.name, *words)).values()
                composed(application, tuple(choices[0] for choices in swept))


@every_page
def test_files_of_groups_that_the_documents_name_exist(page: Path) -> None:
    groups = "pair|dataset|policy|decoding|logger|experiment|scale|match|template|module|train"
    for group, choice in re.findall(rf"`({groups})=([a-z0-9_]+)`", page.read_text()):
        assert (ROOT / "conf" / group / f"{choice}.yaml").is_file(), f"{group}={choice}"


@every_page_of_commands
def test_overrides_that_the_documents_name_compose(page: Path) -> None:
    """Inline code such as `dataset=xsum dataset.shots=2`, as a shell would pass it to run.py."""
    word = r"\+?(?:pair|dataset|decoding|runtime|measure|policy)(?:\.\w+)?=[^…]+"
    for code in filter(re.compile(rf"\S*{word}").fullmatch, code_in(page)):
        words = [each for each in shlex.split(code) if not each.endswith("=N")]
        if all(re.fullmatch(word, each) for each in words):
            knobs = {knob for each in words for knob in re.findall(r"^policy\.(\w+)", each)}
            policy = next(name for name in policy_names() if knobs <= policy_file(name).keys())
            chosen = (
                [] if any(each.startswith("policy=") for each in words) else [f"policy={policy}"]
            )
            composed("config", (*chosen, *map(quote_free_text, words)))


def test_the_documents_name_enough_for_these_checks() -> None:
    """A change of style in the pages must not leave the checks above with nothing to look at."""
    inline = [code for page in PAGES for code in code_in(page)]
    assert sum(len(list(commands(page))) for page in PAGES) > 80
    assert sum(bool(re.fullmatch(r"[\w/]+\.py(::\w+)?", code)) for code in inline) > 50
    assert sum(code.startswith("experiment=") for code in inline) > 20


def test_the_reference_names_members_that_there_are() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    listed = re.findall(
        r"^::: ([\w.]+)\n    options:\n(?:      .*\n)*?      members: \[(.*?)\]", page, re.M
    )
    assert len(listed) >= 4
    for name, members in listed:
        owner = get_object(name)
        assert [member for member in members.split(", ") if not hasattr(owner, member)] == [], name
