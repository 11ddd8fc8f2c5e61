"""Many models of one structure computed as one: a module becomes a function of stacked parameters."""
