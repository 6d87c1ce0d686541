"""NLTK's sentence splitter is fetched where there is internet, and a score says where it was not."""

from __future__ import annotations

import io
import threading
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import md5
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import nltk.data
import nltk.downloader
import pytest

from bild_lab.lab.metrics import sentence_data
from bild_lab.lab.metrics.quality import score
from bild_lab.lab.metrics.sentence_data import FALLBACK, FOLDER, PACKAGE, fetch_sentence_data
from bild_lab.lab.metrics.writing import sentence_lines, splitter_name

TEXT = "It rose by approx. ten. It fell."


@pytest.fixture(autouse=True)
def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without NLTK's data, in an empty folder. NLTK reads no address of the loopback."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(nltk.downloader, "urlopen", urllib.request.urlopen)
    monkeypatch.setattr(nltk.data, "path", [])
    sentence_data.english_splitter.cache_clear()
    yield
    sentence_data.english_splitter.cache_clear()


def packed() -> bytes:
    """A package in the layout of punkt_tab, which knows one abbreviation."""
    files = {
        "abbrev_types.txt": "approx",
        "collocations.tab": "",
        "ortho_context.tab": "",
        "sent_starters.txt": "",
    }
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as package:
        for name, content in files.items():
            package.writestr(f"{PACKAGE}/english/{name}", content)
    return archive.getvalue()


@contextmanager
def nltks_server(folder: Path, damaged: bool = False) -> Iterator[str]:
    """NLTK's list of packages, with one; its address. damaged: the package is not as listed."""
    content = packed()
    (folder / f"{PACKAGE}.zip").write_bytes(content[:-9] + b"?" * 9 if damaged else content)
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=folder)
    )
    address = f"http://127.0.0.1:{server.server_port}"
    (folder / "index.xml").write_text(
        f'<nltk_data><packages><package id="{PACKAGE}" name="Punkt" subdir="tokenizers" unzip="1"'
        f' size="{len(content)}" unzipped_size="6" checksum="{md5(content).hexdigest()}"'
        f' url="{address}/{PACKAGE}.zip"/></packages><collections/></nltk_data>'
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"{address}/index.xml"
    finally:
        server.shutdown()
        server.server_close()


def test_what_was_fetched_splits_sentences_and_the_scores_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = tmp_path / "served"
    served.mkdir()
    assert splitter_name() == FALLBACK and sentence_lines(TEXT).count("\n") == 2
    with nltks_server(served) as index:
        assert fetch_sentence_data(index) is None
    assert (FOLDER / "tokenizers" / PACKAGE / "english").is_dir()
    monkeypatch.setattr(nltk.data, "path", [])  # as in another process
    sentence_data.english_splitter.cache_clear()
    assert splitter_name() == PACKAGE and sentence_lines(TEXT).count("\n") == 1
    assert f"sentences:{PACKAGE}" in score("rougeLsum", [TEXT], [[TEXT]]).signature
    assert fetch_sentence_data("http://127.0.0.1:9/") is None  # which is not asked again


def test_without_internet_or_with_a_damaged_package_the_reason_is_told(tmp_path: Path) -> None:
    assert "refused" in (fetch_sentence_data("http://127.0.0.1:9/index.xml") or "")
    served = tmp_path / "served"
    served.mkdir()
    with nltks_server(served, damaged=True) as index:
        assert fetch_sentence_data(index)
    assert splitter_name() == FALLBACK
    assert f"sentences:{FALLBACK}" in score("rougeLsum", [TEXT], [[TEXT]]).signature
