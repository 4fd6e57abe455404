"""Layers and operations whose own traffic goes through the channels: other cuts of a model.

What upstream sends is taken over by the seams of ``patches`` and the slots of ``engines``. This
room holds what no upstream has: ways to cut a model whose messages exist in hybridcomp alone.
Without a block they send natively.
"""
