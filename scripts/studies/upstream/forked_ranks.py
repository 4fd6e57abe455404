"""A plugin of pytest: ranks of DeepSpeed's tests fork from a server that has its imports behind it.

Every test starts its ranks anew; alone, each of them takes some ten seconds to import torch and
DeepSpeed. What ``sitecustomize`` arms is armed in the server, before the fork.
"""

from __future__ import annotations

import multiprocessing

#: torch's compiler is imported by the first optimizer and by a decorator of Muon's, for 1.3 s each
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
