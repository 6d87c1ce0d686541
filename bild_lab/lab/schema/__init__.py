"""What a result holds: its fields with their types and units, and the columns and labels made of them."""
