"""Drafters: one module for each way to propose tokens."""

from bild_lab.engine.drafters.adaptive_skip import AdaptiveSkipDrafter
from bild_lab.engine.drafters.bita import MaskTokenDrafter
from bild_lab.engine.drafters.eagle import EagleDrafter
from bild_lab.engine.drafters.hierarchy import SpeculativeDrafter
from bild_lab.engine.drafters.hybrid import HybridDrafter
from bild_lab.engine.drafters.hydra import HydraDrafter
from bild_lab.engine.drafters.lookahead import LookaheadDrafter
from bild_lab.engine.drafters.medusa import MedusaDrafter
from bild_lab.engine.drafters.model import LowConfidence, ModelDrafter
from bild_lab.engine.drafters.model_tree import ModelTreeDrafter
from bild_lab.engine.drafters.ngram import NGramDrafter
from bild_lab.engine.drafters.ngram_table import NGramTable
from bild_lab.engine.drafters.none import NoDraft
from bild_lab.engine.drafters.prompt_lookup import PromptLookup
from bild_lab.engine.drafters.steps import StepDrafter
from bild_lab.engine.drafters.suffix import SuffixDrafter
from bild_lab.engine.drafters.synthetic import SyntheticDrafter
from bild_lab.engine.drafters.token_recycling import TokenRecycling
from bild_lab.engine.drafters.windows import AdaptiveWindow

__all__ = [
    "AdaptiveSkipDrafter",
    "AdaptiveWindow",
    "EagleDrafter",
    "HybridDrafter",
    "HydraDrafter",
    "LookaheadDrafter",
    "LowConfidence",
    "MaskTokenDrafter",
    "MedusaDrafter",
    "ModelDrafter",
    "ModelTreeDrafter",
    "NGramDrafter",
    "NGramTable",
    "NoDraft",
    "PromptLookup",
    "SpeculativeDrafter",
    "StepDrafter",
    "SuffixDrafter",
    "SyntheticDrafter",
    "TokenRecycling",
]
