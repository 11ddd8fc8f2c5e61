"""What happens to an update between a client's training and the server's mean: clip, noise, whole numbers for masks."""
