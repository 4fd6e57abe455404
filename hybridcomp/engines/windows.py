"""Versions of torch whose own engines have the slots that hybridcomp uses."""

from __future__ import annotations

#: ``register_comm_hook`` with the ``GradBucket`` of today
DDP = "torch >= 2.6, < 2.14"
#: 2.9 is the first with ``set_custom_all_gather`` and ``set_custom_reduce_scatter``
#: (pytorch#155189)
FSDP2 = "torch >= 2.9, < 2.14"
