"""Sentences, as summary-level ROUGE compares them: of English texts by Punkt, of others by their
marks.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nltk.tokenize.punkt import PunktSentenceTokenizer

# whose full stop ends no sentence, where NLTK's own list of 156 is not installed
ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof st jr sr gen col lt sgt capt rev hon gov sen rep vs inc ltd co corp jan feb"
    " mar apr jun jul aug sept oct nov dec u.s u.k u.n d.c p.m a.m e.g i.e ph.d".split()
)


# a mark that ends a sentence: with a space after it, or in Chinese and Japanese without
_ENDS = re.compile(r"(?<=[.!?…।॥؟۔።։])\s+|(?<=[。！？｡])\s*(?=\S)")


def sentence_lines(text: str, english: bool = True) -> str:
    """The text with a line for each sentence.

    Of English as `postprocess_text` of Transformers' run_summarization.py makes it, of other
    languages by the marks that end sentences: abbreviations are not known there.
    """
    if not english:
        return "\n".join(_ENDS.split(text.strip()))
    return "\n".join(_splitter()[0].tokenize(text.strip()))


def splitter_name(english: bool = True) -> str:
    """What splits sentences here, for a metric's signature."""
    return _splitter()[1] if english else "marks"


@lru_cache(maxsize=1)
def _splitter() -> tuple[PunktSentenceTokenizer, str]:
    """NLTK's Punkt with its English data, which is what `nltk.sent_tokenize` is; without data, with
    `ABBREVIATIONS`.
    """
    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer, PunktTokenizer

    try:
        return PunktTokenizer("english"), "punkt_tab"
    except LookupError:
        parameters = PunktParameters()
        parameters.abbrev_types = set(ABBREVIATIONS)
        return PunktSentenceTokenizer(parameters), "punkt_abbreviations"
