"""Example model, data and training loop. They depend on DeepSpeed, not on hybridcomp."""
