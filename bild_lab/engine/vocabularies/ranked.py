"""Which tokens a drafter's head has: those of a file, or the most frequent ones of texts."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from pathlib import Path

from bild_lab.engine.draft_vocabulary import DraftVocabulary
from bild_lab.engine.drafters.ngram import load_table
from bild_lab.engine.drafters.suffix import corpus_files
from bild_lab.engine.session import LoadedModel
from bild_lab.errors import UserError, require_whole
from bild_lab.files import FilePath

NUMBERS = re.compile(r"[\s\d,\[\]]*\d[\s\d,\[\]]*", re.ASCII)  # one a line, or a JSON list


def draft_vocabulary(
    target: LoadedModel, tokens: int | FilePath | None, ranking: FilePath | None
) -> DraftVocabulary | None:
    """The tokens of `policy.draft_vocabulary`, and the target's end tokens; None for the whole vocabulary.

    tokens: how many, the first of `ranking`; or the path of a ranking, of which all are taken. ranking: see `ranked`.
    Raises UserError for a number without a ranking or larger than it, and for tokens that the target does not have.
    """
    if tokens is None and ranking is None:
        return None
    if isinstance(tokens, str) == (ranking is not None):
        raise UserError(
            "give policy.draft_vocabulary a file of token ids, or a number, and then policy.draft_vocabulary_from a "
            f"calibration folder, an n-gram table, texts or a file of token ids; got {tokens!r} and {ranking!r}"
        )
    path, checkpoint = str(tokens if ranking is None else ranking), target.checkpoint
    named = Path(path).expanduser()
    latest = max((file.stat().st_mtime_ns for file in (named, *named.rglob("*")) if file.exists()), default=0)
    found = ranked(path, target, latest)
    if not isinstance(tokens, str):
        require_whole("policy.draft_vocabulary", tokens, 1, len(found), f"{path} ranks {len(found)}")
        found = found[:tokens]
    if unknown := set(found) - set(checkpoint.vocabulary.values()):
        raise UserError(f"{path} names the token {min(unknown)}, which {checkpoint.path} does not have; count anew")
    return DraftVocabulary([*found, *checkpoint.end_tokens], target.device)


@lru_cache(maxsize=2)
def ranked(path: str, target: LoadedModel, latest: int) -> list[int]:
    """Token ids without repetition, the most frequent first; of equal ones the smaller id.

    path: a folder of calibration answers, the file of an n-gram table, a file or a folder of UTF-8 texts; or a file of
    ids in an order of its own, one a line or as a JSON list. latest: when it changed. Raises UserError for others.
    """
    named = Path(path).expanduser()
    if named.suffix == ".safetensors":
        return load_table(target, path, 1).unigrams.tokens.tolist()
    texts = answers(named) if any(named.glob("*.parquet")) else [file.read_text("utf-8") for file in corpus_files(path)]
    if named.is_file() and NUMBERS.fullmatch(texts[0]):
        return list(dict.fromkeys(map(int, re.findall(r"\d+", texts[0]))))
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(target.checkpoint.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return sorted(counts, key=lambda token: (-counts[token], token))


def answers(folder: Path) -> list[str]:
    """The calibration answers of a folder. Raises UserError for other tables."""
    import pyarrow.parquet as parquet  # late: nothing else of the engine needs it

    try:
        tables = [parquet.read_table(file, columns=["answer"]) for file in sorted(folder.glob("*.parquet"))]
        return [answer for table in tables for answer in table["answer"].to_pylist()]
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"cannot read calibration answers in {folder}: {reason}; give an n-gram table of it") from error
