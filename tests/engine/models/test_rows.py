"""Every token that enters a model has an embedding: others are refused in words, and by the kernels
too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import bild_lab
from bild_lab.engine.models.cached_session import CachedSession
from bild_lab.engine.session import ChainSpec, TreeSpec
from bild_lab.errors import UserError
from tests.tiny import save, tiny_llama, tiny_tokenizer

ENGINES = ("kernels", "native", "hf")
REFUSED = (
    r"must be from 0 to 39, as .* has 40 embeddings, got 40 \('<mark>'\); resize .* or take both"
    r" from one"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 40 rows whose tokenizer has a token more, with a chat template that writes it."""
    folder = save(tiny_llama(1), tmp_path_factory.mktemp("rows"))
    tokenizer = tiny_tokenizer(False)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<mark>"]})
    tokenizer.chat_template = "<mark>{% for one in messages %}{{ one['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "prompt", ["w5 <mark> w9", [5, 40, 9], [{"role": "user", "content": "w5"}]]
)
def test_a_prompt_with_a_token_without_embedding_is_refused_before_weights_load(
    folder: Path, engine: str, prompt: object
) -> None:
    decoder = bild_lab.load(str(folder), policy="vanilla", engine=engine)
    with pytest.raises(UserError, match=REFUSED):
        decoder.generate(prompt, max_new_tokens=2)
    assert "decoder" not in vars(decoder.target) and "module" not in vars(
        decoder.target.transformers
    )


def test_so_is_a_list_of_prompts_and_a_huge_or_negative_id(folder: Path) -> None:
    decoder = bild_lab.load(str(folder), policy="vanilla")
    with pytest.raises(UserError, match=REFUSED):
        decoder.generate(["w5", "w5 <mark>"], max_new_tokens=2, batch=2)
    for token in (60_000_000, -1):
        with pytest.raises(UserError, match=f"must be from 0 to 39, .* got {token}; resize"):
            decoder.generate([5, token], max_new_tokens=2)


def test_prompts_without_it_decode(folder: Path) -> None:
    assert (
        bild_lab.load(str(folder), policy="vanilla").generate("w5 w9", max_new_tokens=3).token_ids
    )


def test_a_model_in_memory_is_asked_for_its_embeddings_not_its_configuration() -> None:
    model = tiny_llama(1)
    model.config.vocab_size = 60
    with pytest.raises(UserError, match="must be from 0 to 39, .* got 45"):
        bild_lab.load((model, tiny_tokenizer(False)), policy="vanilla").generate(
            [5, 45], max_new_tokens=2
        )


@pytest.mark.parametrize("ends", [[40], [1, 70]])
def test_an_end_token_without_embedding_is_refused(tmp_path: Path, ends: list[int]) -> None:
    model = tiny_llama(1)
    model.generation_config.eos_token_id = ends
    with pytest.raises(UserError, match=f"an end token must be from 0 to 39, .* got {ends[-1]}"):
        bild_lab.load(str(save(model, tmp_path)), policy="vanilla")


def session(folder: Path) -> CachedSession:
    model = bild_lab.load(str(folder), policy="vanilla", engine="kernels").target
    return model.start(model.source([2, 5]), 8)


@pytest.mark.parametrize("token", [40, -1, 60_000_000])
def test_the_kernels_read_nothing_after_the_embedding(folder: Path, token: int) -> None:
    refused = pytest.raises(IndexError, match=rf"token {token} has no embedding: the model has 40")
    with refused:
        session(folder).extend([5, token])
    with refused:
        session(folder).draft([5, token], ChainSpec(steps=2, end_tokens=frozenset()))
    with refused:
        session(folder).draft(
            [5, token], TreeSpec(nodes=3, depth=2, width=2, children=2, end_tokens=frozenset())
        )


def test_the_kernels_write_nothing_after_the_cache_and_read_no_position_after_the_rotations(
    folder: Path,
) -> None:
    packed = bild_lab.load(str(folder), policy="vanilla", engine="kernels").target.packed
    layers = session(folder).layers
    with pytest.raises(IndexError, match="needs a slot behind its cache"):
        packed.run(torch.tensor([5]), [layers.text_rows(layers.cache.capacity, 1)])


def test_the_number_of_rows_is_read_once_not_for_each_prompt(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, asked = bild_lab.load(str(folder), policy="vanilla").target.checkpoint, []
    read = type(target.config).get_text_config  # which copies the configuration
    monkeypatch.setattr(
        type(target.config), "get_text_config", lambda *a, **k: asked.append(1) or read(*a, **k)
    )
    counts = []
    for _ in range(3):
        target.require_rows(target.source("w5 w9"))
        counts.append(len(asked))
    assert counts[1] == counts[2]
