"""Models that implement the session protocol, and how they are loaded."""
