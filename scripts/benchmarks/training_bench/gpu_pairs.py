"""Exchange bytes between two processes through GPU or host memory."""

from __future__ import annotations

import json
import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.multiprocessing import reductions

#: untyped parts of torch
CUDA: Any = torch.cuda
SHARE: Any = reductions.reduce_tensor
#: bytes of a slot; longer messages go in chunks
SLOT_NBYTES = 32 << 20
PAGE = 4096
#: seconds that a rank waits for the other, in training and during setup
PATIENCE_S, SETUP_S = 300.0, 30.0
#: polls without a pause; later polls pause, since the other rank may need this core
LOOKS, PAUSE_S = 200, 50e-6


class Pair:
    """Exchange of two ranks, synchronized by turn counters in shared memory."""

    def __init__(self, store: Any, rank: int, nbytes: int) -> None:
        """``nbytes``: shared memory that the subclass needs."""
        self._rank, self._turn, self._patience = rank, 0, PATIENCE_S
        if rank == 0:
            file, name = tempfile.mkstemp(prefix="hybridcomp.")  # unpredictable name
            os.truncate(file, PAGE + nbytes)
            os.close(file)
            store.set("path", name)
        store.wait(["path"], timedelta(seconds=SETUP_S))
        path = Path(store.get("path").decode())
        with path.open("r+b") as mapped:
            self._map = mmap.mmap(mapped.fileno(), PAGE + nbytes)
        #: turn that each rank has announced; one cache line each
        self._turns = np.frombuffer(self._map, dtype=np.int64, count=16)[::8]
        store.set(f"mapped{rank}", b"1")
        store.wait([f"mapped{1 - rank}"], timedelta(seconds=SETUP_S))
        if rank == 0:
            path.unlink()

    def swap(self, give: Tensor | None, take: Tensor | None) -> None:
        """Send the bytes of ``give`` and receive into ``take``; both contiguous."""
        gives = torch.empty(0, dtype=torch.uint8) if give is None else octets(give)
        takes = torch.empty(0, dtype=torch.uint8) if take is None else octets(take)
        for start in range(0, max(len(gives), len(takes), 1), SLOT_NBYTES):
            end = start + SLOT_NBYTES
            self._piece(gives[start:end], takes[start:end])

    def try_out(self) -> None:
        """Raise RuntimeError if a test exchange corrupts bytes."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        sent = [torch.arange(100, device=device) * (rank + 3) for rank in range(2)]
        self._patience = SETUP_S
        for _ in range(5):  # every slot, then again
            got = torch.zeros_like(sent[0])
            self.swap(sent[self._rank], got)
            if not got.equal(sent[1 - self._rank]):
                raise RuntimeError(f"expected {sent[1 - self._rank][:4]}, found {got[:4]}")
        self._patience = PATIENCE_S

    def _piece(self, give: Tensor, take: Tensor) -> None:
        raise NotImplementedError

    def _tell(self) -> None:
        """Announce that this turn's bytes are ready, and wait for the other rank's announcement."""
        self._turns[self._rank] = self._turn
        deadline, looked = 0.0, 0
        while self._turns[1 - self._rank] < self._turn:
            looked += 1
            time.sleep(0 if looked < LOOKS else PAUSE_S)
            deadline = deadline or time.monotonic() + self._patience
            if time.monotonic() > deadline:
                raise RuntimeError(f"turn {self._turn}: the other rank does not come")


def told(arguments: Sequence[Any]) -> bytes:
    """Serialize as JSON the numbers and handles from which the other rank rebuilds a tensor."""
    plain = [a.hex() if isinstance(a, bytes) else a if type(a) is int else None for a in arguments]
    return json.dumps(plain).encode()


def heard(message: bytes, own: Sequence[Any]) -> list[Any]:
    """Replace the numbers and handles in ``own`` by the other rank's, serialized by ``told``.

    Classes and dtypes are taken from ``own``, so no code comes from the store. Raises RuntimeError
    if ``message`` does not match ``own``.
    """
    try:
        return [
            bytes.fromhex(other) if isinstance(mine, bytes)
            else int(other) if type(mine) is int else mine
            for mine, other in zip(own, json.loads(message), strict=True)
        ]  # fmt: skip
    except (TypeError, ValueError) as error:
        raise RuntimeError(f"expected the handles of the other rank ({error})") from None


class DevicePair(Pair):
    """Exchange through slots of GPU memory that both processes map (CUDA IPC).

    1. Copy the input into this rank's slot of the turn and record an event.
    2. Announce the turn. Wait on the host for the other rank's announcement, then on the device for
       the other rank's event.
    3. Copy from the other rank's slot. Turns alternate between two slots.
    """

    def __init__(self, store: Any, rank: int) -> None:
        super().__init__(store, rank, 0)
        self._own = torch.empty(2, SLOT_NBYTES, dtype=torch.uint8, device="cuda")
        self._told = [CUDA.Event(interprocess=True) for _ in range(2)]
        self._stream = CUDA.Stream()
        for event in self._told:
            event.record(self._stream)
        torch.cuda.synchronize()
        rebuild, arguments = SHARE(self._own)
        own = [*arguments, *(event.ipc_handle() for event in self._told)]
        store.set(f"pair{rank}", told(own))
        store.wait([f"pair{1 - rank}"], timedelta(seconds=SETUP_S))
        *arguments, first, second = heard(store.get(f"pair{1 - rank}"), own)
        self._theirs = rebuild(*arguments)
        device = torch.device("cuda", torch.cuda.current_device())
        self._tells = [CUDA.Event.from_ipc_handle(device, each) for each in (first, second)]

    def swap(self, give: Tensor | None, take: Tensor | None) -> None:
        """Exchange on a side stream; the caller's stream waits for the side stream."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            super().swap(give, take)
        current.wait_stream(self._stream)

    def _piece(self, give: Tensor, take: Tensor) -> None:
        slot, self._turn = self._turn % 2, self._turn + 1
        # 1.
        self._own[slot, : len(give)].copy_(give, non_blocking=True)
        self._told[slot].record(self._stream)
        # 2.
        self._tell()
        self._stream.wait_event(self._tells[slot])
        # 3.
        take.copy_(self._theirs[slot, : len(take)], non_blocking=True)


class HostPair(Pair):
    """Exchange through slots of host memory, where GPU memory cannot be mapped or is absent.

    Synchronizes after every copy, so that a slot has been read when its turn ends.
    """

    def __init__(self, store: Any, rank: int) -> None:
        super().__init__(store, rank, 4 * SLOT_NBYTES)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        if torch.cuda.is_available():  # pinning is faster but optional
            CUDA.cudart().cudaHostRegister(whole.data_ptr(), whole.nbytes, 0)
        self._slots = whole[PAGE:].view(2, 2, SLOT_NBYTES)

    def _piece(self, give: Tensor, take: Tensor) -> None:
        slot, self._turn = self._turn % 2, self._turn + 1
        self._slots[self._rank, slot, : len(give)].copy_(give)
        self._tell()
        take.copy_(self._slots[1 - self._rank, slot, : len(take)])


#: the fastest first
KINDS: tuple[type[DevicePair] | type[HostPair], ...] = (DevicePair, HostPair)


def pair_of(store: Any, rank: int) -> Pair:
    """Return the fastest kind that works on both ranks. Raises RuntimeError if none does."""
    for number, kind in enumerate(KINDS):
        if kind is DevicePair and not torch.cuda.is_available():
            continue
        own = PrefixStore(f"{number}.", store)
        found: Pair | None = None
        for step in ("made", "tried"):
            try:
                if step == "made":
                    found = kind(own, rank)
                elif found is not None:
                    found.try_out()
            except (RuntimeError, OSError) as error:
                print(f"pair: {kind.__name__} {step}: {error}", flush=True)
                found = None
            own.set(f"{step}{rank}", "no" if found is None else "yes")
            if own.get(f"{step}{1 - rank}") != b"yes":
                found = None
        if found is not None:
            return found
    raise RuntimeError("pair: the ranks share no memory")


def octets(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor as a vector."""
    return tensor.view(-1).view(torch.uint8)
