"""The configuration, and the command line that changes it."""
