"""What ``scripts/fuzz.py`` tries: damaged payloads, hostile values, broken blocks and checkpoints."""
