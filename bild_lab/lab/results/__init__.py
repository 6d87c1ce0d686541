"""Results on disk: one folder per point, written whole or not at all."""
