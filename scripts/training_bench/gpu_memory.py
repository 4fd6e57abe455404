"""A process group of two ranks on one GPU that exchange bytes through its memory.

For studies of losses: what is sent, and every sum, is what NCCL sends and sums between two ranks
(a sum of two has one order), so the losses are NCCL's to the last digit, but no wire is waited for.
A message goes through a slot that both processes have mapped (CUDA IPC); an event of the device
says when it is there. No bandwidth of anything is measured with it.

1. Copy what is given into the own slot of this turn, record the own event, tell the other one.
2. Wait, on the host, until the other has told the same; then, on the device, for its event.
3. Copy its slot. The next turn but one writes the slot again, after an event that came after this.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

#: of a slot; longer messages go in pieces
SLOT_NBYTES = 32 << 20
PATIENCE_S = 300.0
NAME = "gpu_memory"


class Pair:
    """Both ends of a group of two: ``swap`` is all it can do."""

    def __init__(self, store: Any, rank: int) -> None:
        self._rank, self._turn = rank, 0
        self._own = torch.empty(2, SLOT_NBYTES, dtype=torch.uint8, device="cuda")
        self._told = [torch.cuda.Event(interprocess=True) for _ in range(2)]
        self._stream = torch.cuda.Stream()
        for event in self._told:
            event.record(self._stream)
        torch.cuda.synchronize()
        from torch.multiprocessing.reductions import reduce_tensor

        path = f"/dev/shm/hybridcomp.{os.getpid()}.{id(self)}"
        if rank == 0:
            with open(path, "wb") as file:
                file.write(bytes(128))
        mine = reduce_tensor(self._own), [event.ipc_handle() for event in self._told], path
        store.set(f"pair{rank}", pickle.dumps(mine))
        store.wait([f"pair{1 - rank}"], timedelta(seconds=PATIENCE_S))
        (rebuild, arguments), handles, other = pickle.loads(store.get(f"pair{1 - rank}"))
        self._theirs = rebuild(*arguments)
        device = torch.device("cuda", torch.cuda.current_device())
        self._tells = [torch.cuda.Event.from_ipc_handle(device, each) for each in handles]
        with open(path if rank == 0 else other, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 128)
        #: by rank, the turns that it has told; a cache line each
        self._turns = np.frombuffer(self._map, dtype=np.int64)[::8]
        store.set(f"mapped{rank}", b"1")
        store.wait([f"mapped{1 - rank}"], timedelta(seconds=PATIENCE_S))
        if rank == 0:
            os.unlink(path)

    def swap(self, give: Tensor | None, take: Tensor | None) -> None:
        """Send the bytes of ``give``, fill ``take`` with those of the other; both contiguous."""
        gives = torch.empty(0, dtype=torch.uint8) if give is None else octets(give)
        takes = torch.empty(0, dtype=torch.uint8) if take is None else octets(take)
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for start in range(0, max(len(gives), len(takes), 1), SLOT_NBYTES):
                end = start + SLOT_NBYTES
                self._piece(gives[start:end], takes[start:end])
        current.wait_stream(self._stream)

    def _piece(self, give: Tensor, take: Tensor) -> None:
        slot, self._turn = self._turn % 2, self._turn + 1
        # 1.
        self._own[slot, : len(give)].copy_(give, non_blocking=True)
        self._told[slot].record(self._stream)
        self._turns[self._rank] = self._turn
        # 2.
        deadline = 0.0
        while self._turns[1 - self._rank] < self._turn:
            os.sched_yield()
            deadline = deadline or time.monotonic() + PATIENCE_S
            if time.monotonic() > deadline:
                raise RuntimeError(f"turn {self._turn}: the other rank does not come")
        self._stream.wait_event(self._tells[slot])
        # 3.
        take.copy_(self._theirs[slot, : len(take)], non_blocking=True)


class StorePair:
    """The same without a GPU, slowly, through the group's store: to try the group itself."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank, self._turn = store, rank, 0

    def swap(self, give: Tensor | None, take: Tensor | None) -> None:
        """As ``Pair`` does."""
        self._turn += 1
        data = b"" if give is None else octets(give).numpy().tobytes()
        self._store.set(f"{self._rank}.{self._turn}", b"." + data)
        other = f"{1 - self._rank}.{self._turn}"
        found = self._store.get(other)[1:]
        self._store.delete_key(other)
        if take is not None:
            octets(take).copy_(torch.frombuffer(bytearray(found), dtype=torch.uint8))


def octets(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor as a vector."""
    return tensor.view(-1).view(torch.uint8)


def combine(op: Any, left: Tensor, right: Tensor) -> None:
    """``left`` becomes the reduction of both. Raises NotImplementedError for rare ones."""
    if op == dist.ReduceOp.SUM:
        left.add_(right)
    elif op == dist.ReduceOp.AVG:
        left.add_(right).div_(2)
    elif op == dist.ReduceOp.MAX:
        torch.maximum(left, right, out=left)
    elif op == dist.ReduceOp.MIN:
        torch.minimum(left, right, out=left)
    else:
        raise NotImplementedError(f"{NAME}: expected SUM, AVG, MAX or MIN, found {op}")


def done(result: Any) -> Any:
    """A work that is complete for whoever goes on with the current stream."""
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


class GpuMemory(dist.ProcessGroup):
    """The calls that data parallelism makes, of one or two ranks."""

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        if ranks > 2:
            raise ValueError(f"{NAME}: expected at most 2 ranks, found {ranks}")
        self._store, self._own, self._ranks = store, rank, ranks
        self._pair: Pair | StorePair | None = None

    def _swap(self, give: Tensor | None, take: Tensor | None) -> None:
        if self._pair is None:
            kind = Pair if torch.cuda.is_available() else StorePair
            self._pair = kind(self._store, self._own)
        self._pair.swap(give, take)

    def _reduced(self, tensor: Tensor, op: Any) -> None:
        if self._ranks == 1:
            return
        values = tensor.contiguous()
        other = torch.empty_like(values)
        self._swap(values, other)
        combine(op, values, other)
        if values is not tensor:
            tensor.copy_(values)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """In place."""
        for tensor in tensors:
            self._reduced(tensor, dist.ReduceOp.SUM if opts is None else opts.reduceOp)
        return done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """One after the other."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Both ranks get it."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        """From the root."""
        for tensor in tensors if self._ranks > 1 else []:
            if self._own == opts.rootRank:
                self._swap(tensor.contiguous(), None)
            else:
                values = torch.empty_like(tensor, memory_format=torch.contiguous_format)
                self._swap(None, values)
                tensor.copy_(values)
        return done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Lists of one tensor a rank."""
        for places, values in zip(outputs, inputs, strict=True):
            places[self._own].copy_(values)
            if self._ranks > 1:
                other = torch.empty_like(values, memory_format=torch.contiguous_format)
                self._swap(values.contiguous(), other)
                places[1 - self._own].copy_(other.view_as(places[1 - self._own]))
        return done(outputs)

    def all_gather_single(self, output: Tensor, values: Tensor, opts: Any = None) -> Any:
        """One tensor of all."""
        return self.allgather([list(output.view(-1).chunk(self._ranks))], [values.view(-1)])

    def reduce_scatter_single(self, output: Tensor, values: Tensor, opts: Any = None) -> Any:
        """The part of this rank."""
        parts = values.view(self._ranks, -1)
        result = parts[self._own].clone()
        if self._ranks > 1:
            other = torch.empty_like(result)
            self._swap(parts[1 - self._own], other)
            combine(dist.ReduceOp.SUM if opts is None else opts.reduceOp, result, other)
        output.view(-1).copy_(result)
        return done([output])

    def all_to_all_single(
        self, output: Tensor, values: Tensor, takes: Sequence[int], gives: Sequence[int],
        opts: Any = None,
    ) -> Any:  # fmt: skip
        """Rows of any number."""
        rows = [
            tensor.split(list(sizes) or [len(tensor) // self._ranks] * self._ranks)
            for tensor, sizes in ((output, takes), (values, gives))
        ]
        rows[0][self._own].copy_(rows[1][self._own])
        if self._ranks > 1:
            self._swap(rows[1][1 - self._own], rows[0][1 - self._own])
        return done([output])

    def barrier(self, opts: Any = None) -> Any:
        """Of hosts and device."""
        if self._ranks > 1:
            self._swap(None, None)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return done([])

    #: as torch below 2.12 calls them
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def size(self) -> int:
        """Ranks."""
        return self._ranks

    def rank(self) -> int:
        """Of this process in the group."""
        return self._own

    def getBackendName(self) -> str:
        """For torch's messages."""
        return NAME


def join(name: str) -> None:
    """Make a group of this kind the process's default one; the environment says which rank."""
    assert name == NAME, name
    with contextlib.suppress(AttributeError):
        dist.Backend.register_backend(
            NAME,
            lambda store, rank, size, timeout: GpuMemory(store, rank, size),
            devices=["cpu", "cuda"],
        )
    dist.init_process_group(NAME)
