"""Fine-tuning a checkpoint, or training a model from random weights, on prompts and their answers."""
