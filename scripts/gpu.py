"""Check everything on a GPU, and write outputs/gpu/report.html: python scripts/gpu.py [STEP …] [device=DEVICE]

    python scripts/gpu.py                     every step, half an hour or more (or make gpu)
    python scripts/gpu.py driver bench        some: driver, tests, lossless, certificate, bench, rows, waits, sweep
    python scripts/gpu.py bench device=cpu    without a GPU, to see that a step works

outputs/gpu/gpu.json has everything in one file, to attach to an issue. Fails if a step fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from bild_lab.errors import UserError
from bild_lab.lab.cli import escape, output, run_application, stages
from bild_lab.report.gpu import FAILED, Found, LeftOut, Step, attempt, write

if TYPE_CHECKING:
    import torch

    from bild_lab.engine.models.native import NativeModel
    from bild_lab.lab.measure.bench.arms import Bench
    from bild_lab.lab.measure.bench.gpu import Pair

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("outputs/gpu")
TEST_DEVICE = "BILD_LAB_TEST_DEVICE"  # where the tests of exactness decode
GPU_TESTS = [
    "tests/pretended/test_policies.py",
    "tests/engine/models/test_compiled.py",
    "tests/engine/ppd/test_pipeline.py",
]
LOSSLESS = ["tests/engine/lossless/test_random_models.py"]
PRECISIONS = {  # name: precision, and whether float32 products may be rounded to TF32
    "gpu_float16": ("float16", "0"),
    "gpu_bfloat16": ("bfloat16", "0"),
    "gpu_float32": ("float32", "0"),
    "gpu_float32_tf32": ("float32", "1"),
}
POLICIES = "policy=vanilla,speculative,speculative_tree,prompt_lookup"
ROUNDS = 5


def call(words: list[str], **variables: str) -> str:
    """Run a command of ours and return what it printed. Raises UserError with its last lines if it fails."""
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env={**os.environ, **variables}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode != 0:
        raise UserError(f"python {' '.join(words)} ended with status {done.returncode}\n{done.stdout}")
    return done.stdout


def tested(paths: list[str], device: str) -> Found:
    """The summary of pytest over these files."""
    printed = call(["-m", "pytest", "-q", "-n", "0", *paths], **{TEST_DEVICE: device})
    return Found([printed.strip().splitlines()[-1].strip("= ")])


class Steps:
    """The steps, each a method of its name. small: shapes and texts that a CPU decodes in seconds."""

    ORDER = ("driver", "tests", "lossless", "certificate", "bench", "rows", "waits", "sweep")

    def __init__(self, device: torch.device, small: bool) -> None:
        self.device, self.small = device, small

    def driver(self) -> Found:
        """The driver, PyTorch's build, and one product on the device."""
        import torch

        if self.device.type != "cuda":
            raise LeftOut("another device was asked for")
        smi = smi_says()
        if torch.version.cuda is None:
            raise UserError(
                f"this PyTorch, {torch.__version__}, is the build for CPUs; `make clean setup` installs the one for "
                f"CUDA (docs/install.md), {smi}"
            )
        if not torch.cuda.is_available():
            raise UserError(f"PyTorch {torch.__version__} for CUDA {torch.version.cuda} finds no GPU, {smi}")
        square = torch.ones(64, 64, device=self.device)
        if not bool((square @ square == 64).all()):
            raise UserError("a product of ones is wrong on this device")
        return Found([f"PyTorch {torch.__version__} for CUDA {torch.version.cuda}; {smi}"])

    def tests(self) -> Found:
        """Whole policies on the device: the CPU's tokens, the documented waits, and CUDA graphs."""
        return tested([*GPU_TESTS, *self._fewer], self.device.type)

    def lossless(self) -> Found:
        """Random models: every lossless policy gives the target's own tokens."""
        return tested([*LOSSLESS, *self._fewer], self.device.type)

    def certificate(self) -> Found:
        """Sweeps with measure.certify=true in each precision: each text that differs is a numerical tie or a defect."""
        rows = []
        limit = 4 if self.small else 48
        for name, (precision, tf32) in PRECISIONS.items():
            words = ["-m", f"name={name}", POLICIES, "pair=toy", "dataset=toy", f"dataset.limit={limit}"]
            words += ["measure.certify=true", "measure.repeats=1", "measure.warmup=1", "measure.traced_examples=0"]
            words += [f"runtime.device={self.device}", f"runtime.dtype={precision}", "runtime.engine=auto"]
            call(["run.py", *words], TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=tf32)
            rows += [
                {"sweep": name, "precision": precision, "TF32": tf32 == "1", **row}
                for row in certificates(name, self.device.type)
            ]
        defects = sum(row["defects"] for row in rows)
        if defects:
            raise UserError(f"{defects} texts are defects\n{json.dumps(rows, indent=1)}")
        ties = sum(row["ties"] for row in rows)
        return Found([f"no defect, {ties} numerical ties in {sum(row['texts'] for row in rows)} texts"], rows)

    def bench(self) -> Found:
        """The arms on large random models, in turn."""
        from bild_lab.lab.measure.bench.rounds import run

        rows = [row for bench in self._benches for row in run(bench, 2 if self.small else ROUNDS, self._synchronize)]
        kept = "shape arm precision ms_per_token ms_low ms_high ratio_to_generate linear_share same_tokens".split()
        return Found(self._missing(), [{key: row[key] for key in kept} for row in rows])

    def rows(self) -> Found:
        """What a forward of 1 to 256 rows costs."""
        from bild_lab.lab.measure.bench.gpu import ROWS, row_costs

        counts = ROWS[:4] if self.small else ROWS
        return Found(
            self._missing(), [row for bench in self._benches for row in row_costs(bench, self._synchronize, counts)]
        )

    def waits(self) -> Found:
        """How often a round waits for the device and where, and what the device does meanwhile."""
        from bild_lab.lab.measure.bench.gpu import kernel_rows, wait_rows

        lines, rows = self._missing(), []
        for bench in self._benches:
            kernels, busy = kernel_rows(bench, self._synchronize)
            if busy is not None:
                lines.append(f"{bench.shape}: native decoding keeps the GPU busy {busy:.0%} of the time")
            top = ", ".join(f"{row['operation']} {row['ms']:.1f} ms ({row['calls']})" for row in kernels[:5])
            lines.append(f"{bench.shape}: {top}")
            if self.device.type == "cuda":
                rows += wait_rows(bench, drafter_of(bench))
        return Found(lines, rows)

    def sweep(self) -> Found:
        """A sweep of BiLD's thresholds, with its report."""
        words = ["experiment=quickstart", "name=gpu_sweep", f"runtime.device={self.device}"]
        words += ["dataset.limit=4", "policy.fallback=0.5", "policy.rollback=2"] if self.small else []
        call(["run.py", *words])
        return Found(["outputs/gpu_sweep/report.html has the plot"], summaries("gpu_sweep", self.device.type))

    @property
    def _fewer(self) -> list[str]:
        return ["-m", "not slow"] if self.small else []

    def _synchronize(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @cached_property
    def _benches(self) -> list[Bench]:
        import torch

        from bild_lab.lab.measure.bench.gpu import gpu_bench

        dtype = torch.float32 if self.small else torch.bfloat16
        return [gpu_bench(name, self._shapes[name], self.device, dtype) for name in self._fitting[0]]

    @property
    def _shapes(self) -> dict[str, Pair]:
        from bild_lab.lab.measure.bench import gpu

        return gpu.TRIAL if self.small else gpu.SHAPES

    @cached_property
    def _fitting(self) -> tuple[list[str], list[str]]:
        """The shapes that fit into the device's memory, and a sentence on each that does not."""
        import torch

        from bild_lab.lab.measure.bench.gpu import needed_bytes

        if self.device.type != "cuda":
            return list(self._shapes), []
        free, taken, fitting, missing = torch.cuda.mem_get_info(self.device)[0], 0, [], []
        for name, pair in self._shapes.items():
            needed = needed_bytes(name, pair, torch.bfloat16)
            if taken + needed <= free:
                taken += needed
                fitting.append(name)
            else:
                missing.append(f"{name} is left out: it takes about {needed / 1e9:.0f} GB more, of {free / 1e9:.0f} GB")
        return fitting, missing

    def _missing(self) -> list[str]:
        return list(self._fitting[1])


def drafter_of(bench: Bench) -> NativeModel:
    """The draft model of the bench's speculative arm."""
    return bench.methods["native_speculative"].drafter.draws_from


def smi_says() -> str:
    """The GPUs and their driver, in the words of nvidia-smi."""
    fields = "--query-gpu=name,driver_version,memory.total,compute_cap"
    try:
        done = subprocess.run(
            ["nvidia-smi", fields, "--format=csv,noheader"], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"and nvidia-smi does not answer ({error})"
    return f"nvidia-smi: {'; '.join((done.stdout or done.stderr).strip().splitlines())}"


def results(name: str, device: str) -> list[dict]:
    """The results of a sweep's points that this code measured on the device: others may have been left there."""
    from bild_lab.lab.code import code_hash

    files = sorted((ROOT / "outputs" / name / "points").glob("*/result.json"))
    found = [json.loads(file.read_text()) for file in files]
    wanted = code_hash(), device
    return [one for one in found if (one["setting"]["code"].split()[0], one["setting"]["device"]) == wanted]


def certificates(name: str, device: str) -> list[dict]:
    """The verdicts of a sweep's points, whose texts are greedy."""
    found = []
    for one in results(name, device):
        verdicts = {verdict: one["certificate"][verdict] for verdict in ("equal", "ties", "defects")}
        found.append({"policy": one["policy"], "engine": one["engine"], "texts": sum(verdicts.values()), **verdicts})
    return found


def summaries(name: str, device: str) -> list[dict]:
    return [
        {"policy": one["policy"], "knobs": ", ".join(f"{key} {value}" for key, value in one["knobs"].items()),
         "speedup": (one["speedup"] or {}).get("value"), "latency_ms": 1000 * one["latency_s"]["mean"]}
        for one in results(name, device)
    ]  # fmt: skip


def chosen(words: list[str]) -> tuple[list[str], str]:
    """The steps and the device that the words ask for. Raises UserError for others."""
    options = dict(word.split("=", 1) for word in words if "=" in word)
    device = options.pop("device", "cuda")
    unknown = [*options, *(word for word in words if "=" not in word and word not in Steps.ORDER)]
    if unknown:
        raise UserError(f"the steps are {', '.join(Steps.ORDER)}, and there is device=DEVICE; got {unknown[0]!r}")
    return [step for step in Steps.ORDER if step in words] or list(Steps.ORDER), device


def run_steps(names: list[str], steps: Steps, told: Callable[[Step], None]) -> list[Step]:
    """Run these steps. Without a working driver or build nothing else is tried."""
    found: list[Step] = []
    for name in names:
        stages.enter(name)
        method = getattr(steps, name)
        found.append(attempt(name, method))
        stages.leave()
        told(found[-1])
        if name == "driver" and found[-1].verdict == FAILED:
            break
    return found


def main() -> None:
    names, device = chosen(sys.argv[1:])
    stages.enter("loading libraries")
    import torch  # late: it takes seconds to load

    from bild_lab.lab.measure.environment import environment

    where = torch.device(device)

    def tell(step: Step) -> None:
        output.print(escape(f"{step.name}: {step.verdict}, {step.seconds:.0f} s. {' '.join(step.lines[:1])}"))

    found = run_steps(names, Steps(where, small=where.type != "cuda"), tell)
    usable = where if where.type != "cuda" or torch.cuda.is_available() else torch.device("cpu")
    page, data = write(FOLDER, environment(usable), found)
    output.print(escape(f"{page}, and all numbers in {data}"))
    if any(step.verdict == FAILED for step in found):
        sys.exit(1)


if __name__ == "__main__":
    run_application(main, None)
