"""A rank that dies during training under DDP or FSDP2 is named by the others."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hybridcomp
from hybridcomp.errors import AgreementError, PeerError
from hybridcomp.job import agreement, processes
from tests.ranks import RankPool, run_ranks
from tests.selection import by_day

BLOCK: dict[str, Any] = {
    "dp": {"codec": "blockint", "bits": 8},
    "min_bytes": 0,
    "ledger": {"every": 1_000_000},
}
LOST = 1

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")


def killed(wrap: Any) -> None:
    """Exit silently on rank LOST in the backward pass of the third step."""
    model = wrap(nn.Linear(64, 64))
    hybridcomp.attach(model, BLOCK)
    (lost,) = [peer for peer in processes.Known.peers if peer.rank == LOST]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(torch.full((4, 64), float(step + 1))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    loss = model(torch.ones(4, 64)).square().mean()
    if dist.get_rank() == LOST:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerError) as caught:
        loss.backward()
    message = str(caught.value)
    assert "dp at step 2" in message and f"{lost} {processes.ENDED}" in message, message


@pytest.mark.parametrize("wrap", by_day([DistributedDataParallel, fully_shard], [fully_shard]))
def test_a_rank_that_dies_while_training_is_named(wrap: Any) -> None:
    with RankPool(3) as pool, pytest.raises(AssertionError) as ended:
        pool.run(killed, wrap, grace=60.0)
    assert "exit code -9" in str(ended.value) and "still running" not in str(ended.value)
    # the remaining two got their PeerError and exited normally: one failure is shown
    assert str(ended.value).count("of 3:") == 1, str(ended.value)


def of_a_part() -> list[list[int]]:
    """Return the known ranks after ranks 1 and 2 attach a model, and after all attach another."""
    part = dist.new_group([1, 2])
    known = []
    for group in (part, dist.group.WORLD):
        if dist.get_rank() or group is dist.group.WORLD:
            model = DistributedDataParallel(nn.Linear(8, 8), process_group=group)
            hybridcomp.attach(model, {**BLOCK, "hierarchy": "none"})  # otherwise all ranks attach
        known.append([peer.rank for peer in processes.Known.peers])
    return known


def test_a_model_of_a_part_of_the_ranks_makes_these_known() -> None:
    everybody = [0, 1, 2]
    assert run_ranks(3, of_a_part) == [[[], everybody], *2 * [[[1, 2], everybody]]]


def stepped_on_a_part() -> str:
    """Train a model on ranks 1 and 2 while rank 0 has none; return the error."""
    part = dist.new_group([1, 2])
    if dist.get_rank():
        model = DistributedDataParallel(nn.Linear(8, 8), process_group=part)
        hybridcomp.attach(model, {**BLOCK, "hierarchy": "none"})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 8)).sum().backward()
        with mock.patch.object(agreement, "patience_s", lambda: 2.0):
            try:
                optimizer.step()
            except AgreementError as error:
                return str(error)
    return ""


def test_a_model_on_a_part_of_the_ranks_says_that_the_others_have_none() -> None:
    idle, *said = run_ranks(3, stepped_on_a_part)
    assert idle == "" and all("first step (guard and ledger sum over the whole" in s for s in said)
    assert all("attach one on the others, too): rank(s) 0 never stated" in text for text in said)
