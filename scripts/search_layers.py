"""Search the blocks that layer_skip's draft should leave out: python scripts/search_layers.py name=layers [KEY=VALUE …]

It decodes the examples with one set of attention and feed-forward blocks after another, as Optuna suggests, over a
record of what the target scored, and predicts seconds per token from a few sets that it times. The best set is written
to outputs/NAME/layers.json. The same command with more trials goes on. Needs `pip install 'bild_lab[tuning]'`.
"""

from __future__ import annotations

import importlib.util
import shlex

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from bild_lab.errors import UserError
from bild_lab.lab.cli import escape, output, progress, refusing, run_application
from bild_lab.lab.config import config_dir, typed


def search(cfg: DictConfig) -> None:
    """Raises UserError for bad input."""
    from bild_lab.lab.formatting import times  # late: torch takes seconds to load
    from bild_lab.lab.tuning.layers import LayerSearch, SearchSpec

    if importlib.util.find_spec("optuna") is None:
        raise UserError("a search needs Optuna, which is not installed; pip install 'bild_lab[tuning]'")
    spec = typed(SearchSpec, cfg.search, "search")
    searching = LayerSearch(cfg, spec)
    with progress() as bar:
        task = bar.add_task("trials", total=spec.trials)
        found = searching.run(lambda done: bar.update(task, completed=done))
    path = searching.folder / "layers.json"
    found.write(path)
    how = "measured" if spec.live else "predicted"
    if found.cost_model_error is not None:
        how += f" (such predictions are off by {found.cost_model_error:.1%} in the median)"
    output.print(
        escape(
            f"the best of {found.trials} sets: {times(found.speedup)} the speed of the target alone, {how}; "
            f"{found.acceptance_rate:.0%} of its drafted tokens are accepted"
        )
    )
    own = ("name=", "search.", "dataset.split=", "dataset.limit=", "policy.skipped", "policy=", "hydra")
    given = [word for word in HydraConfig.get().overrides.task if not word.startswith(own)]
    knobs = [f"policy.{knob}={str(layers).replace(' ', '')}" for knob, layers in found.skips.knobs().items()]
    output.print(escape(f"{path}: measure it: python run.py {shlex.join(['policy=layer_skip', *given, *knobs])}"))


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="search_layers")
def main(cfg: DictConfig) -> None:
    """One search."""
    with refusing("search_layers"):
        search(cfg)


if __name__ == "__main__":
    run_application(main, "search_layers")
