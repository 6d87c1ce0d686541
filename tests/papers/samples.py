"""Runs of every figure, as its experiments leave them in outputs."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from bild_lab.lab.schema.examples import MeasuredExample
from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.records import Sweep
from bild_lab.papers.published import load_published
from tests.report.sample import sample_drafted, sample_example, sample_result

PIPELINE = {
    "match_rate": 0.5,
    "latency_units": 4.6,
    "compute_units": 9.0,
    "predicted_latency_units": 4.5,
}
PIPELINE |= {"layers": 6, "exit_layer": 3, "predicted_compute_units": 9.1, "theorem": 1.33}
ALIGNED = {"draft": "t5-tiny-aligned"}  # other weights are another setting


def bild(speedup: float, loss: float = 0.0, rollback: float = 2.0, **changes: object) -> Result:
    knobs = {"fallback": 0.5, "rollback": rollback, "window": 10, "verify_tail": True}
    return sample_drafted("bild", knobs, speedup, -loss, (0.8, 0.9), rollbacks=100, **changes)


def other(policy: str, speedup: float = 1.5, loss: float = 0.0, **knobs: object) -> Result:
    return sample_drafted(policy, {"window": 5, **knobs}, speedup, -loss, (0.7, 1.0), rollbacks=90)


def bita(
    speedup: float = 2.0, policy: str = "bita", trained: dict | None = None, **knobs: object
) -> Result:
    adapter = {"adapter": "outputs/any/adapter", "tree": "efficient_tree", "top_k": 5}
    facts = {
        "trained": {
            "adapter": {"prompt": "deep", "prompt_tokens": 16, "mask_tokens": 3, **(trained or {})}
        }
    }
    coding = {
        "n_examples": 1,
        "tokens": 9,
        "tokens_per_s": 5.0,
        "baseline_tokens_per_s": 2.0,
        "speedup": {},
    }
    coding |= {"tokens_per_s_ratio": 2.5, "tokens_per_target_call": 2.0, "acceptance_rate": 0.5}
    own = {"tokens_per_s_ratio": speedup, "categories": {"coding": coding}, "facts": facts}
    return sample_result(policy, {**adapter, **knobs}, speedup, **own)


def alpha(drafter: str, value: float, **knobs: object) -> Result:
    return sample_result(
        "alpha",
        {"drafter": drafter, "knobs": {"window": 1, **knobs}},
        None,
        expected_acceptance=value,
    )


def ppd() -> Result:
    return sample_result(
        "ppd", {"exit_layer": 3, "top_k": 3, "heads": "shared"}, 0.9, pipeline=PIPELINE
    )


def texts() -> list[MeasuredExample]:
    """Two tokens are the target's: the second, and the end."""
    rounds = [
        {"drafted": [3], "accepted": 1, "next_token": 4},
        {"drafted": [5], "accepted": 1, "next_token": 1},
    ]
    pieces = {"3": "a", "4": " small", "5": " house", "1": "</s>"}
    own = {"prompt": "ein Haus", "token_ids": [3, 4, 5, 1], "rounds": rounds, "pieces": pieces}
    return [sample_example(**own, prediction="a small house", baseline_prediction="a little house")]


def drafter_alone() -> tuple[str, Result, Sequence[MeasuredExample]]:
    alone = sample_result("vanilla", {}, None, setting={"target": "t5-tiny", "baseline": None})
    return "toy", alone, [sample_example(prompt="ein Haus", token_ids=[], prediction="one house")]


def of(pair: str, *results: Result) -> list[tuple[str, Result, Sequence[MeasuredExample]]]:
    return [(pair, result, ()) for result in results]


# for each figure what its runs leave: the pair, the result, its examples
RUNS: dict[str, Callable[[], list[tuple[str, Result, Sequence[MeasuredExample]]]]] = {
    "bild_fig2": lambda: of("toy", bild(1.5), bild(1.4, 1.0)),
    "bild_fig4": lambda: [
        *of("toy", bild(1.5), bild(1.7, 1.0, 5.0)),
        *of("toy_aligned", bild(1.6, setting=ALIGNED)),
    ],
    "bild_fig5": lambda: of("toy_aligned", bild(1.6), other("bild_no_rollback", 1.4, 1.0)),
    "bild_fig6_7": lambda: of("user", other("bild_early_exit", 1.6), other("calm", 1.3, 0.5)),
    "bild_fig8": lambda: of("toy_aligned", bild(1.6)),
    "bild_fig9": lambda: of("toy_aligned", bild(1.6), bild(1.7, 1.0, 5.0)),
    "bild_fig10": lambda: [("toy", bild(1.6), texts()), drafter_alone()],
    "bild_speculative": lambda: of("toy", bild(1.6), other("speculative", 1.4, lenience=1.0)),
    "bild_lossy": lambda: of(
        "toy",
        bild(1.6),
        other("speculative_cascade", rule="chow"),
        other("typical_acceptance"),
        other("speculative", lenience=0.3),
        other("static_ensemble"),
    ),
    "spec_tab2": lambda: of("toy", other("speculative", lenience=1.0)),
    "spec_tab3": lambda: of("toy", alpha("speculative", 0.6), alpha("ngram", 0.2, order=2)),
    "spec_tab4": lambda: of("toy", other("speculative", lenience=1.0)),
    "spec_tab5": lambda: of(
        "toy", other("speculative", lenience=0.5), other("speculative", lenience=1.0)
    ),
    "spec_fig2_4": lambda: of("toy", other("synthetic", acceptance_rate=0.7)),
    "bita_tab1": lambda: of("user", bita()),
    "bita_tab2": lambda: of("user", bita(), bita(1.1, "layer_skip")),
    "bita_tab3_8": lambda: of("user", bita(), bita(1.5, trained={"prompt": "none"})),
    "bita_tab4_9": lambda: of("user", bita(), bita(1.5, tree="straightforward")),
    "bita_tab7": lambda: of("user", bita()),
    "bita_fig7": lambda: of("user", bita(), bita(1.6, "medusa")),
    "bita_fig8": lambda: of("user", bita(mask_tokens=1)),
    "bita_fig9": lambda: of("user", bita(prompt_tokens=8)),
    "ppd_fig2": lambda: of("toy", ppd()),
    "ppd_fig4": lambda: of("toy", ppd()),
}


def known(pair: str, result: Result) -> Result:
    """The result with the facts of its pair."""
    return replace(result, facts={**result.facts, "pair": pair, "aligned": pair == "toy_aligned"})


def points(name: str) -> list[Result]:
    return [known(pair, result) for pair, result, _ in RUNS[name]()]


def store(folder: Path, runs: Sequence[tuple[str, Result, Sequence[MeasuredExample]]]) -> None:
    """Finished points, as a sweep leaves them."""
    for number, (pair, result, examples) in enumerate(runs):
        Sweep(folder).write_point(f"{number:012d}", "", known(pair, result), examples)


def store_match_rates(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text(json.dumps({"settings": {"dataset.name": "squad"}}))
    with (folder / "match_rates.csv").open("w") as stream:
        rows = csv.writer(stream)
        rows.writerow("layer top_k heads position matches count rate".split())
        rows.writerow([20, 3, "shared", "1-2", 3, 10, 0.3])
        rows.writerow([20, 3, "outputs/heads/heads", "all", 684, 1000, 0.684])


def outputs_of(name: str, outputs: Path, scale: str) -> None:
    folder = outputs / load_published(name).folders[scale][0]
    if name in RUNS:
        store(folder, RUNS[name]())
    else:
        store_match_rates(folder)
