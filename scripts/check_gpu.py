"""Check the Triton kernels on this machine's GPU, and time them: python scripts/check_gpu.py [MODEL …] [PAIR …]

    python scripts/check_gpu.py                         the usual models and pairs, in some minutes
    python scripts/check_gpu.py llama-7b llama-7b-Q4_0  these models, one with weights in blocks
    python scripts/check_gpu.py t5-large:t5-small       these pairs: whole texts, the host included

Weights are random, at published sizes, in bfloat16: nothing is downloaded. Each line is a finding; it fails if any is
wrong. What raises an error is wrong, and the rest is checked nevertheless, in a fresh process if the GPU answers no
more. Where nothing is found for five minutes, it says where it waits, and ends.
"""

from __future__ import annotations

import faulthandler
import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from rich.markup import escape

from bild_lab.errors import UserError, require_choice
from bild_lab.lab.config.console import output
from bild_lab.lab.config.entrypoint import run_application

if TYPE_CHECKING:
    import torch

    from bild_lab.benchmark.kernel_check import Finding

MOST_SILENCE_S = 300.0


def main() -> None:
    """Print the findings of the models and pairs that are named, or of the usual ones.

    Raises UserError without a GPU that the kernels run on, for an unknown model or pair, and at the
    end if a finding is wrong.
    """
    import torch  # late, as it takes seconds to load

    from bild_lab.lab.measure.machine import read_gb_per_s

    device = gpu_of_kernels()
    import triton  # not everywhere

    names = checked_names()
    gb_per_s = read_gb_per_s(device, torch.cuda.synchronize)
    output.print(f"{torch.cuda.get_device_name(device)} reads {gb_per_s:,.0f} GB/s")
    output.print(f"PyTorch {torch.__version__}, Triton {triton.__version__}")
    began, wrong = time.monotonic(), 0
    faulthandler.dump_traceback_later(MOST_SILENCE_S, exit=True)
    for index, name in enumerate(names):
        for finding in findings_of(name, device, gb_per_s):
            faulthandler.dump_traceback_later(MOST_SILENCE_S, exit=True)
            verdict = {True: "right", False: "WRONG", None: "     "}[finding.right]
            wrong += finding.right is False
            seconds = time.monotonic() - began
            output.print(escape(f"{seconds:6.1f} s  {name:26} {verdict}  {finding.text}"))
            if finding.right is False and not answers():
                go_on_afresh(names[index + 1 :])
        gc.collect()
        torch.cuda.empty_cache()
    faulthandler.cancel_dump_traceback_later()
    if wrong:
        raise UserError(f"{wrong} findings are wrong, marked WRONG above")


def gpu_of_kernels() -> torch.device:
    """This machine's GPU. Raises UserError without one that the kernels run on."""
    import torch

    from bild_lab.engine.models.native import why_no_kernels

    if not torch.cuda.is_available():
        raise UserError("the Triton kernels need a GPU, and PyTorch finds none")
    device = torch.device("cuda")
    if (reason := why_no_kernels(device, torch.bfloat16)) is not None:
        raise UserError(f"the Triton kernels cannot run: {reason}")
    return device


def checked_names() -> list[str]:
    """The models and pairs of the command line, or the usual ones, models in blocks and pairs last.
    Raises UserError for unknown ones.
    """
    from bild_lab.benchmark.decoding_check import PAIRS, USUAL_PAIRS
    from bild_lab.benchmark.kernel_check import BLOCKS, MODELS, USUAL

    names = sys.argv[1:] or [*USUAL, *USUAL_PAIRS]
    for name in names:
        require_choice("model or pair", name, [*MODELS, *BLOCKS, *PAIRS])
    return sorted(names, key=lambda name: (name in BLOCKS, name in PAIRS))


def go_on_afresh(names: list[str]) -> NoReturn:
    """Check the rest in another process, as the GPU answers this one no more. Raises UserError."""
    output.print("the GPU answers this process no more, so a fresh one goes on")
    faulthandler.cancel_dump_traceback_later()
    if names:
        subprocess.run([sys.executable, "-m", "bild_lab", "check_gpu", *names])
    raise UserError("the GPU was lost, after the findings marked WRONG above")


def findings_of(name: str, device: torch.device, gb_per_s: float) -> Iterator[Finding]:
    """All findings of a model or a pair; what raises an error outside of its checks is the last."""
    from bild_lab.benchmark.decoding_check import PAIRS, check_pair
    from bild_lab.benchmark.kernel_check import raised
    from bild_lab.benchmark.kernel_times import check_model

    try:
        if name in PAIRS:
            yield from check_pair(name, device)
        else:
            yield from check_model(name, device, gb_per_s)
    except Exception as error:
        yield raised(name, error)


def answers() -> bool:
    """Whether the GPU still answers this process: after some errors it never does."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    run_application(main, None)
