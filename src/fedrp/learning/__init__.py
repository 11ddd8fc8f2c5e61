"""One client's data, model and local training."""
