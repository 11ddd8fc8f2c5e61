"""Keys, sealed envelopes, masks, secure sums."""
