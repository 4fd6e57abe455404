"""Parts of ``scripts/fuzz.py``: damaged payloads, hostile values and checkpoints."""
