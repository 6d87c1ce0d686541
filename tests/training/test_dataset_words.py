"""A dataset as words of a command line: composed again they give the same dataset, of a split to decode."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from bild_lab.lab.cli import quote_free_text
from bild_lab.lab.config import compose_config
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.training.dataset_words import dataset_words
from tests.lab.data.test_examples import from_config

VICUNA = "A chat between a curious user and an artificial intelligence assistant."


def composed(words: list[str]) -> DatasetSpec:
    """The dataset that a shell and Hydra make of the words."""
    given = shlex.split(shlex.join(words))
    return DatasetSpec(**OmegaConf.to_container(compose_config([quote_free_text(word) for word in given]).dataset))


@pytest.mark.parametrize(
    "spec",
    [
        from_config("toy"),
        from_config("multi30k", path="/some where/it's, here"),
        from_config("multi30k", path="a/b", source_column=["translation.de", "de"], max_source_tokens=12),
        from_config("multi30k", prompt_template='German: {source} "English", it\'s:', metric="rouge"),
        from_config("multi30k", reference_column=None, metric="agreement"),
        from_config("mt_bench", chat_template="[INST] {question} [/INST]", next_turn_template=" {answer}\n{question}"),
        from_config("mt_bench", chat_template=["{question}", "Q: {question}"], turns=None),
        from_config("local", path="/data/reviews.jsonl", source_column="text"),
        replace(from_config("local", path="2024", source_column="null"), name="true"),
        replace(
            from_config("local", path="/data/faq", source_column="q", reference_column="a", metric="rouge"),
            name="my faq",
        ),
        DatasetSpec(name="own", hub_id="me/own", source_column="x", reference_column="y", metric="bleu", turns=1),
    ],
    ids=lambda spec: spec.name,
)
def test_the_words_give_the_same_dataset_again(spec: DatasetSpec) -> None:
    assert composed(dataset_words(spec)) == spec


def test_a_template_is_named_by_its_file() -> None:
    templates = OmegaConf.to_container(compose_config(["dataset=mt_bench", "template=vicuna_full"]).dataset)
    assert templates["chat_template"].startswith(VICUNA)
    spec = DatasetSpec(**templates)
    assert dataset_words(spec) == ["dataset=mt_bench", "template=vicuna_full"]
    assert composed(dataset_words(spec)) == spec


def test_limits_and_the_training_split_are_left_out() -> None:
    spec = from_config("multi30k", split="train", limit=7)
    assert dataset_words(spec) == ["dataset=multi30k"]


def test_data_without_a_test_split_are_decoded_on_the_split_that_they_have(tmp_path: Path) -> None:
    spec = from_config("multi30k", path=str(tmp_path), split="train")
    (tmp_path / "train.jsonl").write_text("{}")
    assert composed(dataset_words(spec)).split == "train"
    (tmp_path / "val.jsonl").write_text("{}")
    assert composed(dataset_words(spec)).split == "validation"
    (tmp_path / "test.jsonl").write_text("{}")
    assert composed(dataset_words(spec)) == replace(spec, split="test")


def test_of_several_datasets_the_first_is_decoded() -> None:
    spec = replace(from_config("multi30k", path="a"), name="multi30k + lima")
    assert dataset_words(spec) == ["dataset=multi30k", "dataset.path=a"]
