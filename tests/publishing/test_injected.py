"""Failures at any step of a version, on any publishing rank and any loading worker.

Afterwards a receiver has the old or the new version, whole; an engine's workers have the same
version or refuse to serve; all trainer ranks name the cause within seconds; and the next version is
right.
"""

from __future__ import annotations

import contextlib
import io
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridcomp.errors import PublishError
from hybridcomp.job import agreement
from hybridcomp.publishing import WeightReceiver
from hybridcomp.publishing.destinations import Folder
from tests.inference.made import SHAPES, VERSIONS, Packed, publish
from tests.inference.test_vllm import worker_of
from tests.job.failing import steps
from tests.publishing.made import NIGHTLY, Weights, copy_of, launch, same
from tests.ranks import RunRanks, run_ranks

#: limit of any wait in seconds
LIMIT_S = 10.0


@contextlib.contextmanager
def threads_too(counter: Any) -> Iterator[None]:
    """Also count the steps of threads that the body starts."""
    threading.setprofile(counter)
    try:
        yield
    finally:
        threading.setprofile(None)


def tried(work: Callable[[], object], fails_at: int | None) -> tuple[float, str, str, int]:
    """Return seconds of ``work``, its error, the failed step, and the number of steps."""
    began, said = time.monotonic(), ""
    with (
        steps(fails_at) as counter,
        threads_too(counter),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            work()
        except (PublishError, RuntimeError, OSError) as error:
            said = f"{type(error).__name__}: {error}"
    return time.monotonic() - began, said, counter.where, counter.found


def least(number: int) -> int:
    """Return the minimum over all ranks."""
    found = torch.tensor(number)
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return int(found)


def all_say(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def published(folder: Path, wait: bool, count: int, seed: int) -> list[str]:
    """Inject ``count`` failures of one rank into a version; return the problems."""
    agreement.LOOK_S = 0.05
    weights, draw, wrong = Weights(shapes=dict(SHAPES)), random.Random(seed), []
    publisher = weights.publisher(Folder(folder), anchor_every=7)
    receiver = WeightReceiver(folder)

    def version() -> None:
        publisher.publish(wait=wait)
        publisher.finish()

    number = least(tried(version, None)[3])
    for place in range(count):
        before = copy_of(weights.values)
        receiver.update()
        weights.step(place)
        rank, step = draw.randrange(dist.get_world_size()), draw.randrange(number)
        found = all_say(tried(version, step if rank == dist.get_rank() else None)[:3])
        held = receiver.version
        receiver.update()
        is_new = receiver.version != held
        name = f"wait={wait}, rank {rank}, step {step} of {number}, {found[rank][2]}: {found}"
        if not same(receiver, weights.values if is_new else before):
            wrong.append(f"a mix: {name}")
        if max(row[0] for row in found) > LIMIT_S:
            wrong.append(f"a wait: {name}")
        failed = [row[1] for row in found if row[1]]
        if failed and (len(failed) < len(found) or not all(f"rank {rank}" in t for t in failed)):
            wrong.append(f"not named: {name}")
        if not failed and not is_new:
            wrong.append(f"lost: {name}")
        version()
        receiver.update()
        if not same(receiver, weights.values) or receiver.version != publisher.version:
            wrong.append(f"the next version is wrong: {name}")
    publisher.close()
    return wrong


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("wait", [True, False])
def test_a_rank_that_fails_in_a_version(on_ranks: RunRanks, tmp_path: Path, wait: bool) -> None:
    count = 350 if NIGHTLY else 12
    assert launch(on_ranks, 2, published, tmp_path, wait, count, 3) == [[], []]


def loaded(folder: Path, count: int, seed: int) -> list[str]:
    """Inject ``count`` failures of one of two loading workers; return the problems."""
    draw, wrong = random.Random(seed), []
    model = Packed(dist.get_rank())
    engine = worker_of(model)
    source = {"source": str(folder), "wait_s": 0}
    engine.init_transfer_engine(engine.parse_init_info(source))

    def load(version: int, prepares: bool) -> None:
        if prepares:
            engine.update_weights({"version": version, "prepare": True})
        engine.update_weights({"version": version})

    last, number = 1, least(tried(lambda: load(1, True), None)[3])
    for place in range(count):
        version, prepares = last + 1, bool(place % 2)
        rank, step = draw.randrange(2), draw.randrange(number)
        fails_at = step if rank == dist.get_rank() else None
        row = tried(lambda: load(version, prepares), fails_at)[:3]  # noqa: B023
        held = engine._follower.version
        found = all_say((*row, held, held is None or model.holds(held)))
        name = f"worker {rank}, step {step} of {number}, {found[rank][2]}: {found}"
        if found[0][3] != found[1][3] or not all(one[4] for one in found):
            wrong.append(f"a mix: {name}")
        if max(one[0] for one in found) > LIMIT_S:
            wrong.append(f"a wait: {name}")
        if found[0][1] or (found[1][1] and f"worker {rank} of 2" not in found[1][1]):
            wrong.append(f"not named: {name}")
        if not found[1][1] and held != version:
            wrong.append(f"lost: {name}")
        load(version, False)
        if not (engine._follower.version == version and model.holds(version)):
            wrong.append(f"the next load is wrong: {name}")
        last = version
        if version == VERSIONS:  # again, from the first version on
            engine.init_transfer_engine(engine.parse_init_info(source))
            load(1, False)
            last = 1
    return wrong


@pytest.mark.timeout(3600)
def test_a_worker_that_fails_in_a_load(on_ranks: RunRanks, tmp_path: Path) -> None:
    on_ranks(2, publish, tmp_path, VERSIONS)
    count = 350 if NIGHTLY else 12
    # new ranks: the stand-in stays in a process
    assert run_ranks(2, loaded, tmp_path, count, 4, timeout=3500.0) == [[], []]
