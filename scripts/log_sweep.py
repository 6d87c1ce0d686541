"""Log finished sweeps to Weights & Biases: python scripts/log_sweep.py outputs/NAME [outputs/NAME …] [overrides]

Every finished point becomes a run, and the sweep one more, as with `python run.py logger=wandb`. A run that is in the
project already is replaced. logger.mode=offline writes files only; the last line says how to send them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bild_lab.errors import UserError
from bild_lab.lab.cli import console, escape, refusing, run_application, words_as_list
from bild_lab.lab.config import config_dir

if TYPE_CHECKING:
    from bild_lab.lab.results.records import Sweep
    from bild_lab.lab.schema.result import Result


def log(cfg: DictConfig) -> None:
    """Log every sweep, and print where its runs are. Raises UserError for bad input, before anything is logged."""
    from bild_lab.lab.decoding.build import build
    from bild_lab.lab.results.records import Sweep, require_writable

    sweeps = [Sweep(Path(str(folder)).expanduser()) for folder in cfg.sweeps]
    if not sweeps:
        raise UserError("folders of sweeps are needed, got none; python scripts/log_sweep.py outputs/NAME")
    for sweep in sweeps:
        if not sweep.results():
            raise UserError(f"{sweep.folder} has no finished points; give the folder of a sweep, outputs/NAME")
        require_writable(sweep.folder)
    given = OmegaConf.to_container(cfg.logger, resolve=True)
    for sweep in sweeps:
        own = {"group": given["group"] or sweep.name, "directory": given["directory"] or str(sweep.folder)}
        log_sweep(sweep, build({**given, **own}, {}))


def log_sweep(sweep: Sweep, logger: Any) -> None:
    """Log every point, oldest first, and the sweep as a whole."""
    results = sweep.results()
    for number, result in enumerate(results, 1):
        console.print(
            f"[dim]{escape(f'{sweep.folder}: logging point {number} of {len(results)}, {result.policy}')}[/dim]"
        )
        logger.log_point(result, stored_config(result), again=True)
    logger.log_sweep(sweep)
    for line in logger.closing():
        console.print(escape(line))


def stored_config(result: Result) -> dict[str, Any]:
    """The configuration that a point was measured with. Raises UserError if it cannot be read."""
    from bild_lab.lab.results.records import CONFIG

    file = result.folder / CONFIG
    try:
        return OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except (OSError, ValueError, OmegaConfBaseException) as error:
        raise UserError(f"{file} cannot be read: {error}; measure the point again with resume=false") from error


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="log_sweep")
def main(cfg: DictConfig) -> None:
    """The sweeps of one command line."""
    with refusing():
        log(cfg)


if __name__ == "__main__":
    sys.argv[1:] = words_as_list(sys.argv[1:], "sweeps")
    run_application(main, "log_sweep")
