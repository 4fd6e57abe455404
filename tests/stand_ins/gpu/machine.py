"""A GPU that only tracks accesses: torch's operations, kernel launches, NCCL messages."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work
from torch.utils._python_dispatch import TorchDispatchMode

from hybridcomp.kernels.cuda.launcher import Words
from hybridcomp.kernels.cuda.workspaces import Workspaces
from tests.stand_ins.gpu.memory import HOST, Block, Clock, Memory, Stream, tensors_in

DEVICE = torch.device("cuda", 0)
#: operations that only allocate
MAKE = ("aten.empty", "aten.new_empty")
#: copies; between two devices they block the host unless non_blocking
COPIES = ("aten.copy_", "aten._to_copy", "aten._copy_from")


class Gpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One GPU; operations inside the mode run on its current stream.

    Attributes:
        waits: descriptions of the host's waits.
        capturing: whether a CUDA graph captures the current stream.
        unmet: messages without a wait yet.
        did: work and waits of each stream, in the host's order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = Memory()
        self.host = Stream(HOST, "the host")
        self.streams = [Stream(0, "the default stream")]
        self.current = self.streams[0]
        self.nccl = self.stream("NCCL")
        self.waits: list[str] = []
        self.capturing = False
        self.unmet: list[Message] = []
        self.did: list[tuple[str, str]] = []
        self._workspaces = Workspaces(self._zeroed)
        self._named: dict[int, list[int]] = {}  # addresses in device tables, by the table's address

    def stream(self, name: str) -> Stream:
        """Make a stream."""
        made = Stream(len(self.streams), f"{name} ({len(self.streams)})")
        self.streams.append(made)
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.sweep()
        found = func(*args, **kwargs)
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(found)
        for one in outputs:
            self._block(one, str(func))
            if kwargs.get("pin_memory"):
                self.memory.pinned.add(one.untyped_storage()._cdata)
        written = _written(func, args, kwargs)
        if _is_view(func) or str(func).startswith(MAKE) or not (outputs or written):
            return found  # the last kind are queries of shapes
        both = [*inputs, *outputs]
        by = self.current if any(t.is_cuda for t in both) else self.host
        reads = [
            each
            for each in inputs
            if not any(each is other for other in written)
            and (each.is_cuda or each.dim() or by is self.host)  # host scalars are passed by value
        ]
        self.does(by, reads, [*written, *outputs], str(func).split(".")[1])
        if str(func).startswith(COPIES) and len({t.is_cuda for t in both}) > 1:
            away = [t for t in (*written, *outputs) if not t.is_cuda]
            kept = all(t.untyped_storage()._cdata in self.memory.pinned for t in away)
            if not (kwargs.get("non_blocking") or True in args[2:3]) or not kept:
                self.wait(str(func), self.current.clock)
        return found

    def does(
        self, by: Stream, reads: Sequence[Tensor], writes: Sequence[Tensor], what: str = ""
    ) -> None:
        """Make a stream do ``what``. Raises Race."""
        self.did.append((by.name, what))
        if by is not self.host:
            by.behind(self.host.clock)
        by.step()
        for tensors, writing in ((reads, False), (writes, True)):
            for block in dict.fromkeys(self._block(t, "a tensor") for t in tensors):
                block.touch(by, writing)

    def _block(self, tensor: Tensor, what: str) -> Block:
        return self.memory.block(tensor, self.current if tensor.is_cuda else self.host, what)

    def order(self, stream: Stream, behind: str) -> None:
        """Record that a stream waits for another, or for a message."""
        self.did.append((stream.name, f"waits for {behind}"))

    def sweep(self) -> None:
        """Reclaim freed memory. Raises Race."""
        self.memory.sweep(self.host)

    def wait(self, why: str, clock: Clock) -> None:
        """Make the host wait."""
        self.sweep()
        self.waits.append(why)
        self.order(self.host, why)
        self.host.behind(clock)

    def launch(
        self, source: str, defines: tuple[str, ...], kernel: str, grid: tuple[int, int],
        *words: int, threads: int = 256, table: bytes | None = None,
    ) -> None:  # fmt: skip
        """See ``launcher.Launcher``: reads the first argument's block and writes all others.

        A table's blocks all count as written.
        """
        if table is not None:
            words = (*words, *struct.unpack(f"<{len(table) // 8}Q", table[: len(table) // 8 * 8]))
            words = (*words, *chain(*(self._named.get(word, ()) for word in words)))
        self.sweep()
        self.current.behind(self.host.clock)
        self.current.step()
        self.did.append((self.current.name, kernel))
        blocks = list(dict.fromkeys(b for word in words if (b := self.memory.at(word))))
        for place, block in enumerate(blocks):
            block.touch(self.current, writes=table is not None or place > 0)

    def zeros(self, words: int) -> Tensor:
        """See ``launcher.Launcher``."""
        return self._workspaces.take(words, self.current.number)

    def empty(self, words: int) -> Tensor:
        """See ``launcher.Launcher``."""
        return torch.empty(words, dtype=torch.int64, device=DEVICE)

    def words(self, values: Words) -> Tensor:
        """See ``launcher.Launcher``: a launch with these words accesses the blocks they name."""
        host = torch.empty(values.shape, dtype=torch.int64, pin_memory=True)
        made = host.to(DEVICE, non_blocking=True)
        self._named[made.data_ptr()] = values.flatten().tolist()
        return made

    def _zeroed(self, words: int) -> Tensor:
        return torch.zeros(words, dtype=torch.int64, device=DEVICE)

    def post(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Message:
        """Post an NCCL message behind the current stream, on a separate stream."""
        self.sweep()
        self.nccl.behind(self.current.clock)
        reads, writes = ([t for t in some if t.numel()] for some in (reads, writes))
        self.order(self.nccl, self.current.name)
        self.does(self.nccl, reads, writes, "message")
        return Message(self, [*reads, *writes])


class Message(Work):
    """Orders the waiting stream behind NCCL's stream, and holds its tensors until then."""

    def __init__(self, gpu: Gpu, held: list[Tensor]) -> None:
        super().__init__()
        self._gpu, self._held, self._clock = gpu, held, dict(gpu.nccl.clock)
        gpu.unmet.append(self)

    def wait(self, timeout: object = None) -> bool:
        self._gpu.current.behind(self._clock)
        self._gpu.order(self._gpu.current, "a message")
        self._held = []
        if self in self._gpu.unmet:
            self._gpu.unmet.remove(self)
        return True


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    views = (r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return bool(returns) and all(views)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that an operation writes."""
    arguments = func._schema.arguments
    named = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    into = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return tensors_in([named.get(name) for name in into])
