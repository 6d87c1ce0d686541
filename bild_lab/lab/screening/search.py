"""A search in place of the whole grid: each point is chosen by what those before gave (Optuna's Parzen estimator).

Points are decoded over the record, and their speed is predicted. With a loss that is allowed, the fastest point within
it is searched (BiLD §7.1.2), else the whole front of quality and speed. A knob can also be any set of the target's
layers: which blocks a target skips while it drafts (Zhang et al., 2023, §3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bild_lab.errors import UserError
from bild_lab.lab.cli import console, escape, stages
from bild_lab.lab.measure.cost_model import CostModel
from bild_lab.lab.schema.timed import METHOD
from bild_lab.lab.screening.candidates import KNOB, Candidate, Grid
from bild_lab.lab.screening.replay import Screened
from bild_lab.lab.screening.rows import Row

if TYPE_CHECKING:
    from bild_lab.lab.screening.screen import Screening, ScreenSpec

STARTUP = 10  # random points, from some of which the cost model learns
MOST_REPEATS = 5  # suggestions for each point: points that were suggested before cost nothing


def search(
    screening: Screening, spec: ScreenSpec, model_of: Callable[[Sequence[Screened]], CostModel]
) -> tuple[list[Screened], CostModel]:
    """The target alone and `spec.trials` points. model_of: gives the cost model, by timing some of the first points.

    Raises UserError without Optuna, and if none of the first points can be built.
    """
    try:
        import optuna  # an optional dependency; its import takes a second
    except ImportError as error:
        raise UserError("screen.trials needs Optuna, which is missing; pip install 'bild_lab[tuning]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    depth = screening.point.decoders[METHOD].target.depth
    study = optuna.create_study(
        directions=["maximize", "minimize"] if spec.max_loss is None else ["minimize"],
        sampler=optuna.samplers.TPESampler(seed=screening.point.seed, n_startup_trials=STARTUP),
    )
    if spec.subsets:  # every second layer
        study.enqueue_trial({f"{knob} {at}": at % 2 for knob in spec.subsets for at in range(depth)})
    (alone,) = screening.decode([])
    found: dict[tuple[str, ...], Screened | None] = {}  # None: could not be built
    model: CostModel | None = None
    waiting: list[tuple[Any, Screened | None]] = []
    for _ in range(MOST_REPEATS * spec.trials):
        if len(found) == spec.trials:
            break
        trial = study.ask()
        candidate = suggested(trial, screening.grid, spec.subsets, depth)
        if candidate.words not in found:
            stages.enter(f"trial {len(found) + 1} of {spec.trials}")
            try:
                (found[candidate.words],) = screening.decode([candidate], alone=False)
            except UserError as error:  # such as a draft that skips every layer
                console.print(escape(f"left out: {' '.join(candidate.words)}: {error}"))
                found[candidate.words] = None
        waiting.append((trial, found[candidate.words]))
        if model is None and len(found) >= min(STARTUP, spec.trials):
            model = model_of([alone, *filter(None, found.values())])
        while model is not None and waiting:
            asked, one = waiting.pop()
            values = None if one is None else objectives(*screening.rows([alone, one], model), spec.max_loss)
            study.tell(asked, values, state=None if values else optuna.trial.TrialState.FAIL)
    screened = [alone, *filter(None, found.values())]
    if len(screened) == 1:
        raise UserError("no point of the search could be decoded; the lines above say why")
    return screened, model or model_of(screened)


def suggested(trial: Any, grid: Grid, subsets: Sequence[str], depth: int) -> Candidate:
    """The point that a trial asks for. depth: layers of the target."""
    space = grid.spaces[trial.suggest_int("policy", 0, len(grid.spaces) - 1)]
    chosen = []
    for key, values in space.lists.items():
        if (knob := key.removeprefix(KNOB)) in subsets:
            layers = [at for at in range(depth) if trial.suggest_int(f"{knob} {at}", 0, 1)]
            chosen.append(f"{key}={str(layers).replace(' ', '')}")
        else:
            chosen.append(values[trial.suggest_int(f"{space.base.name} {key}", 0, len(values) - 1)])
    return space.candidate(chosen)


def objectives(row: Row, max_loss: float | None) -> list[float]:
    """For Optuna: quality and latency relative to the target's. With a loss: latency, longer where more is lost."""
    latency = 1 / row.predicted_speedup
    if max_loss is None:
        return [row.quality, latency]
    excess = -row.quality_difference - max_loss
    return [latency if excess <= 0 else max(latency, 1.0) + excess]
