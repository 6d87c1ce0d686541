"""Tests of docs/hooks, which make pages of the site."""
