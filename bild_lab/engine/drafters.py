"""The drafters under names that stay where files move, for configurations:
`_target_: bild_lab.engine.drafters.ModelDrafter`.
"""

from bild_lab.engine.methods.bita import MaskTokenDrafter
from bild_lab.engine.methods.dflash import DFlashDrafter
from bild_lab.engine.methods.eagle.drafter import EagleDrafter
from bild_lab.engine.methods.lookup.lookahead import LookaheadDrafter
from bild_lab.engine.methods.lookup.ngram import NGramDrafter
from bild_lab.engine.methods.lookup.prompt_lookup import PromptLookup
from bild_lab.engine.methods.lookup.suffix import SuffixDrafter
from bild_lab.engine.methods.lookup.token_recycling import TokenRecycling
from bild_lab.engine.methods.medusa import MedusaDrafter
from bild_lab.engine.methods.mtp import MtpDrafter
from bild_lab.engine.methods.speculative.combined_drafters import (
    HybridDrafter,
    SpeculativeDrafter,
)
from bild_lab.engine.methods.speculative.draft_model import ModelDrafter
from bild_lab.engine.methods.speculative.draft_tree import ModelTreeDrafter
from bild_lab.engine.methods.speculative.synthetic import SyntheticDrafter
from bild_lab.engine.methods.vanilla import NoDraft

__all__ = [
    "DFlashDrafter",
    "EagleDrafter",
    "HybridDrafter",
    "LookaheadDrafter",
    "MaskTokenDrafter",
    "MedusaDrafter",
    "ModelDrafter",
    "ModelTreeDrafter",
    "MtpDrafter",
    "NGramDrafter",
    "NoDraft",
    "PromptLookup",
    "SpeculativeDrafter",
    "SuffixDrafter",
    "SyntheticDrafter",
    "TokenRecycling",
]
