"""Search knobs on validation, confirm the best on test: python scripts/tune.py experiment=bild/thresholds scale=small

Give lists of values as for a sweep: policy.fallback=0.3,0.5,0.7 policy.window=range(3,11). Without tune.loss it
searches for the whole front of quality and latency, with tune.loss=1 for the fastest point that loses at most one point
of quality. Trials are decoded over a record of the models' scores (docs/screening.md). The same command continues a
search that was stopped. Needs `pip install 'bild_lab[tuning]'`.
"""

from __future__ import annotations

import importlib.util
import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from bild_lab.errors import UserError
from bild_lab.lab.cli import escape, output, refusing, run_application
from bild_lab.lab.config import config_dir, typed
from bild_lab.lab.screening.space import as_overrides, given_lists
from bild_lab.report.book.after import in_lab_book


def search(cfg: DictConfig) -> None:
    """Check the input, search, confirm, and print the chosen points. Raises UserError for bad input."""
    from bild_lab.lab.formatting import number, signed, times  # late: torch takes seconds to load
    from bild_lab.lab.screening.screen import RecordSpec
    from bild_lab.lab.screening.space import read_space
    from bild_lab.lab.sweep import measure_point
    from bild_lab.lab.tuning.search import TuneSpec, Tuning, key_numbers, tune

    if importlib.util.find_spec("optuna") is None:
        raise UserError("a search needs Optuna, which is not installed; pip install 'bild_lab[tuning]'")
    spec = typed(TuneSpec, cfg.tune, "tune")
    task, lists = given_lists(HydraConfig.get(), ("tune", "record"))
    record = typed(RecordSpec, cfg.record, "record")
    tuning = Tuning(spec, read_space([*lists, *spec.space]), task, measure_point, record)
    tuning.check()
    for tuned in tune(tuning, cfg.runtime.seed, cfg.resume):
        both = []
        for split, one in ((spec.validation, tuned.validation), (spec.test, tuned.test)):
            if (told := key_numbers(one)) is not None:
                speedup = (
                    times(told["speedup"]) if "speedup" in told else f"{times(told['predicted_speedup'])} predicted"
                )
                quality = f"{number(told['quality'])} ({signed(told['difference'])})"
                both.append(f"{split} {told['metric']} {quality}, {speedup}")
        output.print(escape(f"chosen: {' '.join(tuned.overrides)}: {'; '.join(both)}"))


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="tune")
def main(cfg: DictConfig) -> None:
    """One search."""
    with refusing("tune"), in_lab_book():
        search(cfg)


if __name__ == "__main__":
    sys.argv[1:] = as_overrides(sys.argv[1:], "tune.space")
    run_application(main, "tune")
