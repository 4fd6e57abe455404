"""Stand-in for NCCL's process group, for tensors on stand-in devices.

* Rejects CPU tensors, tensors of two devices, tensors with gaps, and dtypes unknown to NCCL.
* Outputs hold POISON from the call to ``wait``, which delivers. ``wait`` also checks that inputs
  are unchanged since the call: NCCL reads at any time in between.
* A message has the values of the call, and its communicator's thread (``wire``) sends it: one for
  the group, and one for each pair of ranks that sends outside a batch.
* Sizes must agree between sender and receiver.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from tests.stand_ins.cuda.wire import Wire

#: fills every output byte
POISON = 0xFF
DTYPES = frozenset({
    torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
})  # fmt: skip
ops: Any = torch.ops.host_cuda
c10d: Any = dist.distributed_c10d
Op = dist.ReduceOp
#: untyped: overridden methods have other argument names in torch
Base: Any = dist.ProcessGroup
#: reductions of two ranks' values
COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add, "AVG": torch.add, "MAX": torch.maximum, "MIN": torch.minimum,
    "PRODUCT": torch.mul,
}  # fmt: skip
#: work of a communicator's thread: sends copies of inputs, returns outputs
Action = Callable[[list[Tensor]], Sequence[Tensor]]


class Misuse(AssertionError):
    """A use of NCCL, or of a tensor during a message, that goes wrong on a GPU."""


class Posted(Work):
    """A pending message."""

    def __init__(
        self, what: str, wire: Wire, reads: Sequence[Tensor], writes: Sequence[Tensor],
        action: Action,
    ) -> None:  # fmt: skip
        super().__init__()
        self._what, self._wire = what, wire
        self._reads = [host(t) for t in reads]
        self._held = [*reads, *writes]
        self._values = [t.clone() for t in self._reads]
        self._writes = [host(t) for t in writes]
        places = {(t.data_ptr(), t.nbytes) for t in self._writes}
        self._only_read = [_overlaps_none(t, places) for t in self._reads]
        self._error: BaseException | None = None
        self._found: list[Tensor] = []
        self._sent, self._lock, self._delivered = threading.Event(), threading.Lock(), False
        self._futures: list[Any] = []
        for target in self._writes:
            raw(target).fill_(POISON)
        wire.post(partial(self._run, action))

    def _run(self, action: Action) -> None:
        try:
            self._found = list(action(self._values))
        except BaseException as error:
            self._error = error
        self._sent.set()
        for future in self._futures:
            self._answer(future)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Deliver. Raises the message's error, or Misuse."""
        limit = self._wire.timeout.total_seconds()
        if not self._sent.wait(limit):
            raise RuntimeError(f"NCCL: {self._what} of {self._wire.name} timed out after {limit} s")
        if self._error is not None:
            raise self._error
        self._deliver()
        return True

    def is_completed(self) -> bool:
        """Return whether it has arrived, in which case its output may be read."""
        if self._sent.is_set() and self._error is None:
            self._deliver()
        return self._sent.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        """Return a future of the outputs, done on arrival."""
        device = self._held[0].device
        future: Any = torch.futures.Future(devices=[device])
        self._outputs = self._held[len(self._reads) :] if self._held else []
        with self._lock:
            done = self._sent.is_set()
            if not done:
                self._futures.append(future)
        if done:
            self._answer(future)
        return future

    def _answer(self, future: Any) -> None:
        try:
            if self._error is not None:
                raise self._error
            outputs = list(self._outputs)
            self._deliver()
            ops.set_device(outputs[0].device.index)
            future.set_result(outputs)
        except BaseException as error:
            future.set_exception(error)

    @torch.no_grad()
    def _deliver(self) -> None:
        with self._lock:
            if self._delivered:
                return
            self._delivered = True
        checked = zip(self._reads, self._values, self._only_read, strict=True)
        for number, (now, then, is_only_read) in enumerate(checked):
            if is_only_read and not torch.equal(raw(now), raw(then)):
                raise Misuse(f"{self._what}: input {number} was changed before anybody waited")
        for target, found in zip(self._writes, self._found, strict=True):
            if bool((raw(target) != POISON).any()):
                raise Misuse(f"{self._what}: an output was written before anybody waited")
            target.copy_(found.view(target.shape))
        self._held, self._values, self._reads, self._writes = [], [], [], []


class HostOptions:
    """Attributes of ``ProcessGroupNCCL.Options``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.is_high_priority_stream = False
        self.config = SimpleNamespace()
        self._timeout = timedelta(minutes=30)
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""


class HostNccl(Base):  # type: ignore[misc]
    """The ranks of a group."""

    Options = HostOptions

    def __init__(self, store: Any, rank: int, size: int, options: HostOptions) -> None:
        super().__init__(rank, size)
        self._store_of, self._rank, self._size, self.options = store, rank, size, options
        #: a late answer means that ranks wait for each other
        self._limit = timedelta(seconds=float(os.environ.get("HC_NCCL_SECONDS", "60")))
        self._wires: dict[str, Wire] = {}
        self._batch: list[tuple[str, Tensor, int]] | None = None
        self._index: int | None = None
        self.supports_coalescing = self.supports_splitting = False
        self._named = options.group_name

    def _wire(self, name: str = "", rank: int | None = None, size: int = 2) -> Wire:
        if name not in self._wires:
            whole = f"{self.options.group_name or 'the group'}{name}"
            me, ranks = (self._rank, self._size) if rank is None else (rank, size)
            self._wires[name] = Wire(whole, self._store_of, me, ranks, self._limit)
        return self._wires[name]

    def _agreed(
        self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor], action: Action,
        like: Sequence[Tensor] | None = None, **more: Any,
    ) -> Posted:  # fmt: skip
        """Post a message for which all ranks have to say the same.

        Dtypes and lengths are those of ``like``; default: ``reads``.
        """
        wire = self._wire()
        each = [[str(t.dtype), t.numel()] for t in (reads if like is None else like)]

        def run(values: list[Tensor]) -> Sequence[Tensor]:
            wire.agree({"what": what, "each": each, **more})
            return action(values)

        return self._post(what, reads, writes, run)

    def _post(
        self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor], action: Action,
        wire: Wire | None = None,
    ) -> Posted:  # fmt: skip
        for tensor in (*reads, *writes):
            self._check(what, tensor)
        with torch.no_grad():
            return Posted(what, wire or self._wire(), reads, writes, action)

    def _check(self, what: str, tensor: Tensor) -> None:
        if not tensor.is_cuda:
            raise RuntimeError(f"No backend type associated with device type cpu ({what})")
        moved = what in ("broadcast", "send", "recv")  # as pairs of real numbers
        if tensor.dtype not in DTYPES and not (moved and tensor.is_complex()):
            raise TypeError(f"NCCL has no {tensor.dtype} ({what})")
        if not tensor.is_contiguous():
            raise ValueError(f"Tensors must be contiguous ({what}, {tuple(tensor.stride())})")
        if self._index is None:
            self._index = tensor.device.index
        if self._index != tensor.device.index:
            raise Misuse(f"{what}: a group of device {self._index} is given {tensor.device}")

    # torch calls these

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def name(self) -> str:
        return "nccl"

    def getBackendName(self) -> str:
        return "nccl"

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda")]

    @property
    def bound_device_id(self) -> None:
        return None

    @property
    def group_name(self) -> str:
        return self._named

    def _set_group_name(self, name: str) -> None:
        self._named = name

    @property
    def pg_name(self) -> str:
        return str(c10d._world.pg_names[self])

    def _get_backend(self, device: Any) -> HostNccl:
        if torch.device(device).type != "cuda":
            raise RuntimeError(f"No backend type associated with device type {device}")
        return self

    def _get_backend_name(self) -> str:
        return "nccl"

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: there is no numbering."""

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    def shutdown(self) -> None:
        """End the threads."""
        for wire in self._wires.values():
            wire.close()
        self._wires.clear()

    def abort(self) -> None:
        """Leave the threads to the end of the process."""

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Posted:
        return self._sums("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Posted:
        return self._sums("all_reduce of several", tensors, opts)

    def _sums(self, what: str, tensors: list[Tensor], opts: Any) -> Posted:
        op, wire = _op(opts), self._wire()

        def action(values: list[Tensor]) -> list[Tensor]:
            return [combined(wire.gather(value), op) for value in values]

        return self._agreed(what, tensors, tensors, action, op=op)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Posted:
        op, wire, root = _op(opts), self._wire(), opts.rootRank

        def action(values: list[Tensor]) -> list[Tensor]:
            rows = wire.gather(values[0])
            return [combined(rows, op)] if self._rank == root else []

        writes = tensors if self._rank == root else []
        return self._agreed("reduce", tensors, writes, action, op=op, root=root)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Posted:
        wire, root = self._wire(), opts.rootRank
        mine = self._rank == root

        def action(values: list[Tensor]) -> list[Tensor]:
            rows = wire.gather(values[0] if mine else torch.zeros_like(host(tensors[0])))
            return [] if mine else [rows[root]]

        reads, writes = (tensors, []) if mine else ([], tensors)
        return self._agreed("broadcast", reads, writes, action, tensors, root=root)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Posted:
        (rooms,), (own,) = outputs, inputs
        if len({t.nbytes for t in (*rooms, own)}) == 1:
            return self._gathered("all_gather", list(rooms), [own], len(rooms))
        wire = self._wire()  # uneven: torch broadcasts each in one group of calls

        def action(values: list[Tensor]) -> list[Tensor]:
            found = [torch.empty_like(host(t)) for t in rooms]
            return wire.swap([values[0]] * self._size, found)

        return self._agreed("all_gather, uneven", [own], rooms, action, rooms)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Posted:
        return self._gathered("all_gather_single", [output], [given], 1)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Posted:
        return self._gathered("all_gather_single of several", outputs, inputs, 1)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gathered(
        self, what: str, outputs: list[Tensor], inputs: list[Tensor], parts: int
    ) -> Posted:
        wire = self._wire()
        inside = {(t.data_ptr(), t.nbytes) for t in outputs}
        for given in inputs:  # in place is allowed, at this rank's position
            for start, nbytes in inside:
                if parts == 1 and start <= given.data_ptr() < start + nbytes:
                    own = start + self._rank * given.nbytes
                    if given.data_ptr() != own:
                        raise Misuse(f"{what}: the input is in the output, at another rank's place")
        if parts == 1:
            for output, given in zip(outputs, inputs, strict=True):
                if output.numel() != self._size * given.numel() or output.dtype != given.dtype:
                    raise ValueError(f"{what}: output is not of {self._size} inputs")

        def action(values: list[Tensor]) -> list[Tensor]:
            found = [wire.gather(value) for value in values]
            return found[0] if parts > 1 or what == "all_gather" else [
                torch.stack(rows) for rows in found
            ]  # fmt: skip

        return self._agreed(what, inputs, outputs, action)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> Posted:
        (given,), op, wire = inputs, _op(opts), self._wire()

        def action(values: list[Tensor]) -> list[Tensor]:
            rows = [wire.gather(value) for value in values]
            return [combined(rows[self._rank], op)]

        return self._agreed("reduce_scatter", given, outputs, action, op=op)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Posted:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Posted:
        op, wire, what = _op(opts), self._wire(), "reduce_scatter_single"
        for output, given in zip(outputs, inputs, strict=True):
            if given.numel() != self._size * output.numel() or output.dtype != given.dtype:
                raise ValueError(f"{what}: the input is not of {self._size} outputs")

        def action(values: list[Tensor]) -> list[Tensor]:
            found = []
            for value in values:
                rows = [row.reshape(-1).chunk(self._size) for row in wire.gather(value)]
                found.append(combined([row[self._rank] for row in rows], op))
            return found

        return self._agreed(what, inputs, outputs, action, op=op)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self, output: Tensor, given: Tensor, out_splits: list[int], in_splits: list[int],
        opts: Any = None,
    ) -> Posted:  # fmt: skip
        def rows(tensor: Tensor, splits: list[int]) -> list[int]:
            if splits:
                if sum(splits) != tensor.size(0) or len(splits) != self._size:
                    raise ValueError(f"all_to_all: {splits} does not split {tuple(tensor.shape)}")
                return list(splits)
            if tensor.size(0) % self._size:
                raise ValueError(f"all_to_all: {tensor.size(0)} rows on {self._size} ranks")
            return [tensor.size(0) // self._size] * self._size

        takes, gives, wire = rows(output, out_splits), rows(given, in_splits), self._wire()
        if output.dtype != given.dtype:
            raise ValueError("all_to_all: Tensors must have identical type")

        def action(values: list[Tensor]) -> list[Tensor]:
            parts = [part.contiguous() for part in torch.split(values[0], gives)]
            made = torch.empty(output.shape, dtype=output.dtype)
            self._matched(wire, parts, found := list(torch.split(made, takes)))
            wire.swap(parts, found)
            return [made]

        return self._post("all_to_all_single", [given], [output], action)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Posted:
        wire = self._wire()

        def action(values: list[Tensor]) -> list[Tensor]:
            found = [torch.empty_like(host(t)) for t in outputs]
            self._matched(wire, values, found)
            return wire.swap(values, found)

        return self._post("all_to_all", inputs, outputs, action)

    def _matched(self, wire: Wire, parts: Sequence[Tensor], rooms: Sequence[Tensor]) -> None:
        """Raise RuntimeError if a rank expects other sizes than it is sent."""
        said = {"what": "all_to_all", "gives": [p.nbytes for p in parts]}
        every = wire.heads(said)
        takes = [room.nbytes for room in rooms]
        if [one.get("gives", [-1] * self._size)[self._rank] for one in every] != takes:
            raise RuntimeError(f"NCCL would hang: {wire.name} posts {every}, this takes {takes}")

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Posted:
        wire, mine = self._wire(), self._rank == opts.rootRank

        def action(values: list[Tensor]) -> list[Tensor]:
            found = wire.gather(values[0])
            return found if mine else []

        rooms = outputs[0] if mine else []
        return self._agreed("gather", inputs, rooms, action, root=opts.rootRank)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Posted:
        wire, mine, root = self._wire(), self._rank == opts.rootRank, opts.rootRank
        given, own = inputs[0] if mine else [], host(outputs[0])

        def action(values: list[Tensor]) -> list[Tensor]:
            stack = torch.stack(values) if mine else torch.zeros((self._size, *own.shape)).to(own)
            return [wire.gather(stack)[root][self._rank]]

        return self._agreed("scatter", given, outputs, action, outputs, root=root)

    def barrier(self, opts: Any = None) -> Posted:
        """All-reduce a word on the current device."""
        index = torch.cuda.current_device() if self._index is None else self._index
        word = torch.zeros(1, device=torch.device("cuda", index))
        return self._sums("barrier", [word], None)

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Posted | None:
        return self._one("send", tensors[0], peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Posted | None:
        return self._one("recv", tensors[0], peer)

    def _one(self, way: str, tensor: Tensor, peer: int) -> Posted | None:
        self._check(way, tensor)
        if self._batch is not None:
            self._batch.append((way, tensor, peer))
            return None
        if peer == self._rank:
            raise Misuse(f"{way}: a rank that sends to itself outside of a batch hangs")
        low, high = sorted((self._rank, peer))
        wire = self._wire(f", {low} with {high}", int(self._rank == high))

        def action(values: list[Tensor]) -> list[Tensor]:
            if way == "send":
                wire.send(values[0], int(self._rank != high))
                return []
            room = torch.empty_like(host(tensor))
            wire.recv(room, int(self._rank != high))
            return [room]

        reads, writes = ([tensor], []) if way == "send" else ([], [tensor])
        return self._post(way, reads, writes, action, wire)

    def _start_coalescing(self, device: Any) -> None:
        assert self._batch is None, "a batch in a batch"
        self._batch = []

    def _end_coalescing(self, device: Any) -> Posted:
        calls, self._batch = self._batch or [], None
        return self.batched(calls)

    def batched(self, calls: list[tuple[str, Tensor, int]]) -> Posted:
        """Run a ``ncclGroup`` of sends and receives."""
        wire = self._wire()
        sends = [tensor for way, tensor, _ in calls if way == "send"]
        rooms = [tensor for way, tensor, _ in calls if way == "recv"]

        def action(values: list[Tensor]) -> list[Tensor]:
            found = [torch.empty_like(host(t)) for t in rooms]
            given, taken = iter(values), iter(found)
            wire.batch([
                (way, next(given) if way == "send" else next(taken), peer)
                for way, _, peer in calls
            ])  # fmt: skip
            return found

        return self._post("batch_isend_irecv", sends, rooms, action)


def host(tensor: Tensor) -> Tensor:
    """Return the host memory behind a device tensor."""
    found: Tensor = ops.host(tensor.detach())
    return found


def raw(tensor: Tensor) -> Tensor:
    """Return its bytes."""
    return tensor.view(-1).view(torch.uint8)


def combined(rows: Sequence[Tensor], op: str) -> Tensor:
    """Reduce all ranks' values one after the other in their dtype."""
    total = rows[0].clone()
    for row in rows[1:]:
        total = COMBINE[op](total, row)
    return total.div_(len(rows)) if op == "AVG" else total


def _op(opts: Any) -> str:
    """Return a reduction's name. Raises RuntimeError if the stand-in lacks it."""
    if opts is None:
        return "SUM"
    for name in COMBINE:
        if opts.reduceOp == getattr(Op, name):
            return name
    raise RuntimeError(f"the stand-in has no {opts.reduceOp}")


def _overlaps_none(tensor: Tensor, places: set[tuple[int, int]]) -> bool:
    first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    return all(last <= start or start + nbytes <= first for start, nbytes in places)


def batch_isend_irecv(calls: list[Any]) -> list[Any]:
    """Replace ``torch.distributed.batch_isend_irecv``, which accepts only torch's NCCL class."""
    group = calls[0].group or dist.group.WORLD
    if not isinstance(group, HostNccl):
        return list(ORIGINAL(calls))
    each = [("send" if call.op is dist.isend else "recv", call.tensor, call.group_peer)
            for call in calls]  # fmt: skip
    return [group.batched(each)]


ORIGINAL = dist.batch_isend_irecv


def place() -> None:
    """Register ``nccl`` as a backend of this process."""
    for module in (c10d, cast("Any", dist)):
        module.is_nccl_available = lambda: True
        module.ProcessGroupNCCL = HostNccl
        module.batch_isend_irecv = batch_isend_irecv
    c10d.default_pg_nccl_timeout = timedelta(minutes=10)
