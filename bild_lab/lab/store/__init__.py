"""Results on disk: one folder per point, written atomically."""
