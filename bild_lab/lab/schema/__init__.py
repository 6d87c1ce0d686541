"""Results as typed data: every number with its name, unit and meaning, and how it is stored."""
