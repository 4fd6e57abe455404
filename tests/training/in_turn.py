"""Run jobs of a trainer one after the other on forked ranks, and return their results."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.paths import SCRIPTS
from tests.ranks import Trained

#: (dimension, direction) -> messages, native messages, raw bytes, wire bytes
Ledger = dict[tuple[str, str], tuple[int, int, int, int]]


def digest(tensor: Tensor) -> str:
    """Hash the bytes."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(data.cpu().numpy().tobytes()).hexdigest()[:16]


def ledger_of(channels: Any) -> Ledger:
    """Return the figures of all dimensions that sent messages; empty without channels."""
    entries = {} if channels is None else channels.ledger.interval
    return {
        key: (int(e.messages), int(e.native), int(e.raw_nbytes), int(e.wire_nbytes))
        for key, e in entries.items()
        if e.messages
    }


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


def counting(seed: int, sequences: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return tokens and labels, [sequences, length], of learnable sequences that count by 7."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(vocabulary, (sequences, 1), generator=generator)
    ids = (start + 7 * torch.arange(length + 1)) % vocabulary
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def losses_of(trainer: Any, job: Any, batches: Callable[[int], Iterator[Any]]) -> list[float]:
    """Train by a trainer of the example, from a checkpoint if ``job.load``; return the losses.

    ``job`` has ``steps``, ``folder`` of a checkpoint, ``save`` (after this step) and ``load``.
    """
    engine, losses, first = trainer.engine, [], 0
    if job.load:
        _, state = engine.load_checkpoint(job.folder)
        first = state["step"]
    for step in range(first, job.steps):
        losses.append(trainer.step(batches(step)))
        if step + 1 == job.save:
            engine.save_checkpoint(job.folder, client_state={"step": step + 1})
    return losses


def first(outcomes: Trained, name: str) -> Any:
    """Return rank 0's result of a successful job; all ranks have the same losses."""
    for outcome in outcomes[name]:
        assert not isinstance(outcome, str), outcome
        assert outcome.losses == outcomes[name][0].losses
    return outcomes[name][0]
