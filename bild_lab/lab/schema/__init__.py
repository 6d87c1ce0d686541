"""The schema of results: fields with types and units, and the columns and labels for them."""
