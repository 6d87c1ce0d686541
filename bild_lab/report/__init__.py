"""Reports of what a sweep found: figures, HTML, tables in the terminal, trackers."""
