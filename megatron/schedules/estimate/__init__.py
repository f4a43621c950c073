"""What training would take on GPUs that are not at hand: arithmetic, a roofline, memory, and a search over settings."""
