"""Check the Triton kernels on this machine's GPU, and time them: python scripts/check_gpu.py [MODEL …] [PAIR …]

    python scripts/check_gpu.py                       the usual models and pairs, in a few minutes
    python scripts/check_gpu.py llama-7b              these models
    python scripts/check_gpu.py t5-large:t5-small     these pairs: whole texts, the host included

Weights are random, at published sizes, in bfloat16: nothing is downloaded. Each line is a finding; it ends with 1 if
any is wrong.
"""

from __future__ import annotations

import itertools
import sys
import time

from rich.markup import escape

from bild_lab.errors import UserError, require_choice
from bild_lab.lab.config.console import output
from bild_lab.lab.config.entrypoint import run_application


def main() -> None:
    """Print the findings of the models and pairs that are named, or of the usual ones.

    Raises UserError without a GPU that the kernels run on, for an unknown model or pair, and at the
    end if a finding is wrong.
    """
    import torch  # late, as it takes seconds to load

    from bild_lab.engine.models.native import why_no_kernels
    from bild_lab.lab.measure.machine import read_gb_per_s

    if not torch.cuda.is_available():
        raise UserError("the Triton kernels need a GPU, and PyTorch finds none")
    device = torch.device("cuda")
    if (reason := why_no_kernels(device, torch.bfloat16)) is not None:
        raise UserError(f"the Triton kernels cannot run: {reason}")
    from bild_lab.benchmark.decoding_check import PAIRS, USUAL_PAIRS, check_pairs
    from bild_lab.benchmark.kernel_check import MODELS, USUAL, check_all

    names = sys.argv[1:] or [*USUAL, *USUAL_PAIRS]
    for name in names:
        require_choice("model or pair", name, [*MODELS, *PAIRS])
    gb_per_s = read_gb_per_s(device, torch.cuda.synchronize)
    output.print(f"{torch.cuda.get_device_name(device)} reads {gb_per_s:,.0f} GB/s")
    began, wrong = time.monotonic(), 0
    models, pairs = ([name for name in names if name in known] for known in (MODELS, PAIRS))
    findings = itertools.chain(
        check_all(models, device, gb_per_s), check_pairs(pairs, device, gb_per_s)
    )
    for name, finding in findings:
        verdict = {True: "right", False: "WRONG", None: "     "}[finding.right]
        wrong += finding.right is False
        seconds = time.monotonic() - began
        output.print(escape(f"{seconds:6.1f} s  {name:26} {verdict}  {finding.text}"))
    if wrong:
        raise UserError(f"{wrong} findings are wrong, marked WRONG above")


if __name__ == "__main__":
    run_application(main, None)
