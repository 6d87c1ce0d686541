"""Folders that hold results of other settings, and writes that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from bild_lab.errors import UserError
from bild_lab.lab.store.inputs import require_same_settings
from bild_lab.training.folder import writing

FOLDER = Path("outputs/one")


def test_the_same_settings_are_accepted_as_json_has_them() -> None:
    held = {"model": {"path": "there", "layers": [1, 2]}, "train.seed": 0}
    wanted = {"model": {"path": "here", "layers": (1, 2)}, "train.seed": 0}
    require_same_settings(FOLDER, "answers", held, wanted, frozenset({"model.path"}))


@pytest.mark.parametrize(
    ("held", "wanted", "message"),
    [
        ({"train.seed": 0}, {"train.seed": 1}, "train.seed=0, but this command has train.seed=1"),
        (
            {"model": {"type": "t5"}},
            {"model": {"type": "llama"}},
            "model.type=t5, but this command has model.type=lla",
        ),
        ({"a": 1, "b": 2}, {"a": 1}, "b=2, but this command has b=None"),
        ({"a": 1}, {"a": 1, "b": False}, "b=None, but this command has b=False"),
        (
            {"layers": [1]},
            {"layers": (1, 2)},
            r"layers=\[1\], but this command has layers=\[1, 2\]",
        ),
    ],
)
def test_the_first_other_setting_is_named(held: dict, wanted: dict, message: str) -> None:
    with pytest.raises(
        UserError, match=f"outputs/one holds answers with {message}.*; choose another name=NAME"
    ):
        require_same_settings(FOLDER, "answers", held, wanted)


def test_a_failed_write_removes_the_half_written_folder_and_says_how_much_is_free(
    tmp_path: Path,
) -> None:
    draft = tmp_path / ".draft"
    with pytest.raises(
        UserError, match=r"cannot write the model to .*one: No space left \(\d+ MB are free\); make"
    ):
        with writing(tmp_path / "one", "the model", half_written=draft):
            draft.mkdir()
            raise OSError("No space left")
    assert list(tmp_path.iterdir()) == []
