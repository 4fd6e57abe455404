"""Bits per value at equal error: captured tensors, emulated peers, tables."""
