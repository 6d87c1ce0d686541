"""Drafters: one module for each way to propose tokens."""

from bild_lab.engine.drafters.candidates import MaskTokenDrafter, MedusaDrafter
from bild_lab.engine.drafters.combined import HybridDrafter, SpeculativeDrafter
from bild_lab.engine.drafters.eagle import EagleDrafter
from bild_lab.engine.drafters.lookahead import LookaheadDrafter
from bild_lab.engine.drafters.model import AdaptiveWindow, ModelDrafter, TargetFirstWindow
from bild_lab.engine.drafters.model_tree import ModelTreeDrafter
from bild_lab.engine.drafters.ngram import NGramDrafter, NGramTable
from bild_lab.engine.drafters.none import NoDraft
from bild_lab.engine.drafters.prompt_lookup import PromptLookup
from bild_lab.engine.drafters.suffix import SuffixDrafter
from bild_lab.engine.drafters.synthetic import SyntheticDrafter
from bild_lab.engine.drafters.token_recycling import TokenRecycling
