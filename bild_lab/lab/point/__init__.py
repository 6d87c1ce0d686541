"""From a configuration to objects that decode, and from a prompt to text; a point and its identity."""
