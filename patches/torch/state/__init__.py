"""Save and load the state of attached models in checkpoints, under each model's name."""
