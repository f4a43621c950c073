"""The vocabulary cut over all pipeline ranks (arXiv 2411.05288), embedding and output layer alike."""
