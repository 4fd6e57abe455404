"""Stretches of tensors whose places a plan knows, as a table that kernels of GPUs read."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybridcomp.kernels import on_host

Offsets = npt.NDArray[np.int64]
#: elements that a warp encodes, a power of two: a shift takes a fifth of a division's time
TILE = 1024
#: rows of a table that comes by value (``cuda/table.h``); a longer one is copied to the device
NEAR, ROW_WORDS = 96, 5


def read_lengths(lengths: Sequence[int], row: int, out: Offsets) -> tuple[int, int, int]:
    """Write ``row`` times each of ``lengths`` to ``out``: its sum, smallest and largest.

    Raises TypeError for what is no integer, ValueError for no lengths or ``out`` of another length.
    """
    found: tuple[int, int, int] = on_host("lengths").read(lengths, row, out)
    return found


class PlannedStretch(NamedTuple):
    """Values of one tensor that have a payload of their own, by their positions.

    Attributes:
        values: first element in the tensor that is encoded or that this rank adds.
        numel: elements.
        payload: first byte in the buffer of the payloads.
        out: first element of what is decoded or summed.
    """

    values: int
    numel: int
    payload: int
    out: int = 0


class StretchTable:
    """Stretches for every message that is cut in the same way; those without elements are left out.

    Positions count from the start of tensors, so that one table serves all of them. Copies of the
    rows on a device live as long as the table, one for each stream.

    Args:
        stretches: columns of ``PlannedStretch``, int64; payloads begin at multiples of 16.
        step: tiles of which the rows begin at multiples: those of a thread block where a block
            takes one row.
    """

    def __init__(
        self, values: Offsets, numels: Offsets, payloads: Offsets, outs: Offsets, step: int = 1
    ) -> None:
        full = numels.nonzero()[0]
        if len(full) < len(numels):
            values, numels = values[full], numels[full]
            payloads, outs = payloads[full], outs[full]
        tiles = (numels + (TILE - 1)) >> TILE.bit_length() - 1
        if step > 1:
            tiles = -(-tiles // step) * step
        self.rows = np.empty((len(numels), ROW_WORDS), dtype=np.int64)
        np.cumsum(tiles, out=self.rows[:, 0])
        self.tiles = int(self.rows[-1, 0]) if len(numels) else 0
        self.rows[:, 0] -= tiles
        for column, each in enumerate((values, numels, payloads, outs), start=1):
            self.rows[:, column] = each
        self._room: Tensor | None = None  # the rows, where they lie as a device copies them
        self._far: tuple[Tensor, bytes] | None = None
        self._on: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}

    @classmethod
    def of(cls, stretches: Sequence[PlannedStretch], step: int = 1) -> StretchTable:
        """Return the table of ``stretches``."""
        values, numels, payloads, outs = np.array(stretches, dtype=np.int64).reshape(-1, 4).T
        return cls(values, numels, payloads, outs, step)

    @classmethod
    def of_parts(
        cls, numels: Offsets, nbytes: Offsets, skip: int, device: torch.device
    ) -> tuple[StretchTable, int, int]:
        """Lay out parts that follow each other, as their payloads do, but for part ``skip``.

        Args:
            numels: int64 elements of each part.
            nbytes: int64 bytes of each payload; that of ``skip`` becomes zero.
            device: that kernels will read the rows on.

        Returns the table, the bytes of all payloads, and the first element of ``skip``.
        """
        made = cls.__new__(cls)
        shape, room = (len(numels), ROW_WORDS), None
        if device.type == "cuda" and len(numels) > NEAR:
            room = _room(shape, device)
        rows = np.empty(shape, dtype=np.int64) if room is None else room.numpy()
        layout = on_host("lengths").lay_out(numels, nbytes, skip, TILE.bit_length() - 1, rows)
        count, made.tiles, total, start = layout
        made.rows, made._room, made._far, made._on = rows[:count], room, None, {}
        return made, total, start

    def __len__(self) -> int:
        return len(self.rows)

    def on(self, device: torch.device, stream: int) -> Tensor:
        """Return the rows on ``device``, copied for ``stream`` at the first call; nobody waits."""
        found = self._on.get((device, stream))
        if found is None:
            rows = torch.from_numpy(self.rows) if self._room is None else self._room[: len(self)]
            if device.type == "cuda" and self._room is None:
                rows = _room(self.rows.shape, device).copy_(rows)
            # a graph that captures the copy reads the pinned rows again
            found = self._on[device, stream] = rows, rows.to(device, non_blocking=True)
        return found[1]

    @cached_property
    def near(self) -> bytes | None:
        """``NearTable`` of ``cuda/table.h`` with the rows in it; None for more than NEAR."""
        if len(self) > NEAR:
            return None
        words = self.rows.tobytes()
        return struct.pack("<2Q", len(self), 0) + words.ljust(8 * ROW_WORDS * NEAR, b"\0")

    def far(self, words: Tensor) -> bytes:
        """Return a ``NearTable`` whose rows are at ``words``."""
        if self._far is None or self._far[0] is not words:
            self._far = words, struct.pack("<2Q", len(self), words.data_ptr()) + _NOTHING
        return self._far[1]


def _room(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return int64 memory of the host that ``device`` copies without the host waiting."""
    return torch.empty(shape, dtype=torch.int64, pin_memory=device.type == "cuda")


_NOTHING = bytes(8 * ROW_WORDS * NEAR)
