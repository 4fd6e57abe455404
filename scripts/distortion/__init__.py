"""Bits per value at equal error: captured tensors, peers that stand in for others' codecs, tables."""
