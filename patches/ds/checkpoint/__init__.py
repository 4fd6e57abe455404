"""Seams of DeepSpeed's checkpoints, and their conversion for another number of ranks."""
