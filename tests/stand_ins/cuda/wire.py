"""Stand-in for an NCCL communicator: sends messages over gloo in posting order.

A thread runs the messages, so that posting does not block, and different posting orders deadlock as
on a GPU. Before each message the ranks compare its description: on a mismatch NCCL would hang or
mix up values.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

c10d: Any = dist.distributed_c10d
#: bytes of a message's description
HEAD = 4096


class Wire:
    """A communicator: ``members`` of a group, of which this is ``rank``."""

    def __init__(self, name: str, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self.name, self.rank, self.size, self.timeout = name, rank, size, timeout
        self._store: Any = c10d.PrefixStore(f"stand-in/{name}", store)
        self._gloo: Any = None
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True, name=f"nccl {name}")
        self._thread.start()

    def post(self, call: Callable[[], None]) -> None:
        """Queue work for the thread."""
        self._calls.put(call)

    def close(self) -> None:
        """End the thread."""
        self._calls.put(None)
        self._thread.join(self.timeout.total_seconds())
        self._gloo = None

    def _serve(self) -> None:
        with torch.no_grad():
            while (call := self._calls.get()) is not None:
                call()

    @property
    def gloo(self) -> Any:
        """Return the gloo group, which as in NCCL all members create with the first message."""
        if self._gloo is None:
            found: Any = dist.ProcessGroupGloo
            self._gloo = found(self._store, self.rank, self.size, timeout=self.timeout)
        return self._gloo

    def heads(self, said: dict[str, Any]) -> list[dict[str, Any]]:
        """Return every rank's description of its message."""
        text = json.dumps(said).encode()
        assert len(text) <= HEAD, f"{self.name}: {len(text)} bytes to say about a message"
        own = torch.frombuffer(bytearray(text.ljust(HEAD)), dtype=torch.uint8)
        every = [torch.empty(HEAD, dtype=torch.uint8) for _ in range(self.size)]
        self.gloo.allgather([every], [own]).wait(self.timeout)
        return [json.loads(bytes(one.tolist())) for one in every]

    def agree(self, said: dict[str, Any]) -> None:
        """Raise RuntimeError if ranks are about to send different messages."""
        every = self.heads(said)
        if any(one != said for one in every):
            raise RuntimeError(f"NCCL would hang: ranks of {self.name} post {every}")

    def gather(self, own: Tensor) -> list[Tensor]:
        """Gather all ranks' values, which have the agreed length."""
        raw = own.contiguous().view(-1).view(torch.uint8)
        every = [torch.empty_like(raw) for _ in range(self.size)]
        if raw.numel():
            self.gloo.allgather([every], [raw]).wait(self.timeout)
        return [one.view(own.dtype).view(own.shape) for one in every]

    def swap(self, parts: list[Tensor], rooms: list[Tensor]) -> list[Tensor]:
        """Send part r to rank r, and receive parts of the senders' sizes; skips empty ones."""
        sends = [
            self.gloo.send([raw], peer, 0)
            for peer, part in enumerate(parts)
            if peer != self.rank and (raw := _raw(part)).numel()
        ]
        for peer, room in enumerate(rooms):
            if peer == self.rank:
                room.copy_(parts[peer])
            elif room.numel():
                self.gloo.recv([_raw(room)], peer, 0).wait(self.timeout)
        for send in sends:
            send.wait(self.timeout)
        return rooms

    def send(self, values: Tensor, peer: int) -> None:
        """Send, and wait for arrival, as NCCL does for long messages."""
        head = torch.tensor([values.nbytes])
        self.gloo.send([head], peer, 1).wait(self.timeout)
        if values.numel():
            self.gloo.send([_raw(values)], peer, 2).wait(self.timeout)
        self.gloo.recv([head], peer, 3).wait(self.timeout)

    def recv(self, room: Tensor, peer: int) -> None:
        """Receive exactly the sent number of bytes. Raises RuntimeError."""
        head = torch.empty(1, dtype=torch.int64)
        self.gloo.recv([head], peer, 1).wait(self.timeout)
        if int(head) != room.nbytes:
            raise RuntimeError(
                f"NCCL would hang: rank {peer} of {self.name} sends {int(head)} bytes into room "
                f"for {room.nbytes}"
            )
        if room.numel():
            self.gloo.recv([_raw(room)], peer, 2).wait(self.timeout)
        self.gloo.send([head], peer, 3).wait(self.timeout)

    def batch(self, calls: list[tuple[str, Tensor, int]]) -> None:
        """Run the sends and receives of a ``ncclGroup``, which do not wait for each other."""
        threads: list[threading.Thread] = []
        errors: list[BaseException] = []
        own = [[t for way, t, peer in calls if way == way_ and peer == self.rank]
               for way_ in ("send", "recv")]  # fmt: skip
        for values, room in zip(*own, strict=True):
            room.copy_(values)

        def run(one: list[tuple[str, Tensor, int]]) -> None:
            try:
                for way, tensor, peer in one:
                    (self.send if way == "send" else self.recv)(tensor, peer)
            except BaseException as error:
                errors.append(error)

        _ = self.gloo
        lanes: dict[tuple[str, int], list[tuple[str, Tensor, int]]] = {}
        for call in calls:
            if call[2] != self.rank:
                lanes.setdefault((call[0], call[2]), []).append(call)
        for lane in lanes.values():
            threads.append(threading.Thread(target=run, args=(lane,), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


def _raw(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
