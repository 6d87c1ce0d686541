"""Write the pages of docs/results from the numbers kept beside them: python scripts/results.py [keep outputs/NAME]

python scripts/results.py                       # or make results: every page that has a template
python scripts/results.py keep outputs/NAME     # a sweep, screening, benchmark, training, match rates, outputs/figures
python scripts/results.py keep outputs/NAME as=OTHER
"""

from __future__ import annotations

import sys
from pathlib import Path

from bild_lab.errors import UserError
from bild_lab.lab.cli import escape, output, run_application, stages

PAGES = Path(__file__).resolve().parents[1] / "docs" / "results"


def main() -> None:
    stages.enter("loading libraries")
    from bild_lab.report.result_pages import DATA, TEMPLATE, keep, page_of, render  # late: pandas takes a second

    match sys.argv[1:]:
        case []:
            for template in sorted(PAGES.glob(f"*{TEMPLATE}")):
                page_of(template).write_text(render(template))
                output.print(escape(str(page_of(template))))
        case ["keep", folder, *name] if len(name) < 2 and all(one.startswith("as=") for one in name):
            for file in keep(Path(folder), PAGES / DATA, *(one.removeprefix("as=") for one in name)):
                output.print(escape(str(file)))
        case words:
            raise UserError(f"give nothing, or `keep outputs/NAME [as=OTHER]`; got {' '.join(words)!r}")


if __name__ == "__main__":
    run_application(main, None)
