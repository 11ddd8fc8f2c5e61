"""Patient-level privacy: clip and noise on what each record does to a local step, and what they are worth."""
