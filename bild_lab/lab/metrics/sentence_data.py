"""NLTK's sentence splitter for ROUGE-Lsum: where its data is, and how it is fetched."""

from __future__ import annotations

import io
import socket
import urllib.error
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nltk.tokenize.punkt import PunktSentenceTokenizer

FOLDER = Path("outputs/nltk_data")  # beside NLTK's own places
PACKAGE = "punkt_tab"
FALLBACK = "punkt_abbreviations"  # the splitter's name without NLTK's data
TIMEOUT_S = 20.0
# words whose full stop ends no sentence, where NLTK's own list of 156 is not installed
ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof st jr sr gen col lt sgt capt rev hon gov sen rep vs inc ltd co corp jan feb"
    " mar apr jun jul aug sept oct nov dec u.s u.k u.n d.c p.m a.m e.g i.e ph.d".split()
)


@lru_cache(maxsize=1)
def english_splitter() -> tuple[PunktSentenceTokenizer, str]:
    """NLTK's Punkt with its English data, which is what `nltk.sent_tokenize` is; without data, with
    `ABBREVIATIONS`. The second is its name.
    """
    import nltk.data
    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer, PunktTokenizer

    if (place := str(FOLDER.resolve())) not in nltk.data.path:
        nltk.data.path.append(place)
    try:
        return PunktTokenizer("english"), PACKAGE
    except LookupError:
        parameters = PunktParameters()
        parameters.abbrev_types = set(ABBREVIATIONS)
        return PunktSentenceTokenizer(parameters), FALLBACK


def fetch_sentence_data(index: str | None = None) -> str | None:
    """Fetch NLTK's data into `FOLDER`; returns why it could not, None if it is there.

    index: the address of NLTK's list of packages; None: its own.
    """
    from nltk.downloader import Downloader

    english_splitter.cache_clear()
    if english_splitter()[1] == PACKAGE:
        return None
    timeout_s = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_S)  # NLTK waits for ever
    try:
        Downloader(index).download(
            PACKAGE,
            download_dir=str(FOLDER),
            quiet=True,
            raise_on_error=True,
            print_error_to=io.StringIO(),  # the error says the same
        )
    except (OSError, ValueError, urllib.error.URLError) as error:
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    finally:
        socket.setdefaulttimeout(timeout_s)
    english_splitter.cache_clear()
    return None if english_splitter()[1] == PACKAGE else f"{FOLDER} holds no {PACKAGE}"
