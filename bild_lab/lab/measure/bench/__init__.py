"""The benchmark: our loop against Transformers' own and other engines, interleaved in one run."""
