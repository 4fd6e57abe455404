"""Parts of ``scripts/fuzz.py``: damaged payloads, hostile values, bad blocks and checkpoints."""
