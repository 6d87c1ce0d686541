"""Drafts without a model: n-grams, and what the text itself says elsewhere."""
