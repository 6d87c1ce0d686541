"""Models, tokenizers and examples that do not go together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import LlamaConfig, T5Config

from bild_lab.engine.models.checkpoint import decoder_depth
from bild_lab.errors import UserError
from bild_lab.lab.data.examples import Example
from bild_lab.training.fit_checks import require_references, require_room
from tests.tiny import tiny_llama, tiny_t5


def test_the_depth_is_that_of_the_decoder() -> None:
    assert decoder_depth(tiny_t5(0, layers=1, decoder_layers=3).config) == 3
    assert decoder_depth(tiny_llama(0, layers=4).config) == 4


def test_an_example_without_a_reference_is_refused() -> None:
    example = Example("train-0", "w5 w6", "w5 w6 w7", ("w8 w9 w10", "another"))
    require_references([example])
    with pytest.raises(UserError, match="example train-7 has no reference to learn from"):
        require_references([example, replace(example, id="train-7", references=())])


def test_a_decoder_needs_a_position_for_every_token() -> None:
    require_room([3, 5], LlamaConfig(max_position_embeddings=5))
    require_room([3, 5], T5Config())
    with pytest.raises(UserError, match="longest example has 5 tokens, but the model has positions for 4"):
        require_room([3, 5], LlamaConfig(max_position_embeddings=4))
