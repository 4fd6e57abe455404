#!/usr/bin/env python3
"""Run ``python -m torchtitan.train``, also on torch 2.13 and on CPUs.

``torchtitan_small.py`` shows the command. torchtitan 0.3 is written for torch 2.14 and calls a
function that torch 2.13 has under another name.
"""

from __future__ import annotations

import torch.distributed as dist
from on_cpu import torchtitan_devices
from torch.distributed.distributed_c10d import _set_pg_timeout

torchtitan_devices()
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = _set_pg_timeout  # type: ignore[attr-defined]

from torchtitan.train import main  # noqa: E402

if __name__ == "__main__":
    main()
