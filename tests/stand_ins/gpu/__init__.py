"""Stand-in for a GPU: its memory, streams, NCCL and kernel launches.

memory    streams that allocated, wrote and read a block, and the required waits
machine   torch's calls for streams and events, torch's operations, launches, NCCL

Tensors are torch's fake ones (``FakeTensorMode``) with shapes, dtypes and a device but no values:
host reads that would block raise, and so do tensors of two devices in one operation. Unsynchronized
accesses of two streams raise ``Race``.
"""
