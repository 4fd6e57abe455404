"""Short versions of scripts/fuzz.py and scripts/chaos.py, with fixed seeds."""
