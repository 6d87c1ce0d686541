"""What makes a paper's item: its steps, what each needs, and running them."""
