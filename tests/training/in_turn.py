"""Run jobs of a trainer one after the other on forked ranks, and return their results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from tests.paths import SCRIPTS
from tests.ranks import Trained


def start_deepspeed() -> None:
    """Make DeepSpeed use the process group of ``tests.ranks``, with fp16 on the CPU too."""
    import deepspeed
    import deepspeed.ops
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its build takes a minute
    type(get_accelerator()).is_fp16_supported = lambda self: True
    deepspeed.init_distributed(dist.get_backend(), verbose=False)


def in_turn(
    jobs: Sequence[Any], train: Callable[[Any], Any], native: Callable[[Any], bool]
) -> list[Any]:
    """Return the result of ``train`` for every job; hybridcomp's errors as text.

    All patches are reverted for ``native`` jobs.
    """
    import hybridcomp
    from hybridcomp.errors import HybridcompError
    from hybridcomp.session import process

    start_deepspeed()
    if str(SCRIPTS) not in sys.path:
        sys.path.insert(0, str(SCRIPTS))
    outcomes: list[Any] = []
    for job in jobs:
        hybridcomp.uninstall() if native(job) else hybridcomp.install()
        try:
            outcomes.append(train(job))
        except HybridcompError as error:
            outcomes.append(f"{type(error).__name__}: {error}")
        finally:
            process.configure(None)
    return outcomes


def first(outcomes: Trained, name: str) -> Any:
    """Return rank 0's result of a successful job; all ranks have the same losses."""
    for outcome in outcomes[name]:
        assert not isinstance(outcome, str), outcome
        assert outcome.losses == outcomes[name][0].losses
    return outcomes[name][0]
