"""Acceptance rules: one module for each way to decide how much of a draft is accepted."""

from bild_lab.engine.acceptance.block_verification import BlockVerification
from bild_lab.engine.acceptance.cascades import Cactus, SpeculativeCascade, StaticEnsemble
from bild_lab.engine.acceptance.exact_match import ExactMatch
from bild_lab.engine.acceptance.rejection_sampling import RejectionSampling
from bild_lab.engine.acceptance.rollback import ReleasedRollback, Rollback
from bild_lab.engine.acceptance.speculative_sampling import Overlap, SpeculativeSampling
from bild_lab.engine.acceptance.typical import (
    MarginAcceptance,
    TruncationSampling,
    TypicalAcceptance,
)
