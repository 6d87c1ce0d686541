"""The acceptance rules under names that stay where files move, for configurations:
`_target_: bild_lab.engine.acceptance.ExactMatch`.
"""

from bild_lab.engine.methods.bild import ReleasedRollback, Rollback
from bild_lab.engine.methods.speculative.block_verification import BlockVerification
from bild_lab.engine.methods.speculative.cascades import (
    Cactus,
    SpeculativeCascade,
    StaticEnsemble,
)
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.methods.speculative.rejection_sampling import RejectionSampling
from bild_lab.engine.methods.speculative.sampling import OverlapMeasurement, SpeculativeSampling
from bild_lab.engine.methods.speculative.typical_acceptance import (
    MarginAcceptance,
    TruncationSampling,
    TypicalAcceptance,
)

__all__ = [
    "BlockVerification",
    "Cactus",
    "ExactMatch",
    "MarginAcceptance",
    "OverlapMeasurement",
    "RejectionSampling",
    "ReleasedRollback",
    "Rollback",
    "SpeculativeCascade",
    "SpeculativeSampling",
    "StaticEnsemble",
    "TruncationSampling",
    "TypicalAcceptance",
]
