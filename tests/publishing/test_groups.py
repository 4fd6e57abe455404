"""Versions over a process group: two ranks train, one receives; a failed version is dropped."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridcomp.errors import PublishError
from hybridcomp.patches.common.publishing_steps import destination_of
from hybridcomp.publishing import Publisher, WeightReceiver
from tests.publishing.made import Weights, copy_of, error_of, same
from tests.ranks import RunRanks

VERSIONS = 5
FAILS = 3


def over_a_group() -> list[Any]:
    """Ranks 0 and 1 publish, rank 2 receives; rank 1 fails in one version.

    Rank 2 returns the versions and which were full; the others the seconds of applying.
    """
    group: Any = dist.new_group([0, 2])
    weights = Weights()
    if dist.get_rank() == 2:
        return received(group, weights)
    held = weights.held(count=2)
    publisher = Publisher(held, destination_of(group, held), bucket=1000)
    found: list[Any] = []
    reads = held.held[0].read
    for number in range(VERSIONS):
        weights.step(number)
        if number == FAILS and dist.get_rank() == 1:
            object.__setattr__(held.held[0], "read", lambda: 1 / 0)
        try:
            found.append(publisher.publish().apply_s)
        except PublishError:
            found.append("failed")
            object.__setattr__(held.held[0], "read", reads)
    return found


def received(group: Any, weights: Weights) -> list[Any]:
    receiver = WeightReceiver(group)
    found: list[Any] = []
    for number in range(VERSIONS):
        before = copy_of(weights.values)
        weights.step(number)
        applied = receiver.update()
        if applied is None:
            assert same(receiver, before)
            found.append(None)
            continue
        found.append((applied.version, applied.full))
        assert same(receiver, weights.values)
        if number == 1:  # a foreign write: the next version fails, the one after it is full
            dict(receiver.tensors())["scale"].add_(1.0)
            weights.step(2)
            with pytest.raises(PublishError, match="version 3: scale"):
                receiver.update()
            found.append("refused")
            return found + rest(receiver, weights)
    return found


def rest(receiver: WeightReceiver, weights: Weights) -> list[Any]:
    """Publish a version that a rank gives up, then a full one."""
    weights.step(3)
    assert receiver.update() is None
    weights.step(4)
    applied = receiver.update()
    assert applied is not None and same(receiver, weights.values)
    return [None, (applied.version, applied.full)]


def test_two_ranks_send_and_a_third_receives(on_ranks: RunRanks) -> None:
    first, second, receiver = on_ranks(3, over_a_group)
    assert receiver == [(1, True), (2, False), "refused", None, (4, True)]
    assert first == second and first[0] is None and first[3] == "failed"
    assert first[1] > 0.0


def with_another_release() -> list[Any]:
    """Receive on rank 1 with format 3 first, then with rank 0's; return both errors."""
    group: Any = dist.new_group([0, 1])
    weights, told = Weights(), list[str]()
    sends = dist.get_rank() == 0
    held = weights.held(count=1)
    publisher: Any = Publisher(held, destination_of(group, held), bucket=1000) if sends else None
    receiver = None if sends else WeightReceiver(group)
    groups: Any = importlib.import_module("hybridcomp.publishing.groups")
    own = groups.FORMAT
    for number in (own + 1, own):
        groups.FORMAT = own if sends else number
        told.append(error_of(publisher.publish if receiver is None else receiver.update))
    groups.FORMAT = own
    return [told, receiver is None or (receiver.version, same(receiver, weights.values))]


def test_another_release_is_told_on_both_sides(on_ranks: RunRanks) -> None:
    (first, _), (second, received) = on_ranks(2, with_another_release)
    assert first[1] == second[1] == "" and received == (1, True)
    for told in (first[0], second[0]):
        assert "format" in told and "found 2 and 3: install the same release" in told


def wrong_group() -> str:
    return error_of(lambda: destination_of(dist.group.WORLD, Weights().held()))


def test_other_ranks_of_the_job_may_not_receive(on_ranks: RunRanks) -> None:
    told = on_ranks(2, wrong_group)
    assert told[0].startswith("publish.to: found a group with rank(s) [1] of the job")


def without_memory() -> list[Any]:
    """Publish from rank 0 while rank 1 lacks memory for the second version."""
    group: Any = dist.new_group([0, 1])
    weights = Weights()
    if dist.get_rank() == 0:
        held = weights.held(sharded=False, count=1)
        publisher = Publisher(held, destination_of(group, held), bucket=1000)
        return [publisher.publish().full for _ in range(3)]
    receiver, found = WeightReceiver(group), list[str]()
    empty = torch.empty
    for number in range(3):
        with pytest.MonkeyPatch.context() as patched:
            if number == 1:
                patched.setattr(torch, "empty", no_memory)
            found.append(error_of(receiver.update))
        assert torch.empty is empty and same(receiver, weights.values)
    return found


def no_memory(*_: Any, **__: Any) -> Any:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def test_a_receiver_without_memory_keeps_nobody_waiting(on_ranks: RunRanks) -> None:
    full, (first, told, last) = on_ranks(2, without_memory)
    assert full == [True, False, True] and (first, last) == ("", "")
    assert told.startswith("version 2 was not kept: this host has no memory for it; give it more")
