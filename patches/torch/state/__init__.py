"""State of attached models in checkpoints, and whose it is."""
