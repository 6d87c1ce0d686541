"""What the documents show works as shown."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from omegaconf import OmegaConf

from bild_lab.engine.acceptance import ExactMatch
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.drafters import NoDraft
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.trace import Trace
from bild_lab.lab.config import compose_config
from tests.stubs import StubModel

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text()
    return [dedent(block) for block in re.findall(rf"^ *```{language}\n(.*?)^ *```", text, flags=re.M | re.S)]


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_files_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_overrides_that_the_documents_name_compose(page: Path) -> None:
    """Every `group=choice` and every `group.key=` of a document exists."""
    config = compose_config([])
    text = page.read_text()
    for group, choice in re.findall(r"`(pair|dataset|policy|decoding|logger|experiment)=([a-z0-9_]+)`", text):
        assert (ROOT / "conf" / group / f"{choice}.yaml").is_file(), f"{group}={choice}"
    for key in re.findall(r"\b((?:dataset|decoding|runtime|measure|pair)\.[a-z_]+)=", text):
        group, name = key.split(".")
        assert name in config[group], key
