"""The trainings and calibrations that the papers' experiments read from `outputs`.

A recipe is one command of the project that writes one folder. Which recipes an experiment has
follows from its configuration: its scale, its pair of models and its data set.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

BITA_ANSWERS = {  # the data sets of BiTA's Table 5, and what of them is taken
    "lima": (),
    "alpaca_gpt4": (),
    "code_alpaca": (),
    "open_platypus": (),
    "cip": ("dataset.limit=50000",),
}
# those of them that a gate of the hub may keep back, by their ids: 1,030 of about 150,000 questions
OPTIONAL_ANSWERS = {"lima": "GAIR/lima"}
# §4.1.2; none of Falcon, into whose attention bi-directional tuning cannot reach here
BITA_MASK_TOKENS = {
    "llama2_7b_chat": 3,
    "llama2_13b_chat": 3,
    "llama2_70b_chat": 4,
    "vicuna_7b": 3,
    "vicuna_13b": 3,
    "vicuna_33b": 4,
}
# by a target's family: in training each question has both templates (Appendix A)
BITA_QUESTIONS = {"llama2": "llama2_both", "vicuna": "vicuna_both", "falcon": "falcon"}
EARLY_EXIT_LEARNING_RATES = "[5e-5,1e-4,2e-4,5e-4]"  # BiLD §7.2.1, of which the best counts


@dataclass(frozen=True)
class Recipe:
    """A command that writes `outputs/FOLDER`. script: its path in the project. overrides: KEY=VALUE
    after `name=FOLDER`.
    """

    folder: str
    script: str
    overrides: tuple[str, ...]

    @property
    def command(self) -> str:
        """The command line, quoted for a shell."""
        return shlex.join(["python", self.script, f"name={self.folder}", *self.overrides])


def recipes_of(configuration: DictConfig, left_out: Collection[str] = ()) -> list[Recipe]:
    """The recipes of everything that an experiment with this configuration may read.

    left_out: data sets of `OPTIONAL_ANSWERS` that no training learns.
    """
    if OmegaConf.select(configuration, "scale") == "small":
        return [*_toy_models(), *_small_bita(configuration.pair.name, configuration.pair.target)]
    pair = OmegaConf.select(configuration, "pair.name")
    dataset = OmegaConf.select(configuration, "dataset.name")
    families = OmegaConf.select(configuration, "protocol.families", default={})
    if pair in (f"{dataset}_early_exit", f"{dataset}_calm"):
        return [*_early_exit(dataset)]
    if pair in families:
        return [*_bita(configuration, families[pair], left_out)]
    return []


def _early_exit(dataset: str) -> Iterator[Recipe]:
    """mT5-small with a loss over layers (BiLD §7.2.1); CALM until its BLEU matches the other's.

    Rates and CALM's end are chosen on all of validation: on 200 sentences BLEU is known to ±2.5.
    """
    trained = (
        "model.path=google/mt5-small",
        f"dataset={dataset}",
        f"train.learning_rate={EARLY_EXIT_LEARNING_RATES}",
        "validation.limit=null",
    )
    early_exit = f"{dataset}_early_exit"
    yield Recipe(early_exit, "scripts/finetune.py", (*trained, "train.loss=early_exit"))
    matched = ("train.loss=calm", f"train.stop_at_score=outputs/{early_exit}")
    yield Recipe(f"{dataset}_calm", "scripts/finetune.py", (*trained, *matched))


def _bita(configuration: DictConfig, family: str, left_out: Collection[str]) -> Iterator[Recipe]:
    """Adapters, and Medusa's heads, that learn a target's own answers by the released recipe (BiTA
    §4.1.2, Appendix A).
    """
    pair, target = configuration.pair.name, configuration.pair.target
    device_map = configuration.protocol.device_maps.get(pair, "null")
    placed = (f"model.path={target}", f"runtime.device_map={device_map}")
    answered = {name: limits for name, limits in BITA_ANSWERS.items() if name not in left_out}
    for dataset, limits in answered.items():
        yield Recipe(
            f"calibration_{pair}_{dataset}",
            "scripts/generate_calibration.py",
            (
                *placed,
                f"template={BITA_QUESTIONS[family]}",
                "decoding.max_new_tokens=1600",
                "runtime.dtype=float16",
                f"dataset={dataset}",
                *limits,
            ),
        )
    answers = ",".join(f"outputs/calibration_{pair}_{dataset}" for dataset in answered)
    learned = (*placed, f"calibration=[{answers}]")
    yield Recipe(f"medusa_{pair}", "scripts/train_module.py", ("module=medusa", *learned))
    if pair not in BITA_MASK_TOKENS:
        return
    for folder, changes in {
        f"bita_{pair}": (f"bita.mask_tokens={BITA_MASK_TOKENS[pair]}",),
        f"bita_none_{pair}": ("bita.prompt=none", "bita.prompt_tokens=0"),
        f"bita_shallow_{pair}": ("bita.prompt=shallow",),
        **{f"bita_m{count}": (f"bita.mask_tokens={count}",) for count in (1, 2, 4, 5)},
        **{f"bita_p{count}": (f"bita.prompt_tokens={count}",) for count in (4, 8, 32, 64)},
    }.items():
        yield Recipe(folder, "scripts/train_bita.py", ("train=bita_released", *learned, *changes))


def _toy_models() -> Iterator[Recipe]:
    """The models that small runs train on the toy corpus, each in a minute or two."""
    yield Recipe("toy_answers", "scripts/generate_calibration.py", ("dataset.limit=2000",))
    yield Recipe(
        "toy_aligned",
        "scripts/align.py",
        (
            "calibration=outputs/toy_answers",
            "train=toy",
            "train.max_steps=200",
            "train.learning_rate=1e-2",
        ),
    )
    yield Recipe(
        "toy_llama",
        "scripts/finetune.py",
        (
            "model=llama_small_cpu",
            "dataset=toy",
            "template=translation",
            "model.vocabulary=1300",
            "train.max_steps=400",
            "train.batch_size=32",
            "train.warmup_steps=60",
            "train.evaluate_every=null",
        ),
    )


def _small_bita(pair: str, target: str) -> Iterator[Recipe]:
    """A small target's answers, and the adapters and heads that learn them in a minute each."""
    answers = f"calibration_{pair}"
    yield Recipe(
        answers,
        "scripts/generate_calibration.py",
        (
            f"model.path={target}",
            "dataset.limit=1500",
            "template=translation",
            "decoding.max_new_tokens=48",
        ),
    )
    learned = (f"model.path={target}", f"calibration=outputs/{answers}")
    short = (
        "train.max_steps=60",
        "train.evaluate_every=null",
        "train.batch_size=32",
        "train.accumulate=1",
    )
    for folder, changes in {
        f"bita_{pair}": (),
        f"bita_none_{pair}": ("bita.prompt=none", "bita.prompt_tokens=0"),
        f"bita_shallow_{pair}": ("bita.prompt=shallow",),
        **{f"bita_p{count}_{pair}": (f"bita.prompt_tokens={count}",) for count in (1, 4)},
        **{f"bita_m{count}_{pair}": (f"bita.mask_tokens={count}",) for count in (1, 2)},
    }.items():
        yield Recipe(
            folder,
            "scripts/train_bita.py",
            (*learned, "train.learning_rate=1e-2", *short, *changes),
        )
    yield Recipe(
        f"medusa_{pair}",
        "scripts/train_module.py",
        ("module=medusa", *learned, "train.learning_rate=1e-3", *short),
    )
