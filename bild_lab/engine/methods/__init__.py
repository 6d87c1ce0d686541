"""The methods, as the papers name them: their drafters, acceptance rules and trained modules."""
