"""Seams of ZeRO's reductions and gathers."""
