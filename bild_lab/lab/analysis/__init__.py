"""What the numbers mean: statistics, costs, theory beside measurement, Pareto fronts, comparisons."""
