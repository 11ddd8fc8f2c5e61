"""What runs simulated clients: this process, processes of this machine, or a Ray cluster."""
