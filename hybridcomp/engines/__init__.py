"""Models under torch's own FSDP2 and DDP: the public slots of torch, no monkey-patch on the way of
a message.

``attach`` (one call, or by itself under ``hybridcomp.run``, ``arm``) finds out what a model is,
holds the block against it (``rules``), makes its channels (``session``) and puts them into the
slots of ``ddp`` or ``fsdp2``. What it hands back (``attached.Attached``) follows the optimizer
(``steps``) and is a ``Stateful`` of torch.distributed.checkpoint (``stateful``).
"""
