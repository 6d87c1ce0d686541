"""Small modules trained beside a frozen model: BiTA's adapter, Medusa's heads, per-layer heads."""
