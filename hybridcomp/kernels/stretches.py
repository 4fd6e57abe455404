"""Tables of tensor slices at positions that a plan has fixed, for GPU kernels to read."""

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
#: elements per warp, a power of two, since a shift takes a fifth of a division's time
TILE = 1024
#: rows of a table passed by value (``cuda/table.h``); a longer table is copied to the device
NEAR, ROW_WORDS = 96, 5


def read_lengths(lengths: Sequence[int], row: int, out: Offsets) -> tuple[int, int, int]:
    """Write ``row`` times each of ``lengths`` to ``out``; return sum, minimum and maximum.

    The returned numbers are those of the written products. Raises TypeError for a non-integer,
    ValueError if ``lengths`` is empty or ``out`` has another length.
    """
    found: tuple[int, int, int] = on_host("lengths").read(lengths, row, out)
    return found


class PlannedStretch(NamedTuple):
    """Slice of a tensor with its own payload, by positions.

    Attributes:
        values: index of the first element in the tensor that is encoded, or that this rank adds.
        numel: number of elements.
        payload: index of the first byte in the buffer of payloads.
        out: index of the first element in the tensor that receives decoded values or sums.
    """

    values: int
    numel: int
    payload: int
    out: int = 0


class StretchTable:
    """Non-empty slices for all messages that are cut in the same way.

    Positions are relative to tensors, so one table serves all such messages. Device copies of the
    rows, one per stream, live as long as the table.

    Args:
        stretches: columns of ``PlannedStretch``, int64; payloads begin at multiples of 16.
        step: rows begin at multiples of this many tiles: the number of tiles of a thread block, for
            kernels whose thread blocks handle a single row each.
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
        self._room: Tensor | None = None  # the rows, in memory from which a device can copy
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
        """Lay out consecutive parts and their payloads, leaving out part ``skip``.

        Args:
            numels: int64 elements of each part.
            nbytes: int64 bytes of each payload; the entry of ``skip`` is set to zero.
            device: device on which kernels will read the rows.

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
        """Return the rows on ``device``, copied for ``stream`` on first use, without waiting."""
        found = self._on.get((device, stream))
        if found is None:
            rows = torch.from_numpy(self.rows) if self._room is None else self._room[: len(self)]
            if device.type == "cuda" and self._room is None:
                rows = _room(self.rows.shape, device).copy_(rows)
            # a graph that captures the copy rereads the pinned rows at every replay
            found = self._on[device, stream] = rows, rows.to(device, non_blocking=True)
        return found[1]

    @cached_property
    def near(self) -> bytes | None:
        """Return a ``NearTable`` of ``cuda/table.h`` holding the rows; None for more than NEAR."""
        if len(self) > NEAR:
            return None
        words = self.rows.tobytes()
        return struct.pack("<2Q", len(self), 0) + words.ljust(8 * ROW_WORDS * NEAR, b"\0")

    def far(self, words: Tensor) -> bytes:
        """Return a ``NearTable`` that refers to the rows at ``words``."""
        if self._far is None or self._far[0] is not words:
            self._far = words, struct.pack("<2Q", len(self), words.data_ptr()) + _NOTHING
        return self._far[1]


def _room(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return int64 host memory from which ``device`` can copy without the host waiting."""
    return torch.empty(shape, dtype=torch.int64, pin_memory=device.type == "cuda", device="cpu")


_NOTHING = bytes(8 * ROW_WORDS * NEAR)
