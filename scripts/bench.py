"""Benchmark our loop against Transformers, CTranslate2 and OpenVINO: python scripts/bench.py [SHAPE …] [KEY=VALUE …]

    python scripts/bench.py all                  all shapes, up to 20 minutes (or make bench)
    python scripts/bench.py t5_small llama_12    these shapes; after them, runtime.dtype=float32 runtime.threads=1
    python scripts/bench.py pair.target=DIR pair.draft=DIR dataset=multi30k dataset.path=DIR dataset.limit=20
    python scripts/bench.py pair.target=DIR FILE.gguf …
                                                 llama.cpp and our kernels also with the target's weights in these files
    python scripts/bench.py long pair.target=DIR policy=llama_cpp policy.file=FILE.gguf
                                                 milliseconds by length of the prompt, and by position in a long text
    python scripts/bench.py runtime.device=cuda  the shapes for a GPU (make gpu also tests and certifies there)

KEY=VALUE are those of `python run.py --cfg job`: all of dataset, template and policy; the models of pair; of decoding
max_new_tokens and stop; of runtime device, dtype, threads, trust_remote_code and allow_pickles;
hydra.searchpath=[file:///DIR] for groups of your own.

outputs/NAME/bench.json keeps the rows: name=bench unless another is given. Those of `long`: long.json, long.csv.
Other engines take part after `make peers`, in each precision; a peer's policy that is given takes their place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from omegaconf import DictConfig
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from bild_lab.errors import UserError, require_choice
from bild_lab.files import write_json
from bild_lab.lab.config.command_line import key_of
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.config.console import console, output, status_line
from bild_lab.lab.config.entrypoint import run_application
from bild_lab.lab.config.schemas import DecodingSpec, PairSpec, RuntimeSpec, typed

if TYPE_CHECKING:
    import torch

    from bild_lab.benchmark.bench import Bench, Models
    from bild_lab.benchmark.peer_methods import Peer
    from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
    from bild_lab.engine.request import Request
    from bild_lab.engine.session import LoadedModel
    from bild_lab.lab.data.dataset_spec import DatasetSpec
    from bild_lab.lab.data.prompts import Example

WANTED = (
    "shapes, all of them, or a pair are needed; python scripts/bench.py t5_small llama_12, python"
    " scripts/bench.py all, or pair.target=DIR pair.draft=DIR dataset=local dataset.path=FILE"
    " dataset.limit=20"
)
KEPT = "nothing was written, as the rows are stored at the end"
ALL = "all"  # the word for every shape of the device
# the keys and groups that change what is measured
TAKEN_GROUPS = ("dataset", "experiment", "policy")
TAKEN = frozenset(
    "name template pair pair.name pair.target pair.target_revision pair.target_language pair.draft"
    " pair.draft_revision decoding.max_new_tokens decoding.stop runtime.device runtime.dtype"
    " runtime.threads runtime.trust_remote_code runtime.allow_pickles hydra.searchpath".split()
)
BUSY_PERCENT = 15
ROUNDS_OF_A_PAIR = 5  # of several texts each
ROUNDS_OF_A_PROMPT = 3
DEFAULTS = [
    "name=bench",
    "runtime.dtype=bfloat16",
    "dataset.limit=20",
    "decoding.max_new_tokens=64",
]
TOY = ["dataset.limit=1"]  # the pair that is measured with the shapes: one sentence
SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}
LEGEND = (
    "Medians of interleaved rounds. to gen., to asst.: how many times as fast as Transformers'"
    " generate, and as its assisted generation. bandwidth: of the speed at which the machine reads"
    " the target's weights. same: texts that are generate's. nats: log-probability of a token by"
    " the target. quality: by dataset.metric."
)
LONG_LEGEND = (
    "Milliseconds of a prompt of so many tokens with the first new one, and of one new token at"
    " these places of a long text. Medians; the precision is that of the weights."
)


def pair_bench(
    cfg: DictConfig,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    peers: bool,
    policy: bool,
    files: Sequence[str],
) -> AbstractContextManager[Bench]:
    """A pair of checkpoints on texts of a dataset. policy: with that of the configuration, which is
    a peer's.

    files: the target in GGUF files, for llama.cpp and for our kernels.
    """
    from bild_lab.benchmark.bench import bench_of
    from bild_lab.benchmark.peer_methods import LlamaCpp
    from bild_lab.engine.vocabularies import in_vocabulary_of
    from bild_lab.lab.data.dataset_spec import DatasetSpec, for_model
    from bild_lab.lab.data.examples import load_examples
    from bild_lab.lab.data.prompts import cut_sources
    from bild_lab.lab.point.read_model import load_model

    pair = typed(PairSpec, cfg.pair, "pair")
    decoding = typed(DecodingSpec, cfg.decoding, "decoding")
    runtime = typed(RuntimeSpec, cfg.runtime, "runtime")
    target = loaded(pair.target, pair.target_revision, device, dtype, runtime)
    checkpoint = target[0].checkpoint
    checkpoint.check()
    dataset = for_model(typed(DatasetSpec, cfg.dataset, "dataset"), checkpoint)
    examples = cut_sources(
        load_examples(dataset), dataset.max_source_tokens, checkpoint.prompt_length
    )
    draft = None
    if pair.draft is not None:
        draft = loaded(pair.draft, pair.draft_revision, device, dtype, runtime)
        draft[0].checkpoint.check()
        draft = tuple(in_vocabulary_of(checkpoint, model) for model in draft)
    peer_builders = pair_peers(cfg, target, draft, dtype, policy) if peers or policy else {}
    gguf_models = {}
    for file in files:
        model = load_model(file, None, str(device), dtype, "kernels", bits="gguf")
        gguf_models[f"kernels_{model.checkpoint.precision}"] = model
        peer_builders[f"llama_cpp_{model.checkpoint.precision}"] = partial(
            LlamaCpp, target[1], file
        )
    judge = judge_of(dataset, examples, checkpoint, pair.target_language, decoding.stop)
    requests = tuple(
        greedy_request(target[0], example.prompt, decoding.max_new_tokens) for example in examples
    )
    return bench_of(name, target, draft, requests, peer_builders, gguf_models, judge)


def greedy_request(target: LoadedModel, prompt: str, max_new_tokens: int) -> Request:
    """A prompt as our loop decodes it greedily."""
    from bild_lab.engine.request import Limits, Request

    source = target.source(prompt)
    limits = Limits(len(source.prompt), max_new_tokens, target.checkpoint.end_tokens)
    return Request(source, limits)


def pair_peers(
    cfg: DictConfig, target: Models, draft: Models | None, dtype: torch.dtype, policy: bool
) -> dict[str, Callable[[], Peer]]:
    """What makes the engines of others for a pair. policy: that of the configuration alone. Raises
    UserError if this is one of our methods.
    """
    from bild_lab.benchmark.bench import peer_methods
    from bild_lab.benchmark.peer_methods import Peer
    from bild_lab.lab.point.build import build_method

    if policy:
        models = {"target": target[1], **({} if draft is None else {"draft": draft[1]})}
        method = build_method(cfg.policy, {key: partial(models.get, key) for key in models})
        if not isinstance(method, Peer):
            raise UserError(
                f"the benchmark has our methods, got policy={cfg.policy.name}; give a peer's or"
                " none"
            )
        return {cfg.policy.name: lambda: method}
    checkpoint = target[0].checkpoint
    # as OpenVINO wants it
    shared = draft is not None and draft[0].checkpoint.vocabulary == checkpoint.vocabulary
    return peer_methods(checkpoint, draft[0].checkpoint if shared else None, dtype)


def judge_of(
    dataset: DatasetSpec,
    examples: Sequence[Example],
    checkpoint: Checkpoint,
    target_language: str | None,
    stop: Sequence[str],
) -> Callable[[Sequence[Sequence[int]]], float] | None:
    """The quality of the examples' texts, given as tokens, by the dataset's first metric; None for
    one that needs no references, and for one that would run programs.
    """
    from bild_lab.engine.stop import before_stop
    from bild_lab.lab.metrics.quality import Scoring
    from bild_lab.lab.metrics.text_metrics import PASS_AT_1, needs_references

    metric = dataset.scored[0]
    if not needs_references(metric) or metric == PASS_AT_1:
        return None
    references = [example.references for example in examples]
    scoring = Scoring((metric,), writing=dataset.writing(target_language)).fitted(references)

    def judge(texts: Sequence[Sequence[int]]) -> float:
        decoded = [
            checkpoint.tokenizer.decode(token_ids, skip_special_tokens=True) for token_ids in texts
        ]
        words = [before_stop(text, stop).strip() for text in decoded]
        return scoring.score_outputs(words, None, references, 0)[metric].score.value

    return judge


def loaded(
    path: str,
    revision: str | None,
    device: torch.device,
    dtype: torch.dtype,
    runtime: RuntimeSpec,
) -> Models:
    """A checkpoint on both engines of ours that PyTorch runs. runtime: says what of it may be
    read.
    """
    from bild_lab.lab.point.read_model import load_model

    native, hf = (
        load_model(
            path,
            revision,
            str(device),
            dtype,
            engine,
            trust_remote_code=runtime.trust_remote_code,
            allow_pickles=runtime.allow_pickles,
        )
        for engine in ("native", "hf")
    )
    native.load()
    hf.load()
    return native, hf


def table(rows: list[dict]) -> Table:
    """The methods as a table of 80 columns, with a section for each shape."""
    shown = Table(
        box=SIMPLE_HEAD, pad_edge=False, padding=0, caption_justify="left", caption=LEGEND
    )
    shown.add_column("method", no_wrap=True)
    titles = (
        "",
        "ms/\ntoken",
        "to\ngen.",
        "to\nasst.",
        "band-\nwidth",
        "tok/\ncall",
        "same",
        "nats",
        "qua-\nlity",
    )
    for title in titles:
        shown.add_column(title, justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        if index == 0 or rows[index - 1]["shape"] != row["shape"]:
            shown.add_section()
            shown.add_row(escape(row["shape"]), style="bold")
        share = row["bandwidth_share"]
        shown.add_row(
            row["method"],
            SHORT.get(row["precision"], row["precision"]),
            f"{row['ms_per_token']:.2f}",
            decimals(row["ratio_to_generate"]),
            decimals(row["ratio_to_assisted"]),
            "–" if share is None else f"{100 * share:.0f}%",
            decimals(row["tokens_per_target_call"]),
            f"{100 * row['agreement']:.0f}%",
            decimals(row["log_probability"]),
            decimals(row["quality"]),
        )
    return shown


def long_table(rows: list[dict]) -> Table:
    """Milliseconds of each method: columns are prompt lengths, then ranges of new tokens."""
    shown = Table(
        box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), caption_justify="left", caption=LONG_LEGEND
    )
    shown.add_column("method", no_wrap=True)
    shown.add_column("")
    ms_by_method = {(row["shape"], row["method"], row["precision"]): {} for row in rows}
    for row in rows:
        head = f"{row['to']:,}" if row["by"] == "prompt" else f"{row['from']}–{row['to']}"
        ms_by_method[row["shape"], row["method"], row["precision"]][head] = row["ms"]
    heads = list(dict.fromkeys(head for ms_by_head in ms_by_method.values() for head in ms_by_head))
    for head in heads:
        shown.add_column(head, justify="right")
    for (_, method, precision), ms_by_head in ms_by_method.items():
        shown.add_row(
            method,
            SHORT.get(precision, precision),
            *(decimals(ms_by_head.get(head)) for head in heads),
        )
    return shown


def decimals(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def shapes_to_measure(words: list[str], overrides: list[str], gpu: bool) -> list[str]:
    """The shapes to measure: those that were named, else the device's, else `pair` if a pair or a
    dataset was given.

    Raises UserError for one that there is not.
    """
    from bild_lab.benchmark.bench import SHAPES

    all_names = [*SHAPES, "toy"]
    if unknown := sorted(set(words) - {*all_names, ALL}):
        raise UserError(f"the shapes are {', '.join(all_names)}, or {ALL}, got {unknown[0]!r}")
    if any(word.startswith(("pair", "dataset", "template")) for word in overrides):
        if words:
            raise UserError(f"give shapes or a pair, got {words[0]!r} and {overrides[0]!r}")
        return ["pair"]
    usual = [
        *(name for name, shape in SHAPES.items() if shape.gpu == gpu),
        *([] if gpu else ["toy"]),
    ]
    names = words if words and ALL not in words else [*words, *usual]
    return [shape for shape in all_names if shape in names]


def require_taken(overrides: Sequence[str]) -> None:
    """Raise UserError for a key that would change nothing here."""
    for word in overrides:
        key = key_of(word).lstrip("+")
        if key not in TAKEN and key.partition(".")[0] not in TAKEN_GROUPS:
            raise UserError(
                "the benchmark runs methods of its own, greedily and one text at a time, so"
                f" {word} would change nothing; leave it out, or measure with run.py"
            )


def main() -> None:
    words = [word for word in sys.argv[1:] if "=" not in word]
    overrides = [word for word in sys.argv[1:] if "=" in word]
    status_line.enter("loading libraries")
    # late: torch takes seconds to load
    from bild_lab.benchmark.bench import why_without_peers
    from bild_lab.engine.models.device import DTYPES, resolve_device, set_threads, wait_for
    from bild_lab.lab.measure.machine import read_gb_per_s

    runtime = typed(RuntimeSpec, compose_config([*DEFAULTS, *overrides]).runtime, "runtime")
    require_taken(overrides)
    require_choice("runtime.dtype", runtime.dtype, DTYPES)  # a shape has no precision of its own
    device, dtype = resolve_device(runtime.device), DTYPES[runtime.dtype]
    long = "long" in words
    files = [word for word in words if word.endswith(".gguf")]
    shapes = shapes_to_measure(
        [word for word in words if word not in ("long", *files)], overrides, device.type == "cuda"
    )
    if files and shapes != ["pair"]:
        raise UserError(
            f"{files[0]} holds the weights of a pair's target; give its folder too, with"
            " pair.target=DIR"
        )
    cfg = configuration(shapes, overrides, long)
    set_threads(runtime.threads)
    synchronize = partial(wait_for, device)
    if (lacking := why_without_peers(device, dtype)) is not None:
        console.print(f"no peers: {lacking}")
    busy = busy_percent()
    bandwidth = read_gb_per_s(device, synchronize)
    policy = any(word.startswith("policy") for word in overrides)
    rows = []
    for name in shapes:
        with bench_named(name, cfg, device, dtype, lacking is None, policy, files) as bench:
            rows += measured(bench, name, long, synchronize)
    show_and_keep(rows, long, cfg.name, device, busy, bandwidth)


def configuration(shapes: Sequence[str], overrides: Sequence[str], long: bool) -> DictConfig:
    """The configuration of the pair, or of the toy pair among the shapes."""
    alone = ["pair.draft=null"] if long else []  # the toy pair's drafter may be of another kind
    of_pair = overrides if list(shapes) == ["pair"] else [*TOY, *overrides]
    return compose_config([*DEFAULTS, *alone, *of_pair])


def busy_percent() -> float:
    """How busy the machine is with something else; a warning says so above `BUSY_PERCENT`."""
    from bild_lab.lab.point.environment import BUSY_REMEDY

    busy = psutil.cpu_percent(interval=2.0)
    if busy > BUSY_PERCENT:
        console.print(
            f"[bold red]{busy:.0f} % of the machine is busy with something else[/bold red]:"
            f" {BUSY_REMEDY}"
        )
    return busy


def bench_named(
    name: str,
    cfg: DictConfig,
    device: torch.device,
    dtype: torch.dtype,
    peers: bool,
    policy: bool,
    files: Sequence[str],
) -> AbstractContextManager[Bench]:
    """The models and methods of a shape, of the toy pair, or of the configuration's pair."""
    from bild_lab.benchmark.bench import SHAPES, synthetic_bench

    if name in SHAPES:
        return synthetic_bench(name, device, dtype, peers)
    label = Path(cfg.pair.target).name if name == "pair" else name
    return pair_bench(cfg, label, device, dtype, peers, policy, files)


def measured(
    bench: Bench, name: str, long: bool, synchronize: Callable[[], None]
) -> list[dict[str, Any]]:
    """The rows of all methods. long: of long texts."""
    from bild_lab.benchmark.bench import SHAPES, long_texts, run

    status_line.enter(f"timing {bench.shape}, {len(bench.methods)} methods")
    if long:
        return long_texts(bench, ROUNDS_OF_A_PROMPT, synchronize)
    rounds = SHAPES[name].rounds if name in SHAPES else ROUNDS_OF_A_PAIR
    return run(bench, rounds, synchronize)


def show_and_keep(
    rows: list[dict], long: bool, name: str, device: torch.device, busy: float, gb_per_s: float
) -> None:
    """Print the table; write it and the machine to outputs/NAME."""
    import pandas as pd

    from bild_lab.lab.point.environment import environment
    from bild_lab.lab.store.table import write_csv

    machine = {**environment(device), "busy_percent": busy, "read_gb_per_s": gb_per_s}
    path = Path("outputs", name, "long.json" if long else "bench.json")
    write_json(path, {"environment": machine, "rows": rows})
    output.print(long_table(rows) if long else table(rows))
    output.print(f"the machine reads {gb_per_s:.1f} GB/s")
    if long:
        write_csv(path, pd.DataFrame(rows))
    output.print(f"{path} contains these rows{', long.csv too' if long else ''}")


if __name__ == "__main__":
    run_application(main, None, WANTED, KEPT)
