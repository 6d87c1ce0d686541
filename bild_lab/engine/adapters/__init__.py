"""Small modules beside a frozen model, each in a folder of its own: BiTA's adapter, heads (Medusa, per layer), EAGLE.

`bita_target` is a model with BiTA's adapter.
"""

from bild_lab.engine.adapters.bita import BitaAdapter, BitaConfig, bita_config, load_bita
from bild_lab.engine.adapters.eagle import Eagle, EagleConfig
from bild_lab.engine.adapters.eagle_files import load_eagle
from bild_lab.engine.adapters.medusa import MedusaConfig, MedusaHeads, load_medusa

__all__ = [
    "BitaAdapter",
    "BitaConfig",
    "Eagle",
    "EagleConfig",
    "MedusaConfig",
    "MedusaHeads",
    "bita_config",
    "load_bita",
    "load_eagle",
    "load_medusa",
]
