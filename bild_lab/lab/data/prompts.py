"""Prompts that are too long: the source is cut, and nothing around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from bild_lab.errors import UserError
from bild_lab.lab.data.examples import Example


def cut_sources(examples: Sequence[Example], most: int | None, count: Callable[[str], int]) -> tuple[Example, ...]:
    """The examples with prompts of at most so many tokens: the end of the source is left out, the rest stays whole.

    most: None: no prompt is cut. count: how many tokens a prompt has. Raises UserError if what is around a source
    leaves no room for it.
    """
    if most is None:
        return tuple(examples)
    return tuple(one if count(one.prompt) <= most else _cut(one, most, count) for one in examples)


def _cut(example: Example, most: int, count: Callable[[str], int]) -> Example:
    def prompt_of(characters: int) -> str:
        return example.source_text[:characters].join(example.around)

    fitting = longest_fitting(len(example.source_text), lambda length: count(prompt_of(length)) <= most)
    if not fitting:
        raise UserError(
            f"dataset.max_source_tokens={most} cuts the source alone, and what is around the source of example "
            f"{example.id} has {count(prompt_of(0))} tokens, so no room is left for it; raise it, or shorten the "
            "template, the solved examples (dataset.shots) or the input"
        )
    return replace(example, prompt=prompt_of(fitting), source_text=example.source_text[:fitting])


def longest_fitting(length: int, fits: Callable[[int], bool]) -> int:
    """The greatest number below `length` that fits, where smaller numbers fit too; 0 if none does."""
    fitting, too_long = 0, length
    while too_long - fitting > 1:
        middle = (fitting + too_long) // 2
        if fits(middle):
            fitting = middle
        else:
            too_long = middle
    return fitting
