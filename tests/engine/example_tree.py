"""A tree of five drafted tokens.

root
├ 0 (token 5)
│ ├ 2 (7)
│ │ └ 4 (5)
│ └ 3 (8)
└ 1 (6)
"""

from __future__ import annotations

import torch

from bild_lab.engine.draft import Draft

TOKENS = torch.tensor([5, 6, 7, 8, 5])
PARENTS = torch.tensor([-1, -1, 0, 0, 2])


def tree(**fields: object) -> Draft:
    return Draft(TOKENS, parents=PARENTS, **fields)
