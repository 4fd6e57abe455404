"""Stand-in for a GPU where there is none: its memory, its streams, NCCL and launches of kernels.

memory    which stream made, wrote and read a block of memory, and what that must wait for
machine   torch's calls for streams and events, torch's operations, launches, NCCL

Tensors are torch's fake ones (``FakeTensorMode``): they have shapes, dtypes and a device but no
values, so what the host would have to wait for to look at raises, and so do tensors of two devices
in one operation. What runs on streams side by side without having waited raises ``Race``.
"""
