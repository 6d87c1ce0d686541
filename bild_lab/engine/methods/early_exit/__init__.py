"""Early exits: CALM, heads of inner layers, and draft models that are layers of the target."""
