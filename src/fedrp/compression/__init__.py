"""Few bits per number: the grid that noise and masks share."""
