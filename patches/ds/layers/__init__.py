"""Seams of layers that communicate: tensor, sequence and expert parallel, sparse tables."""
