"""The ledger's figures in the loggers of trainers that people use, each in its own natural place.

``hugging_face.HybridcompCallback`` (Trainer, TRL), ``lightning.HybridcompCallback`` and
``torchtitan.ledger_metrics`` (an override); ``figures.take`` is for loops of one's own, under
Accelerate or without anything. Each module imports its trainer, so none is imported here.
"""
