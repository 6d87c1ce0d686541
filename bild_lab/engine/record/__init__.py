"""A record of what models scored: policies decode over it, and a model runs only where a text is
new.
"""

from bild_lab.engine.record.model import RecordedModel
from bild_lab.engine.record.store import Store
