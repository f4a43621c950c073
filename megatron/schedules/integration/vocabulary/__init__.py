"""Vocabulary parallelism (arXiv 2411.05288): embedding and output layer split over all pipeline ranks."""
