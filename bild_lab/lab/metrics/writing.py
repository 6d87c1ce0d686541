"""How texts are read by the language that they are written in: their words, sentences and numbers.

English is cut into words as published numbers were: BLEU by 13a, ROUGE by Google's tokenizer, which
drops every letter but a to z. Other languages with spaces keep 13a for BLEU, and for ROUGE take
words of Unicode letters. Languages without spaces take a tokenizer of sacrebleu: `zh`, `ja-mecab`,
`ko-mecab` (Korean words carry their endings) or `char`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache
from typing import Any

import regex

from bild_lab.errors import UserError
from bild_lab.lab.metrics.sentence_data import english_splitter

References = Sequence[Sequence[str]]

# kinds of text; the others are named after their tokenizer
ENGLISH, SPACED = "English", "words with spaces"
ZH, JA, KO, CHAR = "zh", "ja-mecab", "ko-mecab", "char"
ASCII, UNICODE = "ascii", "unicode"
BLEU_TOKENIZERS = ("13a", "intl", ZH, JA, KO, CHAR, "none", "flores200")  # names of sacrebleu
ROUGE_TOKENIZERS = (ASCII, UNICODE, ZH, JA, KO, CHAR)

# two letters as in dataset.language, mBART and M2M-100; three and a script in NLLB
_KIND_OF_LANGUAGE = {
    **dict.fromkeys(("en", "eng"), ENGLISH),
    **dict.fromkeys(("zh", "zho", "yue"), ZH),
    **dict.fromkeys(("ja", "jpn"), JA),
    **dict.fromkeys(("ko", "kor"), KO),
    **dict.fromkeys(
        ("th", "tha", "lo", "lao", "km", "khm", "my", "mya", "bo", "bod", "dz", "dzo"), CHAR
    ),
}
# the codes of languages in two letters, but for kr, which is Kanuri and mostly meant as Korean
ISO_639_1 = frozenset(
    "aa ab ae af ak am an ar as av ay az ba be bg bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de"
    " dv dz ee el en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz"
    " ia id ie ig ii ik io is it iu ja jv ka kg ki kj kk kl km kn ko ks ku kv kw ky la lb lg li ln"
    " lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no nr nv ny oc oj om or os pa"
    " pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su sv sw ta te tg"
    " th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu".split()
)
# "1,5" is one and a half, and "1.000" a thousand
DECIMAL_COMMA = frozenset(
    "az be bg bs ca cs da de el es et eu fi fr gl hr hu hy id is it ka kk lt lv mk nb nl nn no pl"
    " pt ro ru sk sl sq sr sv tr uk uz vi".split()
)

# from this share of the letters on a text is of that language, Latin names and numbers included
MANY_UNSPACED = 0.1
# above this share of the letters a text is not English; German has four times as many
MANY_ACCENTED = 0.005
_COUNTED = {
    "letters": r"\p{L}",
    "accented": r"[^\P{L}\x00-\x7f]",
    ZH: r"\p{Han}",
    JA: r"[\p{Hiragana}\p{Katakana}]",
    KO: r"\p{Hangul}",
    CHAR: r"[\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}]",
}
# letters with their marks and digits; joiners are inside words of Hindi and Persian
_WORD = regex.compile(r"[\p{L}\p{M}\p{N}\u200c\u200d]+")
_INSTALL = {JA: "pip install 'sacrebleu[ja]'", KO: "pip install 'sacrebleu[ko]'"}


def require_tokenizer(name: str | None, metrics: Sequence[str]) -> None:
    """Raise UserError for a tokenizer that none of these metrics knows."""
    if name is None:
        return
    rouge = any(metric.startswith("rouge") for metric in metrics)
    known_tokenizers = (
        *(BLEU_TOKENIZERS if "bleu" in metrics else ()),
        *(ROUGE_TOKENIZERS if rouge else ()),
    )
    if not known_tokenizers:
        raise UserError(
            f"dataset.tokenize={name} is for bleu and rouge, got metric {', '.join(metrics)}; set"
            " dataset.tokenize=null"
        )
    if name not in known_tokenizers:
        names = ", ".join(dict.fromkeys(known_tokenizers))
        raise UserError(
            f"dataset.tokenize must be one of {names} for {', '.join(metrics)}, got {name!r}"
        )


def require_language(code: str | None) -> None:
    """Raise UserError for what is no code of a language, such as its name or a country's code."""
    if code is None:
        return
    if (
        not regex.fullmatch(r"[a-z]{2}([-_][A-Za-z]{2,4})?", code)
        or _language_alone(code) not in ISO_639_1
    ):
        raise UserError(
            "dataset.language must be a code of two letters such as en, de or zh-CN, got"
            f" {code!r}; a country's code is another one: Chinese is zh, Japanese ja, Korean ko"
        )


@dataclass(frozen=True)
class Writing:
    """What decides how the texts of a metric are read.

    tokenize: `dataset.tokenize`, for the metrics that know it. language: the references' language;
    None: their script decides. kind: the kind of their text, known after `of`.
    """

    tokenize: str | None = None
    language: str | None = None
    kind: str | None = None

    def of(self, references: References) -> Writing:
        """The writing with the kind of these references, unless its kind is known."""
        if self.kind:
            return self
        return replace(self, kind=kind_of_language(self.language) or kind_of_texts(references))

    def reads_like_english(self, metric: str) -> bool:
        """Whether a metric reads these texts as it reads English."""
        if metric == "numeric":
            return not self.decimal_comma
        if metric.startswith("rouge"):
            return self.rouge == ASCII
        return self.kind in (ENGLISH, SPACED) and (metric != "bleu" or self.bleu == "13a")

    @property
    def bleu(self) -> str:
        """The tokenizer of BLEU."""
        default = "13a" if self.kind in (ENGLISH, SPACED) else self.kind
        return self.tokenize if self.tokenize in BLEU_TOKENIZERS else default

    @property
    def rouge(self) -> str:
        """The tokenizer of ROUGE."""
        default = {ENGLISH: ASCII, SPACED: UNICODE}.get(self.kind, self.kind)
        return self.tokenize if self.tokenize in ROUGE_TOKENIZERS else default

    @property
    def decimal_comma(self) -> bool:
        return self.language is not None and _language_alone(self.language) in DECIMAL_COMMA


def _language_alone(code: str) -> str:
    """de of de_DE and de-AT, zho of zho_Hans."""
    return code.lower().replace("-", "_").partition("_")[0]


BY_SCRIPT = Writing()  # the references alone decide


def kind_of_language(code: str | None) -> str | None:
    """What texts of a language are like; None for no language."""
    return None if code is None else _KIND_OF_LANGUAGE.get(_language_alone(code), SPACED)


def kind_of_texts(references: References) -> str:
    """What these texts are like, by the letters in them. Repeated references count once."""
    return _kind_of(frozenset(text for text_references in references for text in text_references))


@lru_cache(maxsize=8)
def _kind_of(texts: frozenset[str]) -> str:
    counts = dict.fromkeys(_COUNTED, 0)
    for text in texts:
        for name, letters in _COUNTED.items():
            counts[name] += len(regex.findall(letters, text))
    # a Chinese text may hold a Japanese name
    if counts[JA] >= MANY_UNSPACED * (counts[JA] + counts[ZH]):
        counts[JA] += counts[ZH]
    kind = max((JA, ZH, KO, CHAR), key=counts.get)
    if counts["letters"] and counts[kind] >= MANY_UNSPACED * counts["letters"]:
        return kind
    return SPACED if counts["accented"] > MANY_ACCENTED * counts["letters"] else ENGLISH


@lru_cache(maxsize=8)
def sacrebleus_tokenizer(name: str) -> Callable[[str], str]:
    """A tokenizer of sacrebleu: from a text to its tokens with spaces between.

    Raises UserError for one whose package is not installed, or whose files cannot be downloaded.
    """
    from sacrebleu.metrics import BLEU

    try:
        return BLEU(tokenize=name).tokenizer
    except Exception as error:  # the package, its dictionary or a download fails
        remedy = _INSTALL.get(name, "see whether its model can be downloaded")
        missing = name in _INSTALL and isinstance(error, RuntimeError)
        reason = "it is not installed" if missing else " ".join(str(error).split())
        raise UserError(
            f"the tokenizer {name} cannot be used ({reason:.200}): {remedy}, or choose another,"
            f" such as dataset.tokenize={CHAR}, or dataset.metric=chrf, which needs none"
        ) from error


@dataclass(frozen=True)
class WordTokenizer:
    """What `rouge_score` takes as a tokenizer: lower-case tokens with letters or digits in them.

    name: one of ROUGE_TOKENIZERS but ascii, which is its own.
    """

    name: str

    def tokenize(self, text: str) -> list[str]:
        """The tokens of a text. Letters that can be written in two ways are equal (NFKC)."""
        normal = unicodedata.normalize("NFKC", text).lower()
        if self.name == UNICODE:
            return _WORD.findall(normal)
        if self.name == CHAR:  # a letter with its marks is one
            return [letter for letter in regex.findall(r"\X", normal) if _WORD.search(letter)]
        return [
            token
            for token in sacrebleus_tokenizer(self.name)(normal).split()
            if _WORD.search(token)
        ]


def rouge_tokenizer(name: str) -> Any:
    """The tokenizer that `rouge_score` takes; None for Google's own."""
    return None if name == ASCII else WordTokenizer(name)


# a mark that ends a sentence: with a space after it, or in Chinese and Japanese without
_ENDS = re.compile(r"(?<=[.!?…।॥؟۔።։])\s+|(?<=[。！？｡])\s*(?=\S)")


def sentence_lines(text: str, english: bool = True) -> str:
    """The text with a line for each sentence.

    Of English as `postprocess_text` of Transformers' run_summarization.py makes it, of other
    languages by the marks that end sentences: abbreviations are not known there.
    """
    if not english:
        return "\n".join(_ENDS.split(text.strip()))
    return "\n".join(english_splitter()[0].tokenize(text.strip()))


def splitter_name(english: bool = True) -> str:
    """What splits sentences here, for a metric's signature."""
    return english_splitter()[1] if english else "marks"


# minus and plus of typesetting
_SIGNS = {"\u2212": "-", "\ufe63": "-", "\uff0d": "-", "\uff0b": "+"}
# full-width and Arabic marks
_MARKS = {"\uff0c": ",", "\uff0e": ".", "\u066b": ".", "\u066c": "_"}
# spaces that group digits, and never part words from words
_SPACES = dict.fromkeys("\u00a0\u2007\u2009\u202f", "_")
_APOSTROPHES = dict.fromkeys("'\u2019", "_")
# a comma without the space of a list, a thin space and its opposite, as TeX writes them
_TEX = {"{,}": ",", r"\,": "_", r"\!": ""}
# the mark of a currency between a sign and its number: -$5, in TeX -\$5
_SIGNED_CURRENCY = regex.compile(r"(?<=(?<!\w)[-+])\\?\p{Sc}(?=[\d.,])")
_PLAIN = str.maketrans({**_SIGNS, **_MARKS, **_SPACES, **_APOSTROPHES})

_SIGN = r"(?:(?<!\d)[-+])?"
# thousands by "_", which stands for a space that does not break, an apostrophe or ٬; before either
# mark of decimals
_GROUPED = r"\d{1,3}(?:_\d{3})+(?!\d)(?:[.,]\d+)?"
# numbers that are clear in any language: point and comma together, the same mark twice
_POINTS = r"[1-9]\d{0,2}(?:\.\d{3})+,\d+(?!\.?\d)|[1-9]\d{0,2}(?:\.\d{3}){2,}(?!\.?\d)"
_COMMAS = r"[1-9]\d{0,2}(?:,\d{3})+\.\d+(?!,?\d)|[1-9]\d{0,2}(?:,\d{3}){2,}(?!,?\d)"
_ONE_POINT = r"(?:0\.\d+|\d+\.(?:\d{1,2}|\d{4,}))(?!\d)"  # a point that groups no thousands
_POINT_DECIMALS = r"(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)"
_COMMA_DECIMALS = (
    r"(?:[1-9]\d{0,2}(?:\.\d{3})+(?!\d)|[1-9]\d{0,2}(?: \d{3})+(?!\d)|\d+)?(?:,\d+)?(?<=\d)"
)
# 1.5e3 and 1e-05, as programs write numbers
_EXPONENT = r"(?:[eE][-+]?\d{1,3}(?!\w))?"
_WITH_POINT = re.compile(
    f"(?![eE]){_SIGN}"
    f"(?:(?P<grouped>{_GROUPED})|(?P<comma>{_POINTS})|(?P<point>{_POINT_DECIMALS})){_EXPONENT}"
)
_WITH_COMMA = re.compile(
    f"(?![eE]){_SIGN}"
    f"(?:(?P<grouped>{_GROUPED})|(?P<point>{_COMMAS}|{_ONE_POINT})|(?P<comma>{_COMMA_DECIMALS}))"
    f"{_EXPONENT}"
)


# what stands before a number that is only a part of one: of a fraction, a ratio, a time or a power
_PART_OF_A_NUMBER = re.compile(
    r"(?:\d\s*/\s*|\d:|(?:\^|\*\*)\s*[{(]?\s*|\\[dt]?frac\s*\{[^{}]*\}\s*\{\s*)$"
)


def last_number(text: str, decimal_comma: bool = False) -> Decimal | None:
    """The last number in a text; None if there is none.

    Digits of any script count, as do the minus of typesetting, and thousands grouped by apostrophes
    or by spaces that do not break, also as TeX writes them. "1.234,56" and "1,234.56" are clear. Of
    what is not, "1,234" and "1,5", decimal_comma decides: whether commas come before decimals, and
    points or spaces between thousands. 1.5e3 is one number; a fraction is two, and so is 2 × 10^3.
    """
    number = _last_match(text, decimal_comma)
    return None if number is None else _value(number)


def ends_within_a_number(text: str, decimal_comma: bool = False) -> bool:
    """Whether the last number in a text is a part of what is meant: the 4 of 3/4, the 3 of 10^3, the
    1 of 1½, the 3 of 3万.
    """
    number = _last_match(text, decimal_comma)
    if number is None:
        return False
    before, behind = number.string[: number.start()], number.string[number.end() :]
    is_factor = behind != "" and unicodedata.numeric(behind[0], None) is not None
    return is_factor or _PART_OF_A_NUMBER.search(before) is not None


def _last_match(text: str, decimal_comma: bool) -> re.Match[str] | None:
    pattern = _WITH_COMMA if decimal_comma else _WITH_POINT
    numbers = [match for match in pattern.finditer(_plain(text)) if match[0]]
    return numbers[-1] if numbers else None


def _plain(text: str) -> str:
    """The text with ASCII digits and signs. ² and other powers are no digits."""
    for written, mark in _TEX.items():
        text = text.replace(written, mark)
    plain = _SIGNED_CURRENCY.sub("", text.translate(_PLAIN))
    if plain.isascii():
        return plain
    return "".join(
        str(unicodedata.decimal(character)) if character.isdecimal() else character
        for character in plain
    )


def _value(number: re.Match[str]) -> Decimal:
    if number["grouped"]:
        return Decimal(number[0].replace("_", "").replace(",", "."))
    if number["comma"]:
        return Decimal(number[0].replace(".", "").replace(" ", "").replace(",", "."))
    return Decimal(number[0].replace(",", ""))


def same_number(text: str, references: Sequence[str], decimal_comma: bool = False) -> bool:
    """Whether a text's last number is the last one of a reference (Cobbe et al., 2021).

    A text without a number is wrong. Marks between thousands, and zeros at the end of decimals, do
    not count.
    """
    number = last_number(text, decimal_comma)
    return number is not None and any(
        number == last_number(reference, decimal_comma) for reference in references
    )
