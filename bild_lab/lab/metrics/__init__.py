"""Quality of outputs, for their task or beside a baseline, with intervals."""
