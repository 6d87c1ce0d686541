"""Small modules beside a frozen model, each in a folder of its own: BiTA's adapter, Medusa's heads, heads per layer.

`bita_target` is a model with BiTA's adapter.
"""

from bild_lab.engine.adapters.bita import BitaAdapter, BitaConfig, bita_config, load_bita
from bild_lab.engine.adapters.medusa import MedusaConfig, MedusaHeads, load_medusa

__all__ = ["BitaAdapter", "BitaConfig", "MedusaConfig", "MedusaHeads", "bita_config", "load_bita", "load_medusa"]
