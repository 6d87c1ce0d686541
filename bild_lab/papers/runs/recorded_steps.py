"""A sweep as two commands: a screening, which decodes every example over a record, and the sweep on
the examples that are timed.

A paper's whole split has thousands of examples, which a sweep decodes once for each point. A
screening decodes all points over one record, in batches (`docs/screening.md`). A figure takes each
point's quality from the screening and its speed from the sweep (`recorded_quality.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from omegaconf import DictConfig

from bild_lab.lab.config.command_line import key_of
from bild_lab.lab.store.hashing import content_hash
from bild_lab.papers.runs.paper_runs import (
    SETTINGS,
    Words,
    configurations,
    lists_of,
    replaced_words,
)

# by scale; the first of the data set, the same for every point
TIMED_EXAMPLES = {"paper": 200, "small": 12}
SWEEP = "run.py"
SCREENING = "scripts/screen.py"
PREFIX = "quality_"  # of the folders in outputs that screenings write
SMALL_TIMED_S = 5  # of live decoding that a small screening is compared with
# keys that leave a sweep's texts as they are, or that its screening covers
NO_CHANGE_OF_TEXTS = (
    "policy.", "measure.", "report.", "screen.", "hydra.", "dataset.limit", "runtime.allow_pickles",
)  # fmt: skip


def recorded_commands(words: Words, overrides: Sequence[str] = ()) -> list[Words]:
    """The commands that take the place of a sweep: a screening of each of its pairs and data sets,
    then the sweep on the examples that are timed.

    overrides: of which a screening takes the keys of its own, such as screen.batch=32. A command that
    is no sweep, samples, or has another baseline than the target stays as it is.
    """
    settings = configurations(words) if words[1] == SWEEP else []
    if not settings or not all(map(_is_recordable, settings)):
        return [words]
    choices = [values for key, values in lists_of(words).items() if key.split(".")[0] in SETTINGS]
    single_sweeps = [replaced_words(words, choice) for choice in product(*choices)]
    changes = [word for word in overrides if word.startswith("screen.")]
    screenings = [replaced_words(_screening(sweep), changes) for sweep in single_sweeps]
    limit, timed = settings[0].dataset.limit, TIMED_EXAMPLES[settings[0].scale]
    if limit is not None and limit <= timed:
        return [*screenings, words]
    return [*screenings, replaced_words(words, [f"dataset.limit={timed}"])]


def _is_recordable(configuration: DictConfig) -> bool:
    """Whether a record holds what decides about the points' texts: of greedy decoding beside the
    target.
    """
    greedy = configuration.decoding.temperature == 0
    return greedy and configuration.measure.baseline == "vanilla"


def _screening(words: Words) -> Words:
    """The screening of a sweep of one pair and data set. Hydra's own settings, such as a launcher,
    are the sweep's alone.
    """
    (configuration,) = configurations(words)
    python, _, *words_after = words
    overrides = [word for word in words_after if not word.startswith("hydra")]
    timed = [f"screen.timed_s={SMALL_TIMED_S}"] if configuration.scale == "small" else []
    return (
        python,
        SCREENING,
        *overrides,
        f"name={_folder(words, configuration)}",
        f"screen.select={configuration.dataset.split}",
        "screen.confirmations=0",
        "screen.keep=texts",
        *timed,
    )


def _folder(words: Words, configuration: DictConfig) -> str:
    """The folder in outputs that a sweep's screening writes: one for each policy, pair and data
    set.

    Further overrides that change texts, such as pair.target=DIR, give it a hash at the end.
    """
    policy, pair, dataset = (configuration[key].name for key in ("policy", "pair", "dataset"))
    name = f"{PREFIX}{configuration.name}_{policy}_{pair}_{dataset}"
    further = sorted(
        word
        for word in words[2:]
        if "." in key_of(word) and not word.startswith(NO_CHANGE_OF_TEXTS)
    )
    return f"{name}_{content_hash({'overrides': further})}" if further else name
