"""What ``scripts/fuzz.py`` tries: payloads, values, blocks and checkpoints that are not right."""
