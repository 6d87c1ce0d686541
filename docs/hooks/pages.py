"""What `mkdocs build` does besides reading docs/: pages made of other files of the repository.

- The README is the home page; the guide to contributing, the changelog and the page of notebooks
  are pages too.
- A link to any other file of the repository leads to a page that shows the file.
- A comment such as `<!-- keys -->` is replaced by what is generated in its place.
"""

from __future__ import annotations

import json
import logging
import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

from bild_lab.lab.schema.columns import TIMES
from bild_lab.lab.schema.glossary import TERMS
from bild_lab.lab.schema.result import TABLE
from docs.hooks import keys

log = logging.getLogger("mkdocs.hooks.pages")
ROOT = Path(__file__).resolve().parents[2]
PAGES = {  # files outside docs that are pages of their own
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "notebooks/README.md": "notebooks.md",
    "bild_lab/engine/README.md": "wings/engine.md",
    "bild_lab/engine/methods/README.md": "wings/methods.md",
    "bild_lab/engine/models/native/gpu/README.md": "wings/gpu.md",
    "bild_lab/lab/README.md": "wings/lab.md",
    "bild_lab/screening/README.md": "wings/screening.md",
    "bild_lab/benchmark/README.md": "wings/benchmark.md",
    "bild_lab/servers/README.md": "wings/servers.md",
    "bild_lab/report/README.md": "wings/report.md",
    "bild_lab/training/README.md": "wings/training.md",
    "bild_lab/papers/README.md": "wings/papers.md",
}
LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".toml": "toml",
    ".txt": "text",
    ".cff": "yaml",
    ".cpp": "cpp",
}
BLOCK = re.compile(r"^ *```.*?^ *```$", flags=re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:)([^)\s#]+)(#[^)\s]*)?\)")
COMMENT = re.compile(r"<!-- (keys|columns|glossary) -->")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name headings as links in the repository do."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text()))
    named = {
        path
        for page in files.documentation_pages()
        for path in linked(page.content_string, source_of(page))
    }
    shown = {path for path in named if not path.startswith("docs/") and path not in PAGES}
    for path in sorted(shown):
        file = File.generated(config, uri_of(path), content=shown_file(ROOT / path))
        file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in what is generated, and let links lead to pages of the site."""
    source = source_of(page.file)
    return COMMENT.sub(
        lambda found: generated(found[1]), with_links(markdown, source, page.file.src_uri)
    )


def generated(what: str) -> str:
    """The text in the place of a comment."""
    if what == "glossary":
        return "\n\n".join(f"**{term.words}**\n:   {term.meaning}" for term in TERMS)
    if what == "columns":
        rows = (
            f"| `{one.name}` | {one.unit.replace(TIMES, '×')} | {one.explanation} |"
            for one in TABLE
        )
        return "\n".join(("| Column | Unit | What |", "|---|---|---|", *rows))
    for key in keys.without_meaning():
        log.warning(
            "the key %s has no meaning: write a comment behind it in conf, or behind its field", key
        )
    return keys.page()


def source_of(file: File) -> str:
    """The file of the repository that a page was made of."""
    made = {uri: path for path, uri in PAGES.items()}
    if file.src_uri.startswith("source/"):
        return file.src_uri.removeprefix("source/").removesuffix(".md")
    return made.get(file.src_uri, f"docs/{file.src_uri}")


def uri_of(path: str) -> str:
    """The page that shows a file or a folder of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return PAGES.get(path, f"source/{path}.md")


def linked(markdown: str, source: str) -> Iterator[str]:
    """The files and folders of the repository that a text links to. source: the file that it is
    in.
    """
    for found in LINK.finditer(BLOCK.sub("", markdown)):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[1]))
        if (ROOT / path).exists():  # mkdocs tells of all others
            yield path


def with_links(markdown: str, source: str, uri: str) -> str:
    """The text of a file with links as they are on its page. source: the file. uri: the page."""

    def led(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[1]))
        if not (ROOT / path).exists():
            return found[0]
        return (
            f"]({posixpath.relpath(uri_of(path), posixpath.dirname(uri) or '.')}{found[2] or ''})"
        )

    parts = re.split(f"({BLOCK.pattern})", markdown, flags=BLOCK.flags)
    return "".join(part if number % 2 else LINK.sub(led, part) for number, part in enumerate(parts))


def shown_file(path: Path) -> str:
    """A page with the content of a file, or with the names of a folder's files."""
    title = f"---\nsearch:\n  exclude: true\n---\n\n# {path.relative_to(ROOT).as_posix()}\n\n"
    if path.is_dir():
        names = (
            file.relative_to(path).as_posix() for file in sorted(path.rglob("*")) if file.is_file()
        )
        return title + "\n".join(f"- `{name}`" for name in names if "__pycache__" not in name)
    if path.suffix == ".ipynb":
        return title + "\n\n".join(cells(json.loads(path.read_text())["cells"]))
    return f"{title}````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text().rstrip()}\n````\n"


def cells(notebook: Iterable[dict]) -> Iterator[str]:
    """A notebook's cells as Markdown."""
    for cell in notebook:
        text = "".join(cell["source"])
        yield f"```python\n{text}\n```" if cell["cell_type"] == "code" else text
