"""Write the ledger's figures to the loggers of common trainers.

``hugging_face.HybridcompCallback`` (Trainer, TRL), ``lightning.LedgerCallback`` and
``torchtitan.ledger_metrics`` (an override); ``figures.take`` is for custom loops, under Accelerate
or without a trainer. Each module imports its trainer, so none is imported here.
"""
