"""Launch kernels for the parts of one tensor, however many they are; blockint has them."""

from __future__ import annotations

import struct
import weakref

import torch
from torch import Tensor

from hybridcomp.kernels import DTYPE_CODES
from hybridcomp.kernels.cuda.functions import ALIGN
from hybridcomp.kernels.cuda.fused import blockint_image
from hybridcomp.kernels.cuda.launcher import DTYPES, WARPS, Launcher, ceil_div, stream_getter
from hybridcomp.kernels.parts import Parts

#: parts of a table that comes by value (``parts.h``); a longer one is copied to the device
NEAR = 96
PART_WORDS = 4
_stream = stream_getter()


class PartsBlockInt:
    """``codecs.launches.PartsKernel`` of blockint: one launch for parts of any number."""

    def __init__(self, launcher: Launcher, setting: int) -> None:
        self._launcher = launcher
        self._setting = setting
        #: tables by value; those with a table on the device hold it by stream in ``_far``
        self._near: weakref.WeakKeyDictionary[Parts, bytes] = weakref.WeakKeyDictionary()
        self._far: weakref.WeakKeyDictionary[Parts, dict[int, tuple[Tensor, bytes]]]
        self._far = weakref.WeakKeyDictionary()
        self._captured: list[Tensor] = []

    def encode(self, values: Tensor, parts: Parts, out: Tensor) -> None:
        """Encode, one warp for each tile."""
        self._run("encode", values, parts, out, 1)

    def decode(
        self, payloads: Tensor, parts: Parts, out: Tensor, ranks: int = 1, slot: int = 0
    ) -> None:
        """Decode, one warp for each tile."""
        self._run("decode", out, parts, payloads, ranks, out.numel() // ranks, slot)

    def _run(
        self, kernel: str, values: Tensor, parts: Parts, payloads: Tensor, ranks: int, *words: int
    ) -> None:
        if not parts.tiles:
            return
        start = payloads.data_ptr()
        if start % ALIGN:
            raise ValueError(f"blockint: a payload must begin at a multiple of {ALIGN} bytes")
        code = DTYPE_CODES[values.dtype]
        self._launcher.launch(
            "blockint_parts.cu", blockint_image(self._setting, code),
            f"blockint_parts_{kernel}_{DTYPES[code]}", (ceil_div(parts.tiles, WARPS), ranks),
            values.data_ptr(), start, *words, table=self._table(parts, values.device),
        )  # fmt: skip

    def _table(self, parts: Parts, device: torch.device) -> bytes:
        """Return the ``Parts`` of parts.h; one on the device is copied once for each stream."""
        if len(parts) <= NEAR:
            near = self._near.get(parts)
            if near is None:
                words = parts.rows.tobytes()
                empty = bytes(8 * PART_WORDS * NEAR - len(words))
                near = self._near[parts] = struct.pack("<2Q", len(parts), 0) + words + empty
            return near
        by_stream = self._far.setdefault(parts, {})
        stream = _stream(device.index) if device.type == "cuda" else 0
        if stream not in by_stream:
            rows = torch.from_numpy(parts.rows)
            if device.type == "cuda":  # torch keeps the pinned copy until it has been read
                rows = rows.pin_memory().to(device, non_blocking=True)
            head = struct.pack("<2Q", len(parts), rows.data_ptr())
            by_stream[stream] = rows, head + bytes(8 * PART_WORDS * NEAR)
        rows, table = by_stream[stream]
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._captured.append(rows)  # the graph reads it at every replay
        return table
