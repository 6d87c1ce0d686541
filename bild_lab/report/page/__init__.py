"""The HTML report of a sweep."""
