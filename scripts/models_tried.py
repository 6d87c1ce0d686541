"""Try `hf` on many small random models, and write docs/models.md: python -m scripts.models_tried [ARCHITECTURE …]

With names (python -m scripts.models_tried gemma2 mamba) it prints the rows of these architectures only.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from bild_lab.errors import UserError
from bild_lab.lab.cli import run_application, stages

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
TABLE = "<!-- the table is written by scripts/models_tried.py -->\n"


def main() -> None:
    stages.enter("loading libraries")
    import torch  # late: it takes seconds to load
    import transformers

    from tests.models_tried import page, try_architecture
    from tests.tiny_architectures import ALL

    names = sys.argv[1:] or list(ALL)
    if unknown := sorted(set(names) - set(ALL)):
        raise UserError(f"an architecture of tests/tiny_architectures.py is needed, got {unknown[0]!r}")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    stages.leave()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["BILD_LAB_CACHE"] = cache  # check anew
        tried = []
        for name in names:
            tried.append(try_architecture(name))
            print(name, *tried[-1].outcomes.values(), sep=" | ", flush=True)
    if not sys.argv[1:]:
        head, _, _ = PAGE.read_text(encoding="utf-8").partition(TABLE)
        versions = f"\n{len(tried)} architectures of Transformers {transformers.__version__}:\n\n"
        PAGE.write_text(head + TABLE + versions + page(tried), encoding="utf-8")
    if faults := [each.name for each in tried if each.faults]:
        raise UserError(f"{len(faults)} architectures are neither exact nor refused: {', '.join(faults)}")


if __name__ == "__main__":
    run_application(main, None)
