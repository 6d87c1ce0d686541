"""Acceptance rules: one module per way to decide how much of a draft stands."""

from bild_lab.acceptance.exact_match import ExactMatch
from bild_lab.acceptance.rollback import Rollback
from bild_lab.acceptance.speculative_sampling import SpeculativeSampling

__all__ = ["ExactMatch", "Rollback", "SpeculativeSampling"]
