"""Heads in FasterDecoding's layout compute what the authors' module computes, and nothing else is
read as such.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bild_lab.engine.methods.medusa import MedusaHeads
from bild_lab.errors import UserError
from tests.policies import load
from tests.tiny import tiny_llama

MODEL = tiny_llama(0)
DIM, VOCABULARY = MODEL.config.hidden_size, MODEL.config.vocab_size


class ResBlock(nn.Module):
    """Of the authors' medusa/model/medusa_model.py."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


def authors_heads(heads: int, layers: int) -> nn.ModuleList:
    torch.manual_seed(0)
    blocks = [[ResBlock() for _ in range(layers)] for _ in range(heads)]
    return nn.ModuleList(
        nn.Sequential(*one, nn.Linear(DIM, VOCABULARY, bias=False)) for one in blocks
    )


def released(
    folder: Path, tensors: dict[str, Tensor], named: int = 2, file: str = "medusa_lm_head.pt"
) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(tensors, folder / file)
    config = {
        "medusa_num_heads": named,
        "medusa_num_layers": 1,
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_released_heads_say_what_the_authors_module_says(layers: int, tmp_path: Path) -> None:
    """config.json may name fewer heads than there are, as the authors' loader does not look at the
    others.
    """
    theirs = authors_heads(3, layers)
    folder = released(tmp_path / "heads", theirs.half().state_dict())
    ours = MedusaHeads.load(folder)
    assert (ours.config.heads, ours.config.layers, ours.config.shared) == (3, layers, False)
    hidden = torch.randn(4, DIM, generator=torch.Generator().manual_seed(1))
    wanted = torch.stack([head(hidden) for head in theirs.float()])
    torch.testing.assert_close(ours.float()(hidden), wanted, rtol=1e-5, atol=1e-5)


def test_released_numbers_are_not_rounded_to_the_precision_that_a_process_makes_tensors_in(
    tmp_path: Path,
) -> None:
    theirs = authors_heads(2, 1)
    folder = released(tmp_path / "heads", theirs.state_dict())
    torch.set_default_dtype(torch.bfloat16)
    try:
        ours = MedusaHeads.load(folder)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(ours.outputs, torch.stack([head[-1].weight for head in theirs]))


def test_a_target_drafts_with_released_heads_and_emits_its_own_text(
    checkpoints: Path, tmp_path: Path
) -> None:
    folder = released(tmp_path / "heads", authors_heads(3, 1).state_dict())
    plain = load(checkpoints, "llama", "vanilla").generate("ein Hund", max_new_tokens=12)
    drafted = load(checkpoints, "llama", "medusa", heads=str(folder)).generate(
        "ein Hund", max_new_tokens=12
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.trace.drafted > 0


def test_what_are_no_released_heads_is_refused(tmp_path: Path, checkpoints: Path) -> None:
    good = authors_heads(2, 1).state_dict()
    without = {name: value for name, value in good.items() if name != "1.0.linear.bias"}
    for number, (tensors, named) in enumerate(
        [(without, 2), ({**good, "2.0.weight": good["0.1.weight"]}, 2), (good, 3)]
    ):
        folder = released(tmp_path / str(number), tensors, named)
        with pytest.raises(
            UserError,
            match=f"must hold {named} Medusa heads, got .*0.0.linear.bias.*; give a release",
        ):
            MedusaHeads.load(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(
        UserError,
        match=r"config.json describes no release of Medusa heads \('medusa_num_heads'\); give a",
    ):
        MedusaHeads.load(folder)
    wide = {
        name: torch.cat([value] * 2) if name.endswith("1.weight") else value
        for name, value in good.items()
    }
    with pytest.raises(
        UserError,
        match="trained for lmsys/vicuna-7b-v1.3, whose vocabulary is 80, but the target's is",
    ):
        load(checkpoints, "llama", "medusa", heads=str(released(tmp_path / "wide", wide)))


class Harmful:
    def __reduce__(self):
        return (print, ("harm was done",))


def test_released_heads_that_are_more_than_tensors_are_refused_and_do_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = released(tmp_path / "harmful", {})
    (folder / "medusa_lm_head.pt").write_bytes(pickle.dumps({"0.1.weight": Harmful()}, protocol=2))
    with pytest.raises(UserError, match=r"cannot read .*medusa_lm_head\.pt"):
        MedusaHeads.load(folder)
    assert "harm" not in capsys.readouterr().out
