"""Models behind the session protocol, and loading them."""
