"""The peers run with the request's settings and nothing that another run left behind."""

from __future__ import annotations

from pathlib import Path

import bild_lab


def test_a_fixed_window_of_assisted_generation_does_not_leak_into_runs_as_shipped(checkpoints: Path) -> None:
    target, draft = str(checkpoints / "llama"), str(checkpoints / "llama-draft")
    shipped = bild_lab.load(target, draft, "hf_assisted")
    fixed = bild_lab.load(target, draft, "hf_assisted", window=2)
    drafts_with = []
    for decoder in (shipped, fixed, shipped):
        decoder.generate("w5 w9", max_new_tokens=4)
        drafts_with.append(decoder.models[1].module.generation_config.num_assistant_tokens)
    assert drafts_with[1] == 2
    assert drafts_with[0] == drafts_with[2] != 2


def test_a_checkpoints_own_generation_settings_are_left_out(checkpoints: Path) -> None:
    decoder = bild_lab.load(str(checkpoints / "llama"), policy="hf_generate")
    expected = decoder.generate("w5 w9 w30", max_new_tokens=20).token_ids
    decoder.target.module.generation_config.repetition_penalty = 50.0
    decoder.target.checkpoint.generation.repetition_penalty = 50.0
    assert decoder.generate("w5 w9 w30", max_new_tokens=20).token_ids == expected
