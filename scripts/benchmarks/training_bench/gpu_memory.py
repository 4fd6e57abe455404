"""Process group of two ranks that share a GPU and exchange bytes through its memory.

For loss studies: messages and sums equal NCCL's (a sum of two has one order), without waiting for a
wire. Its speed means nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.training_bench.gpu_pairs import Pair, pair_of

NAME = "gpu_memory"
#: untyped, since method names and types differ between releases of torch
_Group: Any = dist.ProcessGroup


def combine(op: Any, left: Tensor, right: Tensor) -> None:
    """Reduce ``right`` into ``left``. Raises NotImplementedError for rare operations."""
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


class Posted(dist.Work):
    """A message whose copies are queued on the stream that was current when it was posted.

    ``wait`` orders the caller's stream after those copies, as with NCCL.
    """

    def __init__(self) -> None:
        super().__init__()
        self._event: Any = None
        if torch.cuda.is_available():
            self._event = torch.cuda.current_stream().record_event()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait, without blocking the host."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        """Return whether the copies have finished."""
        return self._event is None or bool(self._event.query())


def done(_: Any) -> Any:
    """Return the work of a call whose copies are queued."""
    return Posted()


class GpuMemory(_Group):  # type: ignore[misc]
    """Collectives that data parallelism uses, for one or two ranks."""

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        if ranks > 2:
            raise ValueError(f"{NAME}: expected at most 2 ranks, found {ranks}")
        self._store, self._own, self._ranks = store, rank, ranks
        self._pair: Pair | None = None

    def _swap(self, give: Tensor | None, take: Tensor | None) -> None:
        if self._pair is None:
            self._pair = pair_of(self._store, self._own)
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
        """Reduce in place."""
        for tensor in tensors:
            self._reduced(tensor, dist.ReduceOp.SUM if opts is None else opts.reduceOp)
        return done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce the tensors one after the other."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Reduce; both ranks get the result."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        """Copy from the root."""
        for tensor in tensors if self._ranks > 1 else []:
            if self._own == opts.rootRank:
                self._swap(tensor.contiguous(), None)
            else:
                values = torch.empty_like(tensor, memory_format=torch.contiguous_format)
                self._swap(None, values)
                tensor.copy_(values)
        return done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Gather into lists of one tensor per rank."""
        for places, values in zip(outputs, inputs, strict=True):
            places[self._own].copy_(values)
            if self._ranks > 1:
                other = torch.empty_like(values, memory_format=torch.contiguous_format)
                self._swap(values.contiguous(), other)
                places[1 - self._own].copy_(other.view_as(places[1 - self._own]))
        return done(outputs)

    def all_gather_single(self, output: Tensor, values: Tensor, opts: Any = None) -> Any:
        """Gather into one tensor."""
        return self.allgather([list(output.view(-1).chunk(self._ranks))], [values.view(-1)])

    def reduce_scatter_single(self, output: Tensor, values: Tensor, opts: Any = None) -> Any:
        """Reduce, and keep this rank's chunk."""
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
        """Exchange chunks of any row counts."""
        rows = [
            torch.split(tensor, list(sizes) or [len(tensor) // self._ranks] * self._ranks)
            for tensor, sizes in ((output, takes), (values, gives))
        ]
        rows[0][self._own].copy_(rows[1][self._own])
        if self._ranks > 1:
            self._swap(rows[1][1 - self._own], rows[0][1 - self._own])
        return done([output])

    def barrier(self, opts: Any = None) -> Any:
        """Wait for the other rank and for the device."""
        if self._ranks > 1:
            self._swap(None, None)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return done([])

    #: names in torch before 2.12
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def size(self) -> int:
        """Return the number of ranks."""
        return self._ranks

    def rank(self) -> int:
        """Return the rank of this process in the group."""
        return self._own

    def getBackendName(self) -> str:
        """Return the name for torch's messages."""
        return NAME


def join(name: str) -> None:
    """Create the process's default group as a GpuMemory; the environment gives the rank."""
    assert name == NAME, name
    with contextlib.suppress(AttributeError):
        dist.Backend.register_backend(
            NAME,
            lambda store, rank, size, timeout: GpuMemory(store, rank, size),
            devices=["cpu", "cuda"],
        )
    dist.init_process_group(NAME)
