"""Attacks on what a run gives away: recorded bytes, or the final model. See docs/attacks.md for what they found."""
