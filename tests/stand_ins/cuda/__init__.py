"""Stand-in for CUDA and NCCL in a separate process: real values, on devices in host memory.

device.cpp   CUDA devices for a torch without CUDA: memory, operations, guards, pinned memory
begin        builds and loads it before torch is imported
surface      torch's functions for CUDA, in Python
nccl         NCCL over gloo: rejects what NCCL rejects, delivers in ``wait``
kernels      the CUDA kernels, in the emulator
attention    torch's attention kernels of GPUs, by plain blocks

It detects CPU and device tensors in one operation, devices other than the current one, messages of
CPU tensors, results read before ``wait``, tensors changed or read during a message, and messages
that ranks post in different orders or sizes. It does not track streams (``tests/stand_ins/gpu``
does) or speed.
"""
