"""What a training may start from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from bild_lab.errors import UserError
from bild_lab.lab.config import config_dir
from bild_lab.training.finetuning.starting_points import FreshModel, FromCheckpoint, FromScratch
from tests.training.jobs import LLAMA, T5, TURNED, WORDS

CONFIGURATIONS = sorted(file.stem for file in (config_dir() / "model").glob("*.yaml") if file.stem != "checkpoint")


def fresh(base: dict = T5, **changes: Any) -> FreshModel:
    return FreshModel(**{**base, **changes})


@pytest.mark.parametrize("base", [T5, LLAMA], ids=["t5", "llama"])
def test_a_fresh_model_has_the_tokenizers_vocabulary_and_special_tokens(base: dict) -> None:
    start = FromScratch(fresh(base), max_target_tokens=7)
    tokenizer = start.tokenizer(lambda: [*WORDS, *TURNED.values()])
    model, special = start.model(tokenizer), start.special_tokens(tokenizer)
    assert model.config.vocab_size == len(tokenizer) <= 90
    assert (model.config.pad_token_id, model.config.eos_token_id) == (special.pad, *special.end) == (0, 1)
    assert special.start == (0 if base is T5 else None)
    assert model.generation_config.max_new_tokens == 7
    assert model.config.architectures == [type(model).__name__]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_configuration_of_the_project_can_be_built(name: str) -> None:
    values = OmegaConf.to_container(OmegaConf.load(config_dir() / "model" / f"{name}.yaml"))
    values.pop("defaults")
    model = FreshModel(**values)
    assert model.name == name
    assert model.configuration(vocab_size=model.vocabulary).hidden_size % 32 == 0


REFUSED = {
    "no type": ({"config": {}}, "model.config.model_type must be one of Transformers' model types, got None"),
    "unknown type": ({"config": {"model_type": "t6"}}, "got 't6'"),
    "misspelt key": ({"config": {**T5["config"], "d_modle": 3}}, "T5Config has no key 'd_modle'"),
    "value of a wrong kind": ({"config": {**T5["config"], "d_model": "wide"}}, "model.config: .*d_model"),
    "vocabulary": ({"vocabulary": 3}, "model.vocabulary must be a whole number >= 32, got 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_configuration_that_cannot_be_built_is_refused(case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        FromScratch(fresh(**changes), 8)


def test_a_tokenizer_of_another_kind_of_model_is_refused(checkpoints: Path) -> None:
    with pytest.raises(UserError, match="belongs to a decoder, but micro t5 is an encoder–decoder"):
        FromScratch(fresh(tokenizer=str(checkpoints / "llama")), 8)


@pytest.fixture
def copied(checkpoints: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints / "t5", tmp_path / "copied"))


def change(folder: Path, file: str, **values: Any) -> None:
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | values))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(copied: Path) -> None:
    change(copied, "config.json", vocab_size=30)
    with pytest.raises(UserError, match=r"does not match its model: it has token 39, the model 30 embeddings"):
        FromCheckpoint(str(copied))


def test_a_tokenizer_whose_end_token_does_not_end_decoding_is_refused(copied: Path) -> None:
    change(copied, "generation_config.json", eos_token_id=7)
    with pytest.raises(UserError, match=r"texts end with token 1, decoding with \[7\]"):
        FromCheckpoint(str(copied))


def test_weights_of_another_architecture_are_refused(checkpoints: Path, copied: Path) -> None:
    shutil.copy(checkpoints / "llama" / "model.safetensors", copied / "model.safetensors")
    start = FromCheckpoint(str(copied))
    with pytest.raises(UserError, match="belong to another architecture"):
        start.model(start.tokenizer(list))


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no config.json"):
        FromCheckpoint(str(tmp_path))
    with pytest.raises(UserError, match="model.path must be a folder or a hub id, got 3"):
        FromCheckpoint(3)
