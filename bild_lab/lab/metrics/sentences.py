"""Sentences of English texts, as summary-level ROUGE compares them."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nltk.tokenize.punkt import PunktSentenceTokenizer

# whose full stop ends no sentence, where NLTK's own list of 156 is not installed
ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof st jr sr gen col lt sgt capt rev hon gov sen rep vs inc ltd co corp jan feb mar apr jun jul "
    "aug sept oct nov dec u.s u.k u.n d.c p.m a.m e.g i.e ph.d".split()
)


def sentence_lines(text: str) -> str:
    """The text with a line for each sentence, as `postprocess_text` of Transformers' run_summarization.py makes it."""
    return "\n".join(_splitter()[0].tokenize(text.strip()))


def splitter_name() -> str:
    """What splits sentences here, for a metric's signature."""
    return _splitter()[1]


@lru_cache(maxsize=1)
def _splitter() -> tuple[PunktSentenceTokenizer, str]:
    """NLTK's Punkt with its English data, which is what `nltk.sent_tokenize` is; without data, with `ABBREVIATIONS`."""
    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer, PunktTokenizer

    try:
        return PunktTokenizer("english"), "punkt_tab"
    except LookupError:
        parameters = PunktParameters()
        parameters.abbrev_types = set(ABBREVIATIONS)
        return PunktSentenceTokenizer(parameters), "punkt_abbreviations"
