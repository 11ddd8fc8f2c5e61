"""All parties on this machine."""
