"""EAGLE: a trained layer that continues the target's hidden states, and the trees that it drafts."""
