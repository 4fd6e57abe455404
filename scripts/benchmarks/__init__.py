"""Measurements against peers that back a claim."""
