"""The groups of the configuration as dataclasses.

They are Hydra's structured configs: they say which keys a group has, of which types and with which
defaults. The files of `conf` state only what differs.
"""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from bild_lab.errors import (
    UserError,
    first_line,
    require_choice,
    require_finite,
    require_model_path,
    require_number,
    require_whole,
)
from bild_lab.lab.data.dataset_spec import DatasetSpec

T = TypeVar("T")

_OPENING = re.compile(r"(\\*)\$\{")  # of an interpolation, with the backslashes that may escape it

MOST_WHOLE = 2**63 - 1
MOST_THREADS = MOST_BATCH = 4096
MOST_TOKENS = 2**20
TOY, TOY_MODELS = "toy", "toy:"  # the default pair, and how its models' names begin
WEIGHTS = (8, 4, "gguf", None)  # their bits; a GGUF file's own blocks; as in the precision
ALL_PICTURE_KINDS = ("png", "pdf", "svg")
PICTURE_KINDS = ("png", "pdf")  # the files of a picture, unless a command names others
# what a margin means
MARGIN_REMEDY = (
    "5 means five points of dataset.metric, of log_probability 0.01 a hundredth of a nat; null: no"
    " test"
)
# the keys of conf/config.yaml
TOP_LEVEL = "name resume pair dataset policy decoding runtime measure logger".split()


def whole_number(
    minimum: int, maximum: int = MOST_WHOLE, default: Any = dataclasses.MISSING
) -> Any:
    """A field for a whole number in this range."""
    return dataclasses.field(default=default, metadata={"range": (minimum, maximum)})


def stop_strings(stop: Any) -> tuple[str, ...]:
    """Stop strings as a tuple, none for None.

    Raises UserError for anything but texts that are not empty.
    """
    if stop is None:
        return ()
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(
        isinstance(string, str) and string for string in strings
    ):
        raise UserError(
            f"decoding.stop must be a text or a list of texts, none of them empty, got {stop!r};"
            " null switches it off"
        )
    return tuple(dict.fromkeys(strings))


@dataclass
class PairSpec:
    """Checkpoints: the keys of `pair`. `Languages` checks the languages."""

    name: str  # what tables and logs call the pair
    target: str | None  # the large model: a folder, a hub id, a GGUF file, toy:large or toy:small
    draft: str | None = None  # the small model, likewise, or target: the same; null: none
    second_draft: str | None = None  # drafts for the draft model, likewise
    target_revision: str | None = None  # branch, tag or commit of the hub
    draft_revision: str | None = None  # branch, tag or commit of the hub
    second_draft_revision: str | None = None  # branch, tag or commit of the hub
    # whether the draft model was aligned with the target (BiLD §3.5.1); BiLD's figures need it
    aligned: bool = False
    source_language: str | None = None  # of mBART, mBART-50, M2M-100 or NLLB: the tokenizer's code
    # to translate into: the tokenizer's code, such as de_DE, de or deu_Latn
    target_language: str | None = None
    # of the draft models, as runtime.weights; null: the same
    draft_weights: int | str | None = None

    def __post_init__(self) -> None:
        require_choice("pair.draft_weights", self.draft_weights, WEIGHTS)
        if self.draft == "target":
            self.draft, self.draft_revision = self.target, self.target_revision
        for key in ("target", "draft", "second_draft"):
            value = getattr(self, key)
            if key == "target" or value is not None:
                require_model_path(f"pair.{key}", value)
                # as a shell completes the name of a folder
                setattr(self, key, value.rstrip("/") or value)

    @property
    def takes_the_toys_place(self) -> bool:
        """Whether the name is the toy pair's, which is the default, but a model is not."""
        models = (self.target, self.draft, self.second_draft)
        return self.name == TOY and any(
            model is not None and not model.startswith(TOY_MODELS) for model in models
        )


@dataclass
class DecodingSpec:
    """How long to decode and how to choose tokens.

    `Sampling` checks temperature, top_k and top_p, `processors_of` the processors.
    """

    max_new_tokens: int = whole_number(1, MOST_TOKENS)
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    stop: Any = None  # one or several stop strings: a text ends before the first of them
    processors: Any = "none"  # none, checkpoint, or a list of Transformers' logits processors

    def __post_init__(self) -> None:
        self.stop = stop_strings(self.stop)


@dataclass
class RuntimeSpec:
    """Where models run, and in which precision.

    The engine checks device, engine, precision and placement.
    """

    device: str = "auto"  # cpu, cuda, cuda:1 …; auto: the GPU if there is one
    engine: str = "auto"  # kernels, native, hf, or the first of these that can run the model
    # native steps: graphs, CUDA graphs of PyTorch's kernels; true, through torch.compile; false
    compile: str = "auto"
    # draft a window as one program: auto (where there is one), true (or refuse), false
    compile_drafter: str = "auto"
    # float32, bfloat16, float16, float64; auto: float32 on a CPU, on a GPU as stored
    dtype: str = "auto"
    batch: int = whole_number(1, MOST_BATCH, default=1)  # texts that decode at once
    # of the CPU; null: PyTorch chooses, of a container's cores at most its share
    threads: int | None = whole_number(1, MOST_THREADS, default=None)
    seed: int = whole_number(0, default=0)
    trust_remote_code: bool = False  # run Python code that comes with a checkpoint
    allow_pickles: bool = False  # read tensors from pickles where a checkpoint has no safetensors
    device_map: str | None = None  # how the target is spread over devices
    # 8 or 4 bits; gguf: a GGUF file's blocks, on the CPU kernels; null: as dtype
    weights: int | str | None = None

    def __post_init__(self) -> None:
        require_choice("runtime.weights", self.weights, WEIGHTS)
        self.compile = str(self.compile).lower()
        self.compile_drafter = str(self.compile_drafter).lower()
        require_choice("runtime.compile", self.compile, ("auto", "graphs", "true", "false"))
        require_choice("runtime.compile_drafter", self.compile_drafter, ("auto", "true", "false"))


@dataclass
class MeasureSpec:
    """How often to time, and what else to look at."""

    # examples whose beginnings are decoded before timing starts
    warmup: int = whole_number(0, default=3)
    # how often policy and baseline decode each example, in turn
    repeats: int = whole_number(1, default=3)
    # repeat until the speedup's error by the clock is at most this share
    precision: float | None = None
    most_repeats: int = whole_number(1, default=30)  # with precision
    # seconds to wait, at most, until the machine is not busy with something else
    quiet: float = 0.0
    baseline: str | None = "vanilla"  # the policy to compare with; null: none
    traced_examples: int = whole_number(0, default=20)  # examples with a clock in every stage
    certify: bool = False  # compare every output with the target's own
    target_log_probability: bool = True  # score every text by the target
    run_code: bool = False  # let dataset.metric=pass_at_1 run programs
    # test whether a point's quality is no worse than the baseline's by so much, as dataset.metric has
    # it: points, nats a token or tokens
    margin: float | None = None

    def __post_init__(self) -> None:
        require_finite("measure.quiet", self.quiet, 0)
        if self.margin is not None:
            require_finite("measure.margin", self.margin, 0, above=True, remedy=MARGIN_REMEDY)
            if self.baseline is None:
                raise UserError(
                    "measure.margin compares with a baseline, got measure.baseline=null; set"
                    " measure.baseline=vanilla or measure.margin=null"
                )
        if self.precision is None:
            return
        require_number(
            "measure.precision",
            self.precision,
            0,
            1,
            above=True,
            remedy="0.05 means ± 5 %, null: off",
        )
        if self.baseline is None or self.most_repeats < max(2, self.repeats):
            raise UserError(
                "measure.precision needs a baseline, and measure.most_repeats of at least 2 and"
                f" measure.repeats, got measure.baseline={self.baseline}"
                f" measure.most_repeats={self.most_repeats}"
            )


@dataclass
class ReportSpec:
    """What a sweep's report draws: the keys of `report`."""

    # pictures of quality against latency: png for a screen; pdf, svg for a paper, 8 cm wide
    figures: Any = ",".join(PICTURE_KINDS)  # words, or a list of them

    def __post_init__(self) -> None:
        self.figures = picture_kinds(self.figures)


def picture_kinds(figures: Any) -> list[str]:
    """The kinds of files of `report.figures`: `png`, `png,pdf` or a list of such words. Raises
    UserError for others.
    """
    figure_words = figures.split(",") if isinstance(figures, str) else figures
    chosen_kinds = (
        [str(word).strip() for word in figure_words] if isinstance(figure_words, Iterable) else []
    )
    if not chosen_kinds or set(chosen_kinds) - set(ALL_PICTURE_KINDS):
        raise UserError(
            f"figures are {', '.join(ALL_PICTURE_KINDS)}, one or more of them, got {figures}"
        )
    return chosen_kinds


SCHEMAS = {
    "pair": PairSpec,
    "dataset": DatasetSpec,
    "decoding": DecodingSpec,
    "runtime": RuntimeSpec,
    "measure": MeasureSpec,
}


def typed(cls: type[T], node: Any, group: str) -> T:
    """Convert a config group, or a mapping, to its dataclass.

    Raises UserError for a missing key, an unknown key, a key that cannot be resolved, a value of a
    wrong type, and a whole number out of its range.
    """
    if not OmegaConf.is_dict(node) and not isinstance(node, dict):
        raise UserError(
            f"{group} must be a group of keys, got {node!r}; choose one of its files: {group}=NAME"
        )
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    try:
        values = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_dict(node) else node
        spec = OmegaConf.to_object(OmegaConf.merge(pickle.loads(_schema_of(cls)), _literal(values)))
    except MissingMandatoryValue as error:
        key = error.full_key or error.key
        raise UserError(f"{group} lacks the key {str(key)!r}; it has {', '.join(names)}") from error
    except ConfigKeyError as error:
        raise UserError(
            f"{group} has no key {str(error.key)!r}; it has {', '.join(sorted(names))}"
        ) from error
    except OmegaConfBaseException as error:
        reason = first_line(error)
        if "is not a ListConfig" in reason:
            reason = "a list is wanted, in brackets: [4,6,8], or of one value [4]"
        raise UserError(f"{group}.{error.full_key or ''}: {reason}") from error
    for schema_field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if (
            "range" in schema_field.metadata
            and (value := getattr(spec, schema_field.name)) is not None
        ):
            require_whole(f"{group}.{schema_field.name}", value, *schema_field.metadata["range"])
    return spec


def _literal(values: Any) -> Any:
    """The same values for OmegaConf, which would take `${…}` in their texts for interpolations: what
    was one is resolved, and what was escaped is text by now.
    """
    if isinstance(values, str):
        return _OPENING.sub(lambda opening: rf"{opening[1] * 2}\${{", values)
    if isinstance(values, Mapping):
        return {key: _literal(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_literal(value) for value in values]
    return values


@lru_cache
def _schema_of(cls: type) -> bytes:
    """The structured configuration of a dataclass, pickled."""
    schema = OmegaConf.structured(cls)
    OmegaConf.set_readonly(schema, False)  # those of frozen dataclasses are
    return pickle.dumps(schema)
