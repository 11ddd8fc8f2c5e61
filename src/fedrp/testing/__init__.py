"""What tests and demos use: a Flower grid in one process, a deployment on loopback."""
