"""State of attached models in checkpoints, by the model it belongs to."""
