"""Models that run with the modules of Transformers."""
