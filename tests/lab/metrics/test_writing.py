"""Metrics of words fit the language of the references, and refuse where they cannot."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterator, Sequence

import pytest
from sacrebleu.metrics import BLEU, TER

from bild_lab.errors import UserError
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.metrics.quality import Scoring, score
from bild_lab.lab.metrics.writing import (
    ENGLISH,
    SPACED,
    WordTokenizer,
    Writing,
    kind_of_texts,
    sacrebleus_tokenizer,
    sentence_lines,
)

CHINESE, JAPANESE = "我喜欢在公园里散步。", "私は公園を散歩するのが好きです。"
KOREAN, THAI = "나는 공원에서 산책하는 것을 좋아한다.", "ฉันชอบเดินเล่นในสวนสาธารณะ"
RUSSIAN, HINDI, ARABIC = "Кошка спит на диване.", "बिल्ली सोफे पर सो रही है", "القِطَّة نائمة"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (
            "The café was naïve, said Beyoncé, " + "and everybody went home early that day. " * 20,
            ENGLISH,
        ),
        ("42", ENGLISH),
        ("Die Frau grüßt den Müller vor dem Haus.", SPACED),
        (RUSSIAN, SPACED),
        (HINDI, SPACED),
        (ARABIC, SPACED),
        (f"{CHINESE} iPhone 15 Pro", "zh"),
        (CHINESE + JAPANESE[:2], "zh"),
        (JAPANESE, "ja-mecab"),
        (KOREAN, "ko-mecab"),
        (THAI, "char"),
    ],
)
def test_what_texts_are_like_is_seen_in_their_letters(text: str, kind: str) -> None:
    assert kind_of_texts([[text]]) == kind
    assert kind_of_texts([["Yes."], [text], [text]]) == kind


@pytest.mark.parametrize(
    ("code", "bleu", "rouge"),
    [
        ("en_XX", "13a", "ascii"),
        ("nl", "13a", "unicode"),
        ("zho_Hans", "zh", "zh"),
        ("zh-CN", "zh", "zh"),
        ("ja", "ja-mecab", "ja-mecab"),
        ("kor_Hang", "ko-mecab", "ko-mecab"),
        ("tha_Thai", "char", "char"),
    ],
)
def test_a_language_decides_before_the_letters_do(code: str, bleu: str, rouge: str) -> None:
    writing = Writing(language=code).of([["plain words"]])
    assert (writing.bleu, writing.rouge) == (bleu, rouge)
    chosen = Writing("char", code).of([["plain words"]])
    assert (chosen.bleu, chosen.rouge) == ("char", "char")


@pytest.mark.parametrize("text", [RUSSIAN, HINDI, ARABIC, "Müller grüßt"])
def test_rouge_of_another_alphabet_is_full_for_equal_texts_and_less_for_others(text: str) -> None:
    quality = score("rouge1", [text, f"{text} 2026"], [[text], [f"{text[::-1]} 2026"]])
    assert (
        quality.metric == "ROUGE-1 (unicode)"
        and "tokenizer:unicode|stemmer:no" in quality.signature
    )
    assert 50 <= quality.value < 80


def test_words_keep_their_marks_however_they_are_encoded() -> None:
    tokenize = WordTokenizer("unicode").tokenize
    assert tokenize("Привет, мир!") == ["привет", "мир"]
    assert tokenize(HINDI) == HINDI.split() and tokenize(ARABIC) == ARABIC.split()
    assert tokenize("می\u200cروم") == ["می\u200cروم"]
    assert tokenize(unicodedata.normalize("NFD", "Größe")) == ["größe"]


def test_english_is_scored_as_it_was_and_says_by_what() -> None:
    quality = score("rouge1", ["the cats run"], [["the cat runs"]])
    assert (quality.metric, quality.value) == ("ROUGE-1", pytest.approx(100))  # stemmed
    assert "tokenizer:ascii|stemmer:yes" in quality.signature
    assert "tok:13a" in score("bleu", ["the cats run far"], [["the cat runs far"]]).signature


def test_chinese_is_counted_by_sacrebleus_own_tokenizer() -> None:
    texts, references = ["我喜欢在花园里散步。"], [[CHINESE]]
    quality = score("bleu", texts, references)
    assert quality.metric == "BLEU (zh)" and "tok:zh" in quality.signature
    assert quality.value == pytest.approx(
        BLEU(tokenize="zh").corpus_score(texts, [[CHINESE]]).score
    )
    assert score("rouge1", texts, references).value == pytest.approx(100 * 8 / 9)
    asian = TER(normalized=True, asian_support=True).corpus_score(texts, [[CHINESE]]).score
    ter = score("ter", texts, references)
    assert (ter.metric, ter.value) == ("100-TER (asian)", pytest.approx(100 - asian))


def test_a_language_without_spaces_or_tokenizer_is_counted_by_characters() -> None:
    quality = score("bleu", [THAI], [[THAI]])
    assert (quality.metric, quality.value) == ("BLEU (char)", pytest.approx(100))
    assert score("rouge1", [THAI], [[THAI]]).value == pytest.approx(100)
    with pytest.raises(UserError, match=r"ter counts words, .*; choose dataset\.metric=chrf"):
        score("ter", [THAI], [[THAI]])


@pytest.fixture
def imported_anew() -> Iterator[None]:
    """The modules of sacrebleu that look for MeCab, and what was loaded by them."""

    def forget() -> None:
        for extra in ("ja", "ko"):
            sys.modules.pop(f"sacrebleu.tokenizers.tokenizer_{extra}_mecab", None)
        sacrebleus_tokenizer.cache_clear()

    forget()
    yield
    forget()


@pytest.mark.usefixtures("imported_anew")
@pytest.mark.parametrize(
    ("text", "extra", "package"),
    [(JAPANESE, "ja", "MeCab"), (KOREAN, "ko", "mecab_ko")],
    ids=["ja", "ko"],
)
@pytest.mark.parametrize("metric", ["bleu", "rougeL"])
def test_a_tokenizer_that_is_not_installed_is_named_with_its_package(
    text: str, extra: str, package: str, metric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        UserError, match=rf"pip install 'sacrebleu\[{extra}\]', or .*dataset\.tokenize=char"
    ):
        score(metric, [text], [[text]])
    with pytest.raises(UserError, match=rf"{extra}-mecab cannot be used"):
        Scoring((metric,)).fitted([[text]])  # before a text is decoded
    assert score(metric, [text], [[text]], writing=Writing(tokenize="char")).value == pytest.approx(
        100
    )


@pytest.mark.parametrize(
    ("package", "text", "tokens"),
    [("MeCab", JAPANESE, ["私", "は", "公園"]), ("mecab_ko", KOREAN, ["나", "는", "공원"])],
)
def test_a_tokenizer_that_is_installed_finds_words(
    package: str, text: str, tokens: Sequence[str]
) -> None:
    pytest.importorskip(package, reason="an extra of sacrebleu")
    quality = score("bleu", [text], [[text]])
    assert quality.value == pytest.approx(100) and "mecab" in quality.metric
    assert (
        WordTokenizer("ja-mecab" if package == "MeCab" else "ko-mecab").tokenize(text)[:3] == tokens
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"metric": "bleu", "tokenize": "ascii"},
            r"dataset\.tokenize must be one of 13a, .* for bleu, got 'ascii'",
        ),
        ({"metric": "rouge", "tokenize": "13a"}, r"one of ascii, unicode, .* for rouge, got '13a'"),
        ({"metric": "chrf", "tokenize": "zh"}, "is for bleu and rouge, got metric chrf"),
        (
            {"metric": "bleu", "language": "German"},
            "code of two letters such as en, de or zh-CN, got 'German'",
        ),
        *(
            ({"metric": "bleu", "language": country}, f"got '{country}'; .* Chinese is zh")
            for country in ("cn", "jp", "kr", "zz", "cz_CZ")
        ),
    ],
)
def test_a_tokenizer_that_no_metric_has_is_refused(keys: dict[str, str], message: str) -> None:
    columns = {"name": "a", "path": "x", "source_column": "a", "reference_column": "b"}
    with pytest.raises(UserError, match=message):
        DatasetSpec(**columns, **keys)


def test_sentences_of_other_languages_end_at_their_marks() -> None:
    assert sentence_lines("你好。再见！好", english=False) == "你好。\n再见！\n好"
    assert sentence_lines("Он ушёл. Она нет? «Да»", english=False) == "Он ушёл.\nОна нет?\n«Да»"
    assert sentence_lines("यह है। वह है।", english=False) == "यह है।\nवह है।"
