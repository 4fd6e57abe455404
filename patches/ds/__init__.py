"""The seams of DeepSpeed, one module each, and what they share."""
