"""BiTA's experiments ask as its released evaluation does, and their recipes make all that they
read.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

import pytest
from hydra import compose
from omegaconf import OmegaConf

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.lab.config.compose import config_dir
from bild_lab.lab.config.schemas import typed
from bild_lab.lab.data.conversations import conversation
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.data.examples import cached_examples
from bild_lab.lab.data.prompts import Example, with_answers
from bild_lab.lab.point.history import requests_of
from bild_lab.lab.point.prepare import prepare
from bild_lab.papers.runs.recipes import Recipe, recipes_of
from bild_lab.training.train_spec import TrainSpec
from tests.engine.methods.modules.tiny import files_of
from tests.test_experiments import BITA, ROW, commands, composed, swept
from tests.tiny import tiny_llama

pytestmark = pytest.mark.usefixtures("found_configuration")

FOLDERS = re.compile(r"outputs/(\w+)")


# by data set: the released evaluation's template, the question about a row of ROW, and the longest
# answer
ASKED = {
    "xsum": (
        "full",
        "Document: a text\nBased on the previous text, provide a brief single summary:",
        256,
    ),
    "mt_bench": ("short", "a text", 512),
    "cip": ("full", "a text", 512),
    "humaneval_x": ("short", "Complete the following python code\na text", 1024),
}
CHAT = {  # by family: before and after a question without a system prompt
    "llama2": ("[INST] ", " [/INST] "),
    "vicuna": ("USER: ", " ASSISTANT:"),
    "falcon": ("User: ", "\nAssistant:"),
}
TARGETS = dict.fromkeys(("llama2_7b_chat", "llama2_13b_chat"))  # and where each is placed
TARGETS |= dict.fromkeys(("vicuna_33b", "llama2_70b_chat", "falcon_40b"), "auto")


def asked(family: str, data: str) -> str:
    """The prompt of a first turn.

    The full templates are those of Table 6, with the space that Llama's end in.
    """
    (kind, question, _), (before, after) = ASKED[data], CHAT[family]
    if kind == "short" or family == "falcon":
        return f"{before}{question}{after}"
    full = OmegaConf.load(config_dir() / f"template/{family}_full.yaml").chat_template
    return full.replace("{question}", question) + " " * after.endswith(" ")


@pytest.mark.fast("llama2_70b_chat-cip")
@pytest.mark.parametrize(("pair", "data"), [*product(TARGETS, ASKED)])
def test_what_reaches_bitas_targets_is_the_released_evaluations(
    pair: str, data: str, checkpoints: Path, tmp_path: Path
) -> None:
    """Prompt, number of rows, precision, placement and longest answer, on a tiny model in the
    target's place.
    """
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    adapter = files_of("bita", tiny_llama(1).config, checkpoints)["adapter"]
    here = [f"pair.target={checkpoints / 'llama'}", f"policy.adapter={adapter}"]
    here.append(f"dataset.path={tmp_path / 'rows.jsonl'}")
    cfg = composed("bita/tab1", f"pair={pair}", f"dataset={data}", *here)
    family, text = (
        next(one for one in CHAT if pair.startswith(one)),
        Checkpoint(str(checkpoints / "llama")),
    )
    point = prepare(cfg)
    (request,) = requests_of(point, point.examples)
    wanted = asked(family, data)
    assert point.examples[0].prompt == wanted
    assert list(request.source.prompt) == text.tokenizer(wanted)["input_ids"]
    assert request.limits.max_new_tokens == ASKED[data][2]
    assert (cfg.dataset.limit, cfg.dataset.turns) == (None, 2 if data == "mt_bench" else 1)
    assert point.setting["dtype"] == "float16" and point.setting.get("device_map") == TARGETS[pair]
    cached_examples.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "between"),
    [("llama2", "</s><s>"), ("vicuna", "</s><s>"), ("falcon", "<|endoftext|>\n")],
)
def test_bitas_second_turns_follow_as_in_the_released_evaluation(family: str, between: str) -> None:
    pair = next(one for one in TARGETS if one.startswith(family))
    spec = typed(DatasetSpec, composed("bita/tab7", f"pair={pair}").dataset, "dataset")
    turns = conversation(Example("7", "First?", ""), ["First?", "Second?"], spec.templates[0])
    (before, after), (_, second) = CHAT[family], with_answers(turns, {"7": "Yes."})
    assert second.prompt == f"{before}First?{after}Yes.{between}{before}Second?{after}"


def unmade(folders: Iterable[str], recipes: Sequence[Recipe]) -> set[str]:
    """What no recipe writes, of these folders of outputs and of those that the recipes of these
    folders read.
    """
    by_folder = {recipe.folder: recipe for recipe in recipes}
    read = {*folders}
    for folder in folders:
        if folder in by_folder:
            read.update(FOLDERS.findall(" ".join(by_folder[folder].overrides)))
    return read - {*by_folder}


@pytest.mark.fast("bita_fig8")
@pytest.mark.parametrize("name", BITA)
def test_what_bitas_experiments_read_is_made_by_their_recipes(name: str) -> None:
    for command in commands(name):
        sweep = swept(command)
        for pair in sweep["pair"].split(","):
            cfg = composed(shlex.split(command)[0], f"pair={pair}")
            paths = [
                sweep.get("policy.adapter", ""),
                *(str(cfg.policy.get(key)) for key in ("adapter", "heads")),
            ]
            folders = FOLDERS.findall(" ".join(paths).replace("${pair.name}", pair))
            # whole files, and what tells the speed of `generate`
            assert cfg.dataset.limit == (200 if cfg.measure.baseline == "hf_generate" else None)
            untrained = {"bita_falcon_40b"} & set(folders)  # no adapter can be trained for it
            recipes = recipes_of(cfg)
            assert unmade(folders, recipes) == untrained
            without = [recipe for recipe in recipes if not recipe.folder.endswith("_cip")]
            # drafts that are copied from the text read no folder
            answers = {f"calibration_{pair}_cip"} if folders else set()
            assert unmade(folders, without) == (untrained or answers)


@pytest.mark.fast("vicuna_33b-4")
@pytest.mark.parametrize(("pair", "masks"), [("vicuna_33b", 4), ("llama2_7b_chat", 3)])
def test_bitas_recipes_answer_the_papers_questions_and_train_by_the_released_recipe(
    pair: str, masks: int
) -> None:
    recipes = {
        recipe.folder: recipe for recipe in recipes_of(composed("bita/tab1", f"pair={pair}"))
    }
    several = {
        "lima": None,
        "alpaca_gpt4": None,
        "code_alpaca": None,
        "open_platypus": None,
        "cip": 50_000,
    }
    for data, limit in several.items():
        script, *words = shlex.split(recipes[f"calibration_{pair}_{data}"].command)[1:]
        cfg = compose("calibration", words)
        assert (script, cfg.dataset.name, cfg.dataset.split) == (
            "scripts/generate_calibration.py",
            data,
            "train",
        )
        assert (cfg.dataset.limit, cfg.decoding.max_new_tokens, cfg.runtime.dtype) == (
            limit,
            1600,
            "float16",
        )
        assert cfg.runtime.device_map == TARGETS[pair]
        ends = [one.partition("{question}")[2] for one in cfg.dataset.chat_template]
        assert ends == [CHAT[pair.partition("_")[0]][1]] * 2  # in both templates
    cfg = compose("train_bita", shlex.split(recipes[f"bita_{pair}"].command)[2:])
    assert list(cfg.calibration) == [f"outputs/calibration_{pair}_{data}" for data in several]
    bita = [cfg.bita[key] for key in ("mask_tokens", "prompt_tokens", "splits", "consecutive")]
    assert bita == [masks, 16, 64, True]
    assert (cfg.runtime.device_map, cfg.model.sharded) == (TARGETS[pair], False)
    recipe = typed(TrainSpec, cfg.train, "train")
    assert (recipe.clip_norm, recipe.max_tokens, recipe.max_target_tokens) == (1.0, 2048, 1600)
