"""Tasks as people run them, with the models that `BILD_LAB_REAL_MODELS` names and the data beside
the repository.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.config.schemas import typed
from bild_lab.lab.data.dataset_spec import DatasetSpec, for_model
from bild_lab.lab.data.examples import load_examples
from bild_lab.lab.data.prompts import Example, with_answers
from bild_lab.lab.metrics.programs import passes
from bild_lab.lab.point.load import load

FOLDER = os.environ.get("BILD_LAB_REAL_MODELS")
DATA = Path(__file__).resolve().parents[4] / "shared" / "data"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FOLDER is None, reason="BILD_LAB_REAL_MODELS names no folder of models"),
    pytest.mark.skipif(not DATA.is_dir(), reason="no shared/data folder beside the repository"),
]


@pytest.fixture(scope="module")
def model() -> str:
    return str(Path(str(FOLDER)) / "qwen-0.5b")


def asked(model: str, name: str, *words: str) -> tuple[Example, ...]:
    cfg = compose_config(
        [f"dataset={name}", f"dataset.path={DATA / name.partition('_instruct')[0]}", *words]
    )
    return load_examples(
        for_model(typed(DatasetSpec, cfg.dataset, "dataset"), Checkpoint(model)), unanswered=True
    )


def test_both_turns_of_mt_bench_are_the_tokens_of_transformers_chat(model: str) -> None:
    examples, checkpoint = asked(model, "mt_bench", "template=chat"), Checkpoint(model)
    answers = {one.id: f"The answer to {one.id}.\n\n- done" for one in examples if one.turn == 1}
    turns = with_answers(examples, answers)
    for first, second in zip(turns[::2], turns[1::2], strict=True):
        messages = [{"role": "user", "content": first.source}]
        assert checkpoint.source(first.prompt) == checkpoint.source(messages)
        messages += [
            {"role": "assistant", "content": answers[first.id]},
            {"role": "user", "content": second.source},
        ]
        assert checkpoint.source(second.prompt) == checkpoint.source(messages)
    assert len(turns) == 160


def test_a_small_coder_solves_humanevals_first_problem(model: str) -> None:
    (first,) = asked(model, "humaneval_instruct", "dataset.limit=1", "dataset.metric=pass_at_1")
    (answer,) = load(model, policy="vanilla", dtype="bfloat16").generate([first.prompt], 256)
    assert "```" in answer.text and passes([answer.text], [first.references]) == [100]
