"""Small modules beside a frozen model, each in its own folder: BiTA's adapter, heads, EAGLE."""

from bild_lab.engine.heads.bita import BitaAdapter, load_bita
from bild_lab.engine.heads.eagle import Eagle, EagleConfig, load_eagle
from bild_lab.engine.heads.medusa import MedusaConfig, MedusaHeads, load_medusa
