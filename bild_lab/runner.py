"""One configuration, one result: everything is checked first, then measured, then written."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from bild_lab.analysis.prediction import predict
from bild_lab.api import Decoder, load
from bild_lab.build import described, policy_label
from bild_lab.config import DecodingSpec, MeasureSpec, PairSpec, RuntimeSpec, compose_policy, knob_values, typed
from bild_lab.data.tasks import DatasetSpec, Example, load_examples
from bild_lab.errors import UserError, require_flag
from bild_lab.measure.certificate import Certificate, certify, counted
from bild_lab.measure.environment import OtherLoad, cpu_name, environment, peak_memory_mb
from bild_lab.measure.timing import Timed, time_methods, trace_stages, warm_up
from bild_lab.models.loading import DTYPES, resolve_device
from bild_lab.request import Request
from bild_lab.results.records import Sweep, point_hash, require_writable
from bild_lab.sampling import Sampling
from bild_lab.summary import agreement, cost_account, summarize

METHOD, BASELINE = "method", "baseline"
DEFAULT_THREADS = torch.get_num_threads()


@dataclass(frozen=True)
class Point:
    """A configuration that was found good, with everything needed to measure it."""

    id: str
    name: str
    policy: str
    knobs: dict[str, Any]
    composition: str
    setting: dict[str, Any]
    config_yaml: str
    decoders: dict[str, Decoder]  # METHOD and, unless switched off, BASELINE
    examples: tuple[Example, ...]
    metric: str
    decoding: DecodingSpec
    measure: MeasureSpec
    seed: int
    max_source_tokens: int | None

    @property
    def baseline_is_target(self) -> bool:
        """Whether the baseline's outputs are the target's own greedy decoding."""
        return self.measure.baseline == "vanilla" and self.sampling.greedy

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.decoding.temperature, self.decoding.top_k, self.decoding.top_p)


def prepare(cfg: DictConfig) -> Point:
    """Check a whole configuration; reads the dataset and the checkpoints' small files, no weights.

    Raises UserError for anything that could not be measured. Writes nothing.
    """
    pair = typed(PairSpec, cfg.pair, "pair")
    decoding = typed(DecodingSpec, cfg.decoding, "decoding")
    runtime = typed(RuntimeSpec, cfg.runtime, "runtime")
    measure = typed(MeasureSpec, cfg.measure, "measure")
    dataset = typed(DatasetSpec, cfg.dataset, "dataset")
    Sampling(decoding.temperature, decoding.top_k, decoding.top_p)
    require_writable(sweep_folder(cfg))
    if dataset.metric == "agreement" and measure.baseline is None:
        raise UserError("dataset.metric=agreement compares with a baseline; set measure.baseline=vanilla")
    if measure.certify and (measure.baseline != "vanilla" or decoding.temperature != 0):
        raise UserError(
            "measure.certify compares with the target's own greedy text; "
            "set measure.baseline=vanilla and decoding=greedy"
        )
    require_flag("resume", cfg.resume)
    policies = {METHOD: cfg.policy}
    if measure.baseline is not None:
        policies[BASELINE] = compose_policy(measure.baseline)
    decoders = {name: _decoder(policy, pair, runtime) for name, policy in policies.items()}
    for decoder in decoders.values():
        for model in decoder.models:
            model.checkpoint.check()
    examples = cached_examples(dataset)
    setting = _setting(pair, dataset, decoding, runtime, measure)
    target = decoders.get(BASELINE, decoders[METHOD]).target
    setting |= {
        "n_examples": len(examples),
        "data": point_hash({"examples": [(one.id, one.prompt, one.references) for one in examples]}),
        "weights": target.checkpoint.fingerprint,
        "engine": target.engine,
        "code": _code(environment(target.device)),
    }
    inputs = {
        "policies": {name: _without_name(policy) for name, policy in policies.items()},
        "setting": {key: value for key, value in setting.items() if key not in ("target", "draft", "second_draft")},
        "traced_examples": measure.traced_examples,
        "certify": measure.certify,
        "weights": [model.checkpoint.fingerprint for each in decoders.values() for model in each.models],
        "files": [file_hash(value) for value in knob_values(cfg.policy).values() if isinstance(value, str)],
    }
    return Point(
        id=point_hash(inputs),
        name=str(cfg.name),
        policy=policy_label(cfg.policy),
        knobs=knob_values(OmegaConf.to_container(cfg.policy, resolve=True)),
        composition=described(OmegaConf.to_container(cfg.policy.decoder, resolve=True)),
        setting=setting,
        config_yaml=OmegaConf.to_yaml(cfg, resolve=False),
        decoders=decoders,
        examples=examples,
        metric=dataset.metric,
        decoding=decoding,
        measure=measure,
        seed=runtime.seed,
        max_source_tokens=dataset.max_source_tokens,
    )


def run_point(
    point: Point, sweep: Sweep, setup_s: float = 0.0, advance: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Measure a point and store it; returns its result.

    setup_s: what was spent on it before, for the account of where time went. advance: called after
    every example.
    """
    clock = Clock()
    torch.set_num_threads(point.setting["threads"])
    decoder = point.decoders[METHOD]
    device, synchronize = decoder.target.device, decoder.synchronize
    surroundings = environment(device)
    for each in point.decoders.values():
        each.load_weights()
    requests = [_request(point, example) for example in point.examples]
    clock.lap("load")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    methods = {name: each.method for name, each in point.decoders.items()}
    warm_up(methods, requests, point.measure.warmup, point.seed)
    clock.lap("warmup")
    others = OtherLoad()
    timed = time_methods(
        methods, requests, point.measure.repeats, point.seed, synchronize, advance, lambda: compiled_steps(point)
    )
    surroundings["busy_elsewhere_percent"] = round(others.percent(), 1)
    clock.lap("decode")
    stages = None
    if point.measure.traced_examples and timed[METHOD][0].trace.rounds:
        stages = trace_stages(decoder.method, requests[: point.measure.traced_examples], point.seed, synchronize)
    clock.lap("trace")
    prediction = None
    if stages is not None and BASELINE in timed:
        traced = {name: several[: point.measure.traced_examples] for name, several in timed.items()}
        prediction = predict(**traced, stages_s=stages.seconds, end_tokens=decoder.target.checkpoint.end_tokens)
    certificates = certified(point, requests, timed) if point.measure.certify else None
    clock.lap("certify")
    texts = {name: [decoder.text(one.token_ids) for one in several] for name, several in timed.items()}
    result = {
        "schema": 1,
        "point": point.id,
        "name": point.name,
        "policy": point.policy,
        "knobs": point.knobs,
        "composition": point.composition,
        "engine": decoder.method.engine,
        "setting": point.setting,
        **summarize(point.metric, point.examples, timed, texts, point.seed),
        "agreement_with_target": agreement(timed) if point.baseline_is_target else None,
        "certificate": None if certificates is None else counted(certificates),
        "peak_memory_mb": peak_memory_mb(device),
        "stages_s": None if stages is None else stages.seconds,
        "prediction": None if prediction is None else asdict(prediction),
        "cost": cost_account(timed, DTYPES[point.setting["dtype"]].itemsize),
        "environment": surroundings,
    }
    clock.lap("metrics")
    result["seconds"] = {"setup": setup_s, **clock.laps, "total": setup_s + sum(clock.laps.values())}
    rows = _example_rows(point.examples, timed, texts)
    for row, spans in zip(rows, () if stages is None else stages.spans, strict=False):
        row["spans"] = [(stage, round(start, 6), round(end, 6)) for stage, start, end in spans]  # to microseconds
    for row, certificate in zip(rows, certificates or [], strict=False):
        row["certificate"] = asdict(certificate)
    sweep.write_point(point.id, point.config_yaml, result, rows)
    return result


def certified(point: Point, requests: list[Request], timed: dict[str, list[Timed]]) -> list[Certificate]:
    """Each example's text against the target's own."""
    target = point.decoders[METHOD].target
    trios = zip(requests, timed[METHOD], timed[BASELINE], strict=True)
    return [certify(target, request, one.token_ids, own.token_ids) for request, one, own in trios]


def compiled_steps(point: Point) -> int:
    """How many shapes the point's models have compiled; each once where decoders share a model."""
    models = {id(model): model for each in point.decoders.values() for model in each.models}
    return sum(getattr(model, "compiled_steps", 0) for model in models.values())


class Clock:
    """Wall-clock seconds by what they were spent on."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now


def sweep_folder(cfg: DictConfig) -> Path:
    """outputs/NAME. Raises UserError for a name that is not one folder's."""
    name = str(cfg.name)
    if not name or name in (".", "..") or any(character in name for character in "/\\\0"):
        raise UserError(f"name must be a plain folder name, got {name!r}; results go to outputs/NAME")
    return Path("outputs") / name


@lru_cache(maxsize=4)
def cached_examples(spec: DatasetSpec) -> tuple[Example, ...]:
    """The dataset's examples, read once per process."""
    return load_examples(spec)


def _decoder(policy: DictConfig, pair: PairSpec, runtime: RuntimeSpec) -> Decoder:
    return load(
        pair.target,
        pair.draft,
        policy,
        dtype=runtime.dtype,
        device=runtime.device,
        engine=runtime.engine,
        compile=runtime.compile,
        target_revision=pair.target_revision,
        draft_revision=pair.draft_revision,
        second_draft=pair.second_draft,
        second_draft_revision=pair.second_draft_revision,
    )


def _setting(
    pair: PairSpec,
    dataset: DatasetSpec,
    decoding: DecodingSpec,
    runtime: RuntimeSpec,
    measure: MeasureSpec,
) -> dict[str, Any]:
    """What two points must share to be compared."""
    device = resolve_device(runtime.device)
    return {
        "target": pair.target,
        "draft": pair.draft,
        "second_draft": pair.second_draft,
        "dataset": dataset.name,
        "split": dataset.split,
        "prompt_template": dataset.prompt_template,
        "max_source_tokens": dataset.max_source_tokens,
        "metric": dataset.metric,
        "dtype": runtime.dtype,
        "compile": runtime.compile,
        "device": str(device),
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "threads": runtime.threads or DEFAULT_THREADS,
        "decoding": asdict(decoding),
        "seed": runtime.seed,
        "repeats": measure.repeats,
        "warmup": measure.warmup,
        "baseline": measure.baseline,
    }


def _request(point: Point, example: Example) -> Request:
    decoder = point.decoders[METHOD]
    return decoder.request(
        example.prompt, point.decoding.max_new_tokens, point.sampling, point.seed, point.max_source_tokens
    )


def _code(surroundings: dict[str, Any]) -> str:
    """The code that a finished point must share to be taken as finished."""
    return " ".join(f"{key} {surroundings[key]}" for key in ("code", "torch", "transformers", "tokenizers"))


def file_hash(path: str) -> str | None:
    """What identifies the file that a knob names, which may change under its name; None where there is none."""
    file = Path(path).expanduser()
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def _without_name(policy: DictConfig) -> dict[str, Any]:
    return {key: value for key, value in OmegaConf.to_container(policy).items() if key != "name"}


def _example_rows(
    examples: tuple[Example, ...], timed: dict[str, list[Timed]], texts: dict[str, list[str]]
) -> list[dict[str, Any]]:
    rows = []
    for index, example in enumerate(examples):
        one = timed[METHOD][index]
        row = {
            "id": example.id,
            **({} if example.category is None else {"category": example.category}),
            "prediction": texts[METHOD][index],
            "token_ids": one.token_ids,
            "latency_s": one.latency_s,
            "rounds": [
                {
                    "drafted": list(each.drafted),
                    "accepted": each.accepted,
                    "fallback": each.fallback,
                    "draft_calls": each.draft_calls,
                }
                for each in one.trace.rounds
            ],
        }
        if BASELINE in timed:
            other = timed[BASELINE][index]
            row |= {
                "baseline_prediction": texts[BASELINE][index],
                "baseline_token_ids": other.token_ids,
                "baseline_latency_s": other.latency_s,
            }
        rows.append(row)
    return rows
