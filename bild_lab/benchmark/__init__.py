"""The benchmark, and other engines as peers: each decodes in a process of its own."""
