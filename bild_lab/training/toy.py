"""The toy pair: a large and a small T5 trained on the toy corpus at first use, then cached.

Nothing here imports torch or transformers until a pair has to be trained.
"""

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

from bild_lab.data.toy import toy_corpus

_LIBRARIES = ("torch", "transformers", "tokenizers")  # other versions, other weights
_DONE = "recipe.json"


@dataclass(frozen=True)
class Shape:
    """One T5 (v1.1, gated-gelu) and how long it trains.

    The encoder is as deep as the decoder, because transformers 5.23 sizes the decoder's cache by
    the encoder's depth.
    """

    layers: int
    width: int
    feed_forward: int
    heads: int
    steps: int
    warm_up_steps: int


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, next to the corpus and the library versions."""

    target: Shape = field(default_factory=lambda: Shape(6, 128, 256, 4, steps=1000, warm_up_steps=60))
    draft: Shape = field(default_factory=lambda: Shape(1, 96, 192, 4, steps=800, warm_up_steps=60))
    vocabulary: int = 1300  # pieces, shared by both models and both languages
    batch: int = 32  # sentences
    learning_rate: float = 4e-2  # of Adafactor, relative to the scale of each parameter
    label_smoothing: float = 0.1
    threads: int = 2
    seed: int = 0
    sentences: int | None = None  # the first so many of the corpus; None is all


def toy_pair(progress: bool = True, recipe: Recipe | None = None) -> tuple[Path, Path]:
    """The folders (target, draft) of the toy pair, in Hugging Face layout; trained at first use.

    They lie in ``$BILD_LAB_CACHE`` or ``~/.cache/bild_lab``, in a directory named by a hash of
    corpus, recipe and library versions. The pair appears there by one rename: an interrupted
    training leaves nothing that is used, and of two processes training at once the first wins.
    With ``progress`` a bar shows loss and time left on the terminal's error stream.
    """
    recipe = recipe if recipe is not None else Recipe()
    pairs = toy_corpus("train")[: recipe.sentences]
    folder = cache_folder() / f"toy-{_fingerprint(recipe, pairs)}"
    if not (folder / _DONE).exists():
        _train_into(folder, recipe, pairs, progress)
    return folder / "target", folder / "draft"


def cache_folder() -> Path:
    """``$BILD_LAB_CACHE``, or ``~/.cache/bild_lab`` where it is unset or empty."""
    return Path(os.environ.get("BILD_LAB_CACHE") or "~/.cache/bild_lab").expanduser()


def _fingerprint(recipe: Recipe, pairs: list[dict[str, str]]) -> str:
    """16 hexadecimal digits naming what decides the weights."""
    versions = {name: version(name) for name in _LIBRARIES}
    decisive = json.dumps([asdict(recipe), versions, pairs], sort_keys=True)
    return hashlib.sha256(decisive.encode()).hexdigest()[:16]


def _train_into(folder: Path, recipe: Recipe, pairs: list[dict[str, str]], progress: bool) -> None:
    """Train beside ``folder`` and rename when complete."""
    from bild_lab.training.toy_trainer import train_pair  # imports torch: seconds

    folder.parent.mkdir(parents=True, exist_ok=True)
    workplace = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        train_pair(recipe, pairs, workplace / "target", workplace / "draft", progress)
        (workplace / _DONE).write_text(json.dumps(asdict(recipe), indent=2) + "\n")
        _publish(workplace, folder)
    finally:
        shutil.rmtree(workplace, ignore_errors=True)


def _publish(workplace: Path, folder: Path) -> None:
    """Rename, unless another process has published the same pair meanwhile."""
    try:
        os.rename(workplace, folder)
    except OSError:
        if not (folder / _DONE).exists():
            raise
