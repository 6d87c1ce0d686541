"""What the numbers mean: Pareto fronts, walltime theory, statistics."""
