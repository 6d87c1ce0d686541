"""The HTML pages: the report of a sweep, the list of runs, and the artifact that holds a report."""
