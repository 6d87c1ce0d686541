"""Training a judge: labels by search, and a linear classifier."""
