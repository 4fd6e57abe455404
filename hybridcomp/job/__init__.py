"""Coordinate a job's ranks: compare state, name dead ranks, write files together, end cleanly."""
