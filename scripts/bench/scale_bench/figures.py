"""Count what a step costs one rank: host time, launches, messages, bytes, memory, files."""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from bench.bench_host import Nowhere, as_on_a_gpu
from bench.scale_bench.engines import ENGINES
from bench.scale_bench.step import Engine, Shape
from hybridcomp.channels.error_feedback import Residuals
from hybridcomp.channels.pieces import Piece
from hybridcomp.collectives.wire import POOL, transport

#: host time is measured with tensors of a few values, so that the CPU copies little in a GPU's
#: place, and of an even number for every rank; bytes and memory with tensors without values
SMALL, LARGE = Shape(64, 2, 64), Shape(8192, 1, 4096)
#: files: a model that fits into the memory of a test machine
SAVED = Shape(256, 2, 64)
ROUNDS, MOST_S = 40, 2.0
#: codecs' launches stand beside torch's own: views are none
NO_LAUNCH = ("view", "as_strided", "slice", "select", "split", "t.", "transpose", "detach",
             "expand", "empty", "unsafe", "alias", "reshape", "narrow")  # fmt: skip


class Cost(NamedTuple):
    """One rank's cost of one optimizer step with one micro-batch.

    us, low, high: the host's microseconds, with quartiles. first_ms: of the first step. times: as
    many ``Tensor.copy_`` of four values. launches: of codecs. operations: of torch that launch a
    kernel. messages: calls of torch.distributed. nbytes, native_nbytes: bytes to other ranks, and
    what native would have sent. buffers: bytes of payloads under way at most. residuals: bytes
    that error feedback keeps, padding included. file: bytes of a rank's file beside a checkpoint.
    tensors: in that file.
    """

    us: float
    low: float
    high: float
    first_ms: float
    times: float
    launches: int
    operations: int
    messages: int
    nbytes: float
    native_nbytes: float
    buffers: int
    residuals: int
    file: int
    tensors: int


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operation and run it."""
        name = func.name().removeprefix("aten::")
        self.count += not name.startswith(NO_LAUNCH)
        return func(*args, **(kwargs or {}))


class Buffers:
    """Counts the bytes of the pool's buffers that are in use at once."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._take, self._give = POOL.take, POOL.give

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Take a buffer."""
        self.now += nbytes
        self.most = max(self.most, self.now)
        return self._take(nbytes, device)

    def give(self, *buffers: torch.Tensor | None) -> None:
        """Give buffers back."""
        self.now -= sum(one.numel() for one in buffers if one is not None)
        self._give(*buffers)


class _Counted:
    """A call of torch.distributed without a wire that counts."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call, self.count = call, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.call(*args, **kwargs)


def cost(name: str, ranks: int) -> Cost:
    """Measure a step of the engine ``name`` on one of ``ranks``."""
    make = ENGINES[name]
    with as_on_a_gpu(ranks):
        times = _times(make(SMALL, "cpu"))
        counts = _counts(make(SMALL, "cpu"))
        sent = _sent(make(LARGE, "meta"))
        tensors, around = _saved(make(SAVED, "cpu"))
    *parts, stored = sent
    file = stored + around if tensors else 0
    return Cost._make([*times, *counts, *parts, file, tensors])


def _times(engine: Engine) -> tuple[float, float, float, float, float]:
    """Return microseconds of a step, their quartiles, ms of the first one, and copies' times."""
    start = time.thread_time()
    engine.step()
    first = time.thread_time() - start
    engine.step()
    target, source = torch.empty(4), torch.empty(4)
    found, ratios, end = list[float](), list[float](), time.perf_counter() + MOST_S
    while len(found) < 3 or (len(found) < ROUNDS and time.perf_counter() < end):
        start = time.thread_time()
        for _ in range(200):
            target.copy_(source)
        middle = time.thread_time()
        engine.step()
        took = time.thread_time() - middle
        found.append(1e6 * took)
        ratios.append(200 * took / (middle - start))
    low, middle_us, high = statistics.quantiles(found, n=4)
    return middle_us, low, high, 1e3 * first, statistics.median(ratios)


def _counts(engine: Engine) -> tuple[int, int, int]:
    """Return launches of codecs, operations of torch, and messages, of a step that is not new."""
    engine.step()
    exchange, gather = _Counted(dist.all_to_all_single), _Counted(transport.all_gather_single)
    with (
        mock.patch.object(dist, "all_to_all_single", exchange),
        mock.patch.object(transport, "all_gather_single", gather),
    ):
        Nowhere.launches = 0
        engine.step()
        launches, messages = Nowhere.launches, exchange.count + gather.count + engine.posted
    with Operations() as operations:
        engine.step()
    return launches, operations.count, messages


def _sent(engine: Engine) -> tuple[float, float, int, int, int]:
    """Return bytes, those of native, of buffers at most, of residuals, and of these in a file."""
    buffers = Buffers()
    with (
        mock.patch.object(POOL, "take", buffers.take),
        mock.patch.object(POOL, "give", buffers.give),
    ):
        engine.step()
    entries = engine.channels.ledger.interval.values()
    sent = sum(entry.wire_nbytes for entry in entries)
    native = sum(entry.raw_nbytes for entry in entries)
    held = engine.channels.residuals
    return float(sent), float(native), buffers.most, held.nbytes, 4 * sum(map(_values, parts(held)))


def parts(residuals: Residuals) -> list[Piece]:
    """Return the pieces of all ``residuals``."""
    return [piece for _, pieces in residuals._stretches for piece in pieces]


def _values(piece: Piece) -> int:
    """Return the values that a file has of a piece: none of padding."""
    return piece.numel if piece.name else 0


def _saved(engine: Engine) -> tuple[int, int]:
    """Return how many tensors a file has, and its bytes beside their values."""
    engine.step()
    state, file = engine.channels.residuals.state_dict(), io.BytesIO()
    held = [values for rows in state.values() for some in rows.values() for _, values in some]
    torch.save(state, file)
    return len(held), len(file.getvalue()) - sum(values.nbytes for values in held)
