"""Training: the toy pair, fine-tuning and alignment."""
