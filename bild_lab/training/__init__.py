"""Training: a model's own weights, a drafter on its target's answers, small modules beside a frozen
model.
"""
