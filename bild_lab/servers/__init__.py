"""Other engines behind an OpenAI-compatible HTTP interface, as policies."""
