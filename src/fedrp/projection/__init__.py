"""A w from a key, matrix-free."""
