"""Everything that produces tokens: the loop, drafters, acceptance rules, models and heads."""
