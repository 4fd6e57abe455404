"""The example model, its data and its training loop. Knows DeepSpeed, and nothing of hybridcomp."""
