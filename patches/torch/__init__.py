"""Models under torch's own FSDP2 and DDP: their public slots, and one seam of ring attention.

``attach``, which the user calls, or ``auto_attach`` under ``hybridcomp.run``, finds out what a
model is, checks the block against it (``rules``), makes its channels (``session``) and puts them
into the slots of ``ddp`` or ``fsdp2``. It returns ``attached.Attached``, which follows the
optimizer (``steps``) and is a ``Stateful`` of torch.distributed.checkpoint (``stateful``).
"""
