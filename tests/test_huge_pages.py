"""Large tensors lie in huge pages, so that reading weights does not wait for their addresses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# prints the flags of the mapping that holds the middle of a tensor of 64 MiB
PROGRAM = """
import re, bild_lab, torch
tensor = torch.ones(2**26, dtype=torch.uint8)
middle = tensor.data_ptr() + 2**25
inside = False
for line in open("/proc/self/smaps"):
    if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
        inside = int(bounds[1], 16) <= middle < int(bounds[2], 16)
    elif inside and line.startswith("VmFlags:"):
        print(line)
"""


def flags(**environment: str) -> list[str]:
    kept = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    command = [sys.executable, "-c", PROGRAM]
    process = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**kept, **environment}
    )
    return process.stdout.split()


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="this system has no transparent huge pages")
def test_large_tensors_ask_for_huge_pages() -> None:
    assert "hg" in flags()


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="this system has no transparent huge pages")
def test_who_switches_them_off_has_none() -> None:
    assert "hg" not in flags(THP_MEM_ALLOC_ENABLE="0")
