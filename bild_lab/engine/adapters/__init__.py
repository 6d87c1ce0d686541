"""Small modules trained for a frozen model, each saved in its own folder: BiTA's adapter and Medusa's heads."""

from bild_lab.engine.adapters.bita import BitaAdapter, BitaConfig, bita_config, load_bita
from bild_lab.engine.adapters.medusa import MedusaConfig, MedusaHeads, load_medusa

__all__ = ["BitaAdapter", "BitaConfig", "MedusaConfig", "MedusaHeads", "bita_config", "load_bita", "load_medusa"]
