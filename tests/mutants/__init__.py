"""Mutation testing of the modules that decide tokens and numbers: `python -m tests.mutants`."""
