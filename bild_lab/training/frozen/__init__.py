"""Small modules trained beside a frozen model: BiTA's adapter, Medusa's heads, heads of inner layers."""
