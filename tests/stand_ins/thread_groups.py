"""Stand-in for process groups: ranks are threads, tensors pass through memory.

For property tests, where starting processes would dominate. ``run`` calls a function on every rank
with a ``Member`` instead of a process group; the collectives take their rank from it and post their
bytes here.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

from torch import Tensor
from torch.distributed import Work

from hybridcomp.collectives.wire import transport

T = TypeVar("T")
TIMEOUT_S = 60.0


class Board:
    """Messages posted by the ranks of a group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self.posted: dict[tuple[int, int], tuple[Tensor, list[int]]] = {}  # by call and rank
        self.mail: dict[tuple[int, int], queue.Queue[Tensor]] = defaultdict(queue.Queue)


class Member:
    """One rank's view of a group."""

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank, self.calls = board, rank, 0

    def post(self, source: Tensor, in_splits: list[int], take: Callable[[int], None]) -> Done:
        """Post ``source``; ``take(call)`` copies the messages once all ranks have posted."""
        call, self.calls = self.calls, self.calls + 1
        self.board.posted[call, self.rank] = (source, in_splits)

        def finish() -> None:
            self.board.barrier.wait()
            take(call)
            self.board.barrier.wait()  # no rank may reuse a buffer that another still reads

        return Done(finish)


class Done(Work):
    """Runs its transfer in ``wait``."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish = finish

    def wait(self, timeout: object = None) -> bool:
        self._finish()
        return True


def _all_to_all_single(
    out: Tensor,
    values: Tensor,
    out_splits: Sequence[int],
    in_splits: Sequence[int],
    group: Member,
    async_op: bool,
) -> Work:
    assert sum(in_splits) == values.numel() and sum(out_splits) == out.numel()

    def take(call: int) -> None:
        position = 0
        for rank, numel in enumerate(out_splits):
            source, splits = group.board.posted[call, rank]
            start = sum(splits[: group.rank])
            assert splits[group.rank] == numel
            out[position : position + numel] = source[start : start + numel]
            position += numel

    return group.post(values, list(in_splits), take)


def _all_gather_single(out: Tensor, values: Tensor, group: Member, async_op: bool) -> Work:
    def take(call: int) -> None:
        for rank in range(group.board.size):
            source = group.board.posted[call, rank][0]
            out[rank * source.numel() : (rank + 1) * source.numel()] = source

    return group.post(values, [], take)


def _all_reduce(values: Tensor, group: Member, async_op: bool) -> Work:
    def take(call: int) -> None:
        values.zero_()
        for rank in range(group.board.size):
            values.add_(group.board.posted[call, rank][0])

    return group.post(values.clone(), [], take)


def _isend(values: Tensor, dst: int, group: Member) -> Work:
    group.board.mail[group.rank, dst].put(values.clone())
    return Done(lambda: None)


def _irecv(out: Tensor, src: int, group: Member) -> Work:
    return Done(lambda: _receive(out, group.board.mail[src, group.rank]))


def _receive(out: Tensor, mail: queue.Queue[Tensor]) -> None:
    out.copy_(mail.get(timeout=TIMEOUT_S))


@contextmanager
def in_process() -> Iterator[None]:
    """Make this process's collectives use ``Member`` groups inside."""
    dist = SimpleNamespace(
        all_reduce=_all_reduce, all_to_all_single=_all_to_all_single, isend=_isend, irecv=_irecv,
        **{transport.GATHER: _all_gather_single},
    )  # fmt: skip
    patches: list[Any] = [
        patch.object(transport, "dist", dist),
        patch("torch.distributed.get_backend_config", lambda group: "cpu:threads"),
    ]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


def run(size: int, function: Callable[[Any, int], T], others: Sequence[Board] = ()) -> list[T]:
    """Run ``function(group, rank)`` on ``size`` ranks, ``in_process``; return results by rank.

    ``others``: boards of further groups that the function uses.
    """
    board = Board(size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def call(rank: int) -> None:
        try:
            results[rank] = function(Member(board, rank), rank)
        except BaseException as error:
            errors.append(error)
            for one in (board, *others):
                one.barrier.abort()

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(size)]
    with in_process():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        first = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
        raise (first or errors)[0]
    return [results[rank] for rank in range(size)]
