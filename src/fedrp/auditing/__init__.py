"""Try to refute a stated epsilon."""
