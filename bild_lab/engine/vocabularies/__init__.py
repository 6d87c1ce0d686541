"""Draft models with another vocabulary than the target's (arXiv 2502.05202)."""

from bild_lab.engine.vocabularies.overlap import VocabularyOverlap
from bild_lab.engine.vocabularies.shared_ids import SharedIdModel
from bild_lab.engine.vocabularies.translated import TranslatedModel, in_vocabulary_of
