"""Generate text from the ranks of a training, with their weights as they stand."""
