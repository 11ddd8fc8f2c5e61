"""What a client does to an update before it leaves: clip, add noise."""
