"""What a sweep found, shown: figures, HTML report, terminal table, Weights & Biases."""
