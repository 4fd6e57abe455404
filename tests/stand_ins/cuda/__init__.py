"""Stand-in for CUDA and NCCL in a process of its own: true values, on devices that are the host.

device.cpp   CUDA devices for a torch without CUDA: memory, operations, guards, pinned memory
begin        builds and loads it, before torch is imported
surface      torch's functions for CUDA, in Python
nccl         NCCL over gloo: refuses what NCCL refuses, delivers when it is waited for
kernels      the CUDA kernels, in the emulator
attention    torch's attention kernels of GPUs, by plain blocks

What is found by it: tensors of a CPU and of a device in one operation, devices that are not the
current one, messages of tensors of a CPU, results that are read before anybody waited for the
message, tensors that are changed or read under one, messages that ranks post in different orders or
sizes. What is not: which stream waits (``tests/stand_ins/gpu`` keeps account of that), and how fast
anything is.
"""
