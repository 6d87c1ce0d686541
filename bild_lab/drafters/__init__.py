"""Drafters: one module per way to propose tokens."""

from bild_lab.drafters.model import LowConfidence, ModelDrafter
from bild_lab.drafters.none import NoDraft

__all__ = ["LowConfidence", "ModelDrafter", "NoDraft"]
