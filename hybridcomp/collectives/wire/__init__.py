"""The wire: what collectives have in common between a codec and torch.distributed.

Only ``transport`` (and ``gloo_pairs`` below it) calls torch.distributed for messages.
"""
