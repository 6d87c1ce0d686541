"""Starting points of a training, their tokenizers, and what does not go together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LlamaConfig,
    NllbTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
)

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.errors import UserError
from bild_lab.lab.config.compose import compose_config, config_dir
from bild_lab.training.start import (
    FreshModel,
    FromCheckpoint,
    FromScratch,
    require_room,
    train_tokenizer,
)
from scripts import finetune, generate_calibration, train_lm_heads, train_module
from tests.tiny_architectures import DECODER, configuration
from tests.training.jobs import LLAMA, T5, TURNED, WORDS

CONFIGURATIONS = sorted(
    file.stem for file in (config_dir() / "model").glob("*.yaml") if file.stem != "checkpoint"
)


def fresh(base: dict = T5, **changes: Any) -> FreshModel:
    return FreshModel(**{**base, **changes})


@pytest.mark.parametrize("base", [T5, LLAMA], ids=["t5", "llama"])
def test_a_fresh_model_has_the_tokenizers_vocabulary_and_special_tokens(base: dict) -> None:
    start = FromScratch(fresh(base), max_target_tokens=7)
    tokenizer = start.tokenizer([*WORDS, *TURNED.values()])
    model, special = start.model(tokenizer), start.special_tokens(tokenizer)
    assert model.config.vocab_size == len(tokenizer) <= 90
    assert (
        (model.config.pad_token_id, model.config.eos_token_id)
        == (special.pad, *special.end)
        == (0, 1)
    )
    assert special.start == (0 if base is T5 else None)
    assert model.generation_config.max_new_tokens == 7
    assert model.config.architectures == [type(model).__name__]


@pytest.mark.fast("gpt_lm1b", "t5_large_cpu", "t5_tiny", "toy_small")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_configuration_of_the_project_can_be_built(name: str) -> None:
    values = OmegaConf.to_container(compose_config([f"model={name}"], "finetune").model)
    model = FreshModel(**values)
    assert model.name == name
    assert model.configuration(vocab_size=model.vocabulary).hidden_size % 32 == 0


# as §4.2 of speculative decoding counts them
PARAMETERS = {"gpt_lm1b": 97e6, "gpt_lm1b_small": 6e6}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_gpt_of_table_3_has_as_many_parameters_as_the_paper_says(name: str) -> None:
    fresh = FreshModel(
        **OmegaConf.to_container(compose_config([f"model={name}"], "finetune").model)
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(fresh.configuration(vocab_size=fresh.vocabulary))
    assert model.num_parameters() == pytest.approx(PARAMETERS[name], rel=0.05)


def test_word_pieces_give_a_text_back_and_texts_begin_with_their_start_token() -> None:
    tokenizer = train_tokenizer(
        ["The show goes on, and on.", "They showed it."] * 9, 60, False, "wordpiece"
    )
    ids = tokenizer("The show goes on.")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[0] == "<s>" and "##" in "".join(
        tokenizer.get_vocab()
    )
    assert tokenizer.decode(ids, skip_special_tokens=True).replace(" .", ".") == "The show goes on."
    assert tokenizer("")["input_ids"] == [tokenizer.bos_token_id]


REFUSED = {
    "pieces": ({"pieces": "unigram"}, "model.pieces must be one of bpe, wordpiece, got 'unigram'"),
    "no type": (
        {"config": {}},
        "model.config.model_type must be one of Transformers' model types, got None",
    ),
    "unknown type": ({"config": {"model_type": "t6"}}, "got 't6'"),
    "misspelt key": ({"config": {**T5["config"], "d_modle": 3}}, "T5Config has no key 'd_modle'"),
    "value of a wrong kind": (
        {"config": {**T5["config"], "d_model": "wide"}},
        "model.config: .*d_model",
    ),
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
    with pytest.raises(
        UserError, match=r"does not match its model: it has token 39, the model 30 embeddings"
    ):
        FromCheckpoint(Checkpoint(str(copied)))


def test_a_tokenizer_whose_end_token_does_not_end_decoding_is_refused(copied: Path) -> None:
    change(copied, "generation_config.json", eos_token_id=7)
    with pytest.raises(UserError, match=r"texts end with token 1, decoding with \[7\]"):
        FromCheckpoint(Checkpoint(str(copied)))


TRAININGS = {
    "finetune": (finetune, ["model.path={}"]),
    "tokenizer": (finetune, ["model=t5_tiny", "model.tokenizer={}"]),
    "calibration": (generate_calibration, ["model.path={}", "dataset.split=test"]),
    "heads": (train_lm_heads, ["model.path={}", "layers=[1]"]),
    "medusa": (train_module, ["module=medusa", "model.path={}"]),
    "ngram": (train_module, ["module=ngram", "pair.target={}", "dataset.split=test"]),
}


@pytest.mark.fast("finetune", "calibration")
@pytest.mark.parametrize("training", TRAININGS)
def test_a_model_that_is_told_its_languages_is_not_trained(
    training: str, command: Callable[..., tuple[int, str]], data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "translator"
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "\u2581a"]
    tokenizer = NllbTokenizer(vocab={piece: at for at, piece in enumerate(pieces)}, merges=[])
    config = configuration("m2m_100")
    config.vocab_size, config.decoder_start_token_id, config.eos_token_id = len(tokenizer), 2, 2
    tokenizer.save_pretrained(folder)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder)
    script, words = TRAININGS[training]
    given = [*(word.format(folder) for word in words), "dataset=multi30k", f"dataset.path={data}"]
    code, printed = command(script, *given, "name=told")
    assert code == 2, printed
    *_, line = printed.strip().splitlines()  # saving draws a bar
    assert "is told the languages that it translates between (NllbTokenizer)" in line
    assert not Path("outputs").exists()


TEXTS = [*WORDS, *TURNED.values(), "Hund, Katze und Maus!"]


@pytest.mark.parametrize("encoder_decoder", [True, False])
def test_texts_end_with_the_end_token_or_start_with_the_start_token(encoder_decoder: bool) -> None:
    tokenizer, again = (train_tokenizer(TEXTS, 80, encoder_decoder) for _ in range(2))
    assert tokenizer.get_vocab() == again.get_vocab() and len(tokenizer) <= 80
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    ids = tokenizer("Hund, Katze und Maus!")["input_ids"]
    assert (ids[-1] == 1, ids.count(1), ids[0] == 3) == (
        (True, 1, False) if encoder_decoder else (False, 0, True)
    )
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Hund, Katze und Maus!"


def test_a_decoder_needs_a_position_for_every_token() -> None:
    require_room([3, 5], outline(LlamaConfig(max_position_embeddings=5)))
    require_room([3, 5], outline(T5Config()))
    with pytest.raises(
        UserError, match="longest example has 5 tokens, but the model has positions for 4"
    ):
        require_room([3, 5], outline(LlamaConfig(max_position_embeddings=4)))


def test_a_rotation_that_the_longest_row_of_a_batch_changes_is_refused_as_decoding_refuses_it() -> (
    None
):
    """Fault: rows of 20 tokens were rotated otherwise beside one of 25."""
    longrope = outline(configuration("phi3/longrope"))
    require_room([20, 24], longrope)
    with pytest.raises(UserError, match="has 25 tokens, but the model has positions for 24"):
        require_room([20, 25], longrope)


def test_positions_that_are_counted_after_the_padding_are_fewer() -> None:
    """Fault: an example as long as RoBERTa's table ended in an error of the module."""
    sizes = {**DECODER, "max_position_embeddings": 20, "pad_token_id": 1, "is_decoder": True}
    roberta = outline(AutoConfig.for_model("roberta", **sizes))
    require_room([18], roberta)
    with pytest.raises(UserError, match="has 19 tokens, but the model has positions for 18"):
        require_room([19], roberta)


def test_the_outline_of_a_fresh_model_is_that_of_the_model_and_draws_nothing() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 20, "is_decoder": True}
    start = FromScratch(FreshModel(name="new", config={"model_type": "roberta", **sizes}), 4)
    tokenizer = train_tokenizer(["Hund und Katze"], 40, encoder_decoder=False)
    state = torch.get_rng_state()
    fresh = start.outline(tokenizer)
    assert fresh.device.type == "meta" and torch.equal(torch.get_rng_state(), state)
    require_room([19], fresh)  # its padding is token 0
    with pytest.raises(UserError, match="positions for 19"):
        require_room([20], fresh)


def outline(config: PreTrainedConfig) -> PreTrainedModel:
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config)
