"""The seams of DeepSpeed, one module each."""
