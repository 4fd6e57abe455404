"""Channel: one dimension of one engine. The only thing that a patch calls.

A patch asks ``channel.codec(...)`` first. ``None`` means native: the patch reports the message with
``channel.native(...)`` and calls upstream's original, so that ``none`` is bit-identical.
Otherwise it hands the tensors over with that codec.
"""
