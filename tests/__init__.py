"""Tests, one folder per part of the package."""
