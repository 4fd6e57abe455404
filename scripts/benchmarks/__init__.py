"""Measurements against peers that back a claim, and the chapters of docs/results."""
