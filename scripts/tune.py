"""Search knobs on validation with Optuna, confirm the best on test: python scripts/tune.py experiment=tune/quickstart

Give lists of values as for a sweep: policy.fallback=0.3,0.5,0.7 policy.window=range(3,11). Without tune.loss it
searches for the whole front of quality and latency, with tune.loss=1 for the fastest point that loses at most one point
of quality. The same command continues a search that was stopped. Needs `pip install 'bild_lab[tuning]'`.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import suppress

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from bild_lab.errors import UserError
from bild_lab.lab.cli import escape, output, refuse, run_application
from bild_lab.lab.config import config_dir, typed


def search(cfg: DictConfig) -> None:
    """Check the input, search, confirm, and print the chosen points. Raises UserError for bad input."""
    from bild_lab.lab.formatting import number, signed, times  # late: torch takes seconds to load
    from bild_lab.lab.sweep import measure_point
    from bild_lab.lab.tuning.search import TuneSpec, Tuning, tune
    from bild_lab.lab.tuning.space import read_space

    if importlib.util.find_spec("optuna") is None:
        raise UserError("a search needs Optuna, which is not installed; pip install 'bild_lab[tuning]'")
    spec = typed(TuneSpec, cfg.tune, "tune")
    hydra_config = HydraConfig.get()
    given = [f"{key}={value}" for key, value in (hydra_config.sweeper.get("params") or {}).items()]
    task = tuple(word for word in hydra_config.overrides.task if not word.lstrip("+~").startswith("tune."))
    keys = {word.partition("=")[0] for word in task}
    lists = [word for word in given if word.partition("=")[0] not in keys]  # a value on the command line fixes its key
    tuning = Tuning(spec, read_space([*lists, *spec.space]), task, measure_point)
    tuning.check()
    for tuned in tune(tuning, cfg.runtime.seed, cfg.resume):
        both = [
            f"{split} {one.quality.metric} {number(one.quality.value)} ({signed(one.quality.difference)}), "
            f"{times(one.speedup.value)}"
            for split, one in ((spec.validation, tuned.validation), (spec.test, tuned.test))
            if one is not None
        ]
        output.print(escape(f"chosen: {' '.join(tuned.overrides)}: {'; '.join(both)}"))


def as_overrides(words: list[str]) -> list[str]:
    """The command line with its lists of values as `tune.space`: Hydra allows lists only in sweeps, not in one run."""

    def is_list(word: str) -> bool:
        with suppress(HydraException):  # Hydra reports it later
            return "=" in word and word[:1] != "-" and OverridesParser.create().parse_override(word).is_sweep_override()
        return False

    lists = [word for word in words if is_list(word)]
    others = [word for word in words if word not in ("-m", "--multirun", *lists)]
    quoted = ",".join("'" + word.replace("\\", "\\\\").replace("'", "\\'") + "'" for word in lists)
    return [*others, *([f"tune.space=[{quoted}]"] if lists else []), "hydra.mode=RUN"]


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="tune")
def main(cfg: DictConfig) -> None:
    """One search."""
    try:
        search(cfg)
    except (UserError, HydraException, OmegaConfBaseException) as error:
        refuse(error, "tune")  # here: Hydra prints a line of its own before an error that passes through it


if __name__ == "__main__":
    sys.argv[1:] = as_overrides(sys.argv[1:])
    run_application(main, "tune")
