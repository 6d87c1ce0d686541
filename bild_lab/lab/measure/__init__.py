"""How latency is measured, and on what."""
