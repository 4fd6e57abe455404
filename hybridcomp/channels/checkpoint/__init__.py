"""Save and load the state of an engine's channels beside its checkpoints."""
