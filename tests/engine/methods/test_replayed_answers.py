"""Texts of any engine, replayed: found by their prompts, written in the target's own tokens, cut by
the limits.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bild_lab
from bild_lab.engine.methods.replayed_answers import Wording, read_answers, written_answer
from bild_lab.errors import UserError
from tests.checkpoints import tiny_checkpoints, vanilla
from tests.tiny import END, START, VOCABULARY

PROMPT = "w5 w9 w30 w12"
LIMIT = 12


def own(family: str, prompt: str = PROMPT, limit: int = LIMIT) -> list[int]:
    """The target's own tokens."""
    return vanilla(family).generate(prompt, limit).token_ids


def written(file: Path, *answers: tuple[object, object]) -> Path:
    file.write_text(
        "".join(
            json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in answers
        )
    )
    return file


def replayed(
    family: str, answer: object, folder: Path, limit: int = LIMIT, **options: object
) -> list[int]:
    """The tokens that are replayed of one answer to the prompt."""
    file = written(folder / "answers.jsonl", (PROMPT, answer))
    decoder = bild_lab.load(str(tiny_checkpoints() / family), policy="answers", file=str(file))
    return decoder.generate(PROMPT, limit, **options).token_ids


@pytest.mark.parametrize("family", ["llama", "qwen3", "t5"])
def test_the_targets_own_answer_has_its_tokens_whether_given_as_text_or_ids(
    family: str, tmp_path: Path
) -> None:
    tokens = own(family)
    text = vanilla(family).text(tokens)
    assert replayed(family, tokens, tmp_path) == tokens
    if tokens[-1] > START:  # of a special token at its end a text says nothing
        assert (
            replayed(family, text, tmp_path) == replayed(family, f" {text}\n", tmp_path) == tokens
        )


def test_a_planted_token_is_replayed_at_its_place(tmp_path: Path) -> None:
    tokens = own("llama")
    wrong = [*tokens[:4], tokens[4] % (VOCABULARY - 4) + 4, *tokens[5:]]
    assert wrong[4] != tokens[4]
    assert replayed("llama", wrong, tmp_path) == wrong
    assert replayed("llama", vanilla("llama").text(wrong), tmp_path)[:5] == wrong[:5]


def test_an_answer_that_is_shorter_than_the_limit_has_ended(tmp_path: Path) -> None:
    tokens = own("llama")
    assert len(tokens) == LIMIT and END not in tokens
    for short in (tokens[:6], vanilla("llama").text(tokens[:6]), []):
        assert replayed("llama", short, tmp_path) == [*tokens[: 6 if short else 0], END]
    assert replayed("llama", [], tmp_path, limit=1) == [END]


def test_answers_are_cut_after_an_end_token_at_a_stop_string_and_at_the_limit(
    tmp_path: Path,
) -> None:
    tokens = own("llama")
    decoder = vanilla("llama")
    assert replayed("llama", [*tokens[:3], END, 5, 6], tmp_path) == [*tokens[:3], END]
    assert replayed("llama", tokens, tmp_path, limit=5) == tokens[:5]
    assert replayed("llama", decoder.text(tokens), tmp_path, limit=5) == tokens[:5]
    stop = decoder.pieces([tokens[4]])[tokens[4]].strip()
    first = next(
        place for place, token in enumerate(tokens) if stop in decoder.pieces([token])[token]
    )
    expected = decoder.generate(PROMPT, LIMIT, stop=stop)
    assert len(expected.token_ids) == first + 1
    # an engine may leave the stop string out, or not
    for answer in (tokens, decoder.text(tokens), expected.text):
        assert replayed("llama", answer, tmp_path, stop=stop) == expected.token_ids


def test_prompts_are_found_by_their_tokens(tmp_path: Path) -> None:
    folder, source = str(tiny_checkpoints() / "llama"), vanilla("llama").request("w7", 3).source
    file = written(tmp_path / "answers.jsonl", (PROMPT, [5, END]), (list(source.prompt), [6, END]))
    decoder = bild_lab.load(folder, policy="answers", file=str(file))
    assert decoder.generate("w7", 3).token_ids == [6, END]
    assert decoder.generate(list(decoder.request(PROMPT, 3).source.prompt), 3).token_ids == [5, END]


def test_what_has_no_answer_is_refused_before_weights_load(tmp_path: Path) -> None:
    folder = str(tiny_checkpoints() / "llama")
    file = written(tmp_path / "answers.jsonl", (PROMPT, [5]))
    # a model of its own
    decoder = bild_lab.load(folder, policy="answers", file=str(file), dtype="float16")
    with pytest.raises(
        UserError, match=r"answers.jsonl has no answer to the prompt 'w7 w8' \(\d tokens\)"
    ):
        decoder.generate("w7 w8", 3)
    with pytest.raises(UserError, match="got decoding.temperature=1.0; use decoding=greedy"):
        decoder.generate(PROMPT, 3, temperature=1.0)
    assert "module" not in vars(decoder.target.transformers)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (
            [(PROMPT, [5]), ("w7", [VOCABULARY + 40])],
            (
                f"line 2: tokens must be from 0 to {VOCABULARY - 1}, got {VOCABULARY + 40}; is"
                " pair.target the model"
            ),
        ),
        ([([VOCABULARY + 40], [5])], "line 1: the tokens of a prompt must be from 0 to"),
        ([([], [5])], "line 1: the prompt .* has no tokens"),
        (
            [("w7", [5]), (PROMPT, [5]), (PROMPT, [6])],
            "lines 2 and 3 answer the same prompt differently",
        ),
        ([(PROMPT, "\ud83d")], "line 1: an answer must be Unicode text"),
    ],
)
def test_lines_that_do_not_fit_the_target_are_refused(
    answers: list, message: str, tmp_path: Path
) -> None:
    file = written(tmp_path / "answers.jsonl", *answers)
    decoder = bild_lab.load(str(tiny_checkpoints() / "llama"), policy="answers", file=str(file))
    with pytest.raises(UserError, match=message):
        decoder.request(PROMPT, 3)


def test_equal_lines_are_one_answer(tmp_path: Path) -> None:
    file = written(tmp_path / "answers.jsonl", (PROMPT, [5, END]), (PROMPT, [5, END]))
    decoder = bild_lab.load(str(tiny_checkpoints() / "llama"), policy="answers", file=str(file))
    assert decoder.generate(PROMPT, 3).token_ids == [5, END]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("", "holds no answers"),
        ('{"prompt": "w5"}', "line 1: each line must be a JSON object with prompt and answer"),
        ('\n{"prompt": "w5", "answer": [3, -1]}', "line 2"),
        ('{"prompt": "w5", "answer": [3.5]}', "line 1"),
        ('{"prompt": "w5", "answer": [true]}', "line 1"),
        ("w5", "got no JSON"),
    ],
)
def test_other_files_are_refused(content: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=message):
        read_answers(file)


def test_without_a_file_there_is_nothing_to_replay() -> None:
    with pytest.raises(UserError, match=r"got None; set policy.file=FILE.jsonl"):
        bild_lab.load(str(tiny_checkpoints() / "llama"), policy="answers")


class Pieces:
    """A checkpoint whose tokenizer takes the longest of a few pieces; it has several ways to write
    a text.
    """

    names = ("<pad>", "<end>", "a", "b", "ab", " ", "\n", "\n\n", "Q", ":", "\n\nQ:", " a")
    names += ("<C3>", "<A4>")  # the bytes of ä
    end_tokens = frozenset([1])
    all_special_ids = (0, 1)

    @property
    def tokenizer(self) -> Pieces:
        return self

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        found: list[int] = []
        text = text.replace("ä", "<C3><A4>")
        while text:
            best = max((name for name in self.names[2:] if text.startswith(name)), key=len)
            found.append(self.names.index(best))
            text = text.removeprefix(best)
        return found

    def continuation(self, tokens: list[int]) -> str:
        names = (self.names[token] for token in tokens if token not in self.all_special_ids)
        text = "".join(names).replace("<C3><A4>", "ä")
        return text.replace("<C3>", "\ufffd").replace("<A4>", "\ufffd")


def wording(text: str, target: str, stop: tuple[str, ...] = (), may_be_cut: bool = False) -> str:
    """How a text is written where the target's own tokens are these, parted by bars, whatever was
    written before.
    """
    checkpoint = Pieces()
    own = [checkpoint.names.index(name) for name in target.split("|")]
    one, tokens = Wording(checkpoint, text, stop), []
    for token in own:
        tokens.append(one.next(tokens, token, may_be_cut))
        if tokens[-1] == 1:
            break
    return "|".join(checkpoint.names[token] for token in tokens)


def test_a_text_is_written_by_the_targets_own_tokens_as_long_as_they_write_it() -> None:
    assert wording("abab", "a|b|ab|<end>") == "a|b|ab|<end>"
    assert wording("abab", "ab|a|b|<end>") == "ab|a|b|<end>"
    # the second differs, the tokenizer goes on
    assert wording("abab", "ab|b|ab|<end>") == "ab|ab|<end>"
    # of which a text says nothing
    assert wording("abab", "<pad>|ab|ab|<end>") == "<pad>|ab|ab|<end>"


def test_white_space_inside_a_text_counts_and_at_its_ends_does_not() -> None:
    assert wording("a b", "a| |b|<end>") == "a| |b|<end>"
    # another space than the target's: a difference there
    assert wording("a b", "a|\n|b|<end>") == "a| |b|<end>"
    assert wording("a", "\n|a|\n|<end>") == "\n|a|\n|<end>"
    assert wording(" a\n", "a|b|a") == "a|<end>"


def test_the_answers_own_white_space_is_written_where_the_targets_token_is_another() -> None:
    # otherwise the tokens would be judged at one that no engine sent
    assert wording(" ab", "Q|b|<end>") == " a|b|<end>"
    assert wording("ab", "Q|b|<end>") == "ab|<end>"
    assert wording(" ab", "\n|Q|b|<end>") == "\n| a|b|<end>"
    assert wording("\n\na", "Q|Q|<end>") == "\n\n|a|<end>"
    assert wording("\n\na", "\n|Q|Q|Q|<end>") == "\n|\n\n|a|<end>"


@pytest.mark.parametrize("text", ["a", ""])
def test_bytes_after_an_answer_are_no_part_of_it_unless_it_was_cut_there(text: str) -> None:
    begun = "a|" if text else ""
    assert wording(text, f"{begun}<C3>|<A4>") == f"{begun}<end>"
    assert wording(text, f"{begun}\n|<C3>") == f"{begun}\n|<end>"
    assert wording(text, f"{begun}<C3>|b", may_be_cut=True) == f"{begun}<C3>|<end>"
    assert wording(f"{text}\ufffd", f"{begun}<C3>|b") == f"{begun}<C3>|<end>"
    assert wording(f"{text} \ufffd", f"{begun}b") == f"{begun}<end>"


def test_a_character_of_several_bytes_is_written_by_each_of_them_once() -> None:
    assert wording("aä", "a|<C3>|<A4>|<end>") == "a|<C3>|<A4>|<end>"
    # other tokens than the tokenizer's before it
    assert wording("abä", "a|b|Q|Q|<end>") == "a|b|<C3>|<A4>|<end>"
    assert wording("abäb", "a|b|<C3>|Q|Q|<end>") == "a|b|<C3>|<A4>|b|<end>"


@pytest.mark.parametrize(
    ("cut", "told"),
    [(None, [False, False, True, True, True]), (True, [True] * 5), (False, [False] * 5)],
)
def test_where_nobody_knows_an_answer_may_be_cut_in_the_last_character_before_the_limit(
    cut: bool | None, told: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, next_token, found = vanilla("llama"), Wording.next, []

    def spied(wording: Wording, tokens: list[int], target_token: int, may_be_cut: bool) -> int:
        found.append(may_be_cut)
        return next_token(wording, tokens, target_token, may_be_cut)

    monkeypatch.setattr(Wording, "next", spied)
    text = decoder.text(own("llama"))
    tokens = list(written_answer(decoder.target, decoder.request(PROMPT, 5), text, cut))
    assert [token for (token,) in tokens] == own("llama")[:5] and found == told


def test_a_stop_string_that_an_engine_left_out_is_the_targets_own() -> None:
    stop = ("\n\nQ:",)
    for text in ("ab", "ab\n\nQ: a"):
        assert wording(text, "ab|\n\n|Q|:", stop) == "ab|\n\n|Q|:"
        assert wording(text, "ab|\n\nQ:", stop) == "ab|\n\nQ:"
        assert wording(text, "ab|\n\n|a|b", stop) == "ab|\n\n|<end>"
