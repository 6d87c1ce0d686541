"""Analysis of results: statistics, costs, theory against measurement, Pareto fronts,
comparisons.
"""
