"""A plugin of pytest: ranks of DeepSpeed's tests fork from a server that has its imports behind it.

Every test starts its ranks anew; alone, each of them takes some ten seconds to import torch and
DeepSpeed. What ``sitecustomize`` arms is armed in the server, before the fork.
"""

from __future__ import annotations

import multiprocessing

multiprocessing.set_forkserver_preload(
    ["torch", "deepspeed", "deepspeed.pipe", "unit.common", "processor_known"]
)
