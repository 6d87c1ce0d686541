"""Datasets: reading rows and turning them into examples."""
