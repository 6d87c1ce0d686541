"""The papers' printed numbers, figures and tables, beside ours."""
