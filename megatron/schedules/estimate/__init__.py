"""Estimates of training on GPUs that you do not have: arithmetic, a roofline, memory, and a search over settings."""
