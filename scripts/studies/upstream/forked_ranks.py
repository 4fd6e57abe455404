"""pytest plugin: fork the ranks of DeepSpeed's tests from a server with all imports done.

Every test starts new ranks, each of which would import torch and DeepSpeed for some ten seconds.
``sitecustomize`` arms the patches in the server, before the fork.
"""

from __future__ import annotations

import multiprocessing

#: includes torch's compiler, which the first optimizer and a decorator of Muon import, 1.3 s each
SERVER = (
    "torch",
    "torch._dynamo",
    "deepspeed",
    "deepspeed.pipe",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "unit.common",
    "on_cpu",
)
multiprocessing.set_forkserver_preload([*SERVER])
