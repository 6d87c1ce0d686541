"""BiTA's released answers are learned as its own code learns them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.errors import UserError
from bild_lab.training.modules.references import released_answers
from scripts import train_bita
from tests.tiny import END, START

Command = Callable[..., tuple[int, str]]
# as the lines of data/assembled_v2/llama2-7b/…-prompt2-output.jsonl
ROW = {"instruction": "w5", "input": "", "template_tag": "short"}


def write_answers(folder: Path, rows: int) -> Path:
    folder.mkdir()
    file = folder / "alpaca_lima_cip-50k_code_platypus_v2-prompt2-output.jsonl"
    lines = [
        {**ROW, "model_input_texts": f"<s>w5 w{4 + row % 9} ", "output": "w7 w8 w9 w10 w7"}
        for row in range(rows)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_a_released_answer_follows_its_prompt_and_ends(checkpoints: Path, tmp_path: Path) -> None:
    base = Checkpoint(str(checkpoints / "llama"))
    file = write_answers(tmp_path / "llama2-7b", 2)
    read = released_answers(base, file, 6)
    assert [answer.prompt for answer in read.answers] == ["<s>w5 w4 ", "<s>w5 w5 "]
    # the start token, which the text has, comes once
    assert base.source(read.answers[0].prompt).prompt == (START, 5, 4)
    assert [answer.answer_token_ids for answer in read.answers] == [[7, 8, 9, 10, 7, END]] * 2
    assert released_answers(base, file, 5).answers[0].answer_token_ids == [7, 8, 9, 10, 7]
    assert read.dataset.name == f"llama2-7b/{file.stem}"
    assert read.manifest["model"]["fingerprint"] == base.fingerprint
    file.write_text(json.dumps({"prompt": "w5", "response": "w7"}))
    with pytest.raises(UserError, match=r"model_input_texts.*prompt, response"):
        released_answers(base, file, 6)


@pytest.mark.slow
def test_an_adapter_learns_released_answers_beside_others(
    command: Command, checkpoints: Path, tmp_path: Path
) -> None:
    files = [write_answers(tmp_path / name, 12) for name in ("one", "two")]
    line = [f"model.path={checkpoints / 'llama'}", f"calibration=[{files[0]},{files[1]}]"]
    line += ["bita.mask_tokens=1", "held_out=2", "train.max_steps=1", "train.batch_size=4"]
    line += ["train.accumulate=1", "train.device=cpu", "train.evaluate_every=null"]
    code, printed = command(train_bita, *line, config="train_bita")
    assert code == 0, printed
    metrics = json.loads(Path("outputs/bita/metrics.json").read_text())
    assert (metrics["train_examples"], metrics["held_out_examples"]) == (22, 2)
    assert f"answers of {checkpoints / 'llama'} to one/alpaca_lima_cip" in metrics["data"]
