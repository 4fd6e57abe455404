"""Keep optimizer states in encoded files, which are replaced atomically and checked when read.

A file is a payload, zeros, and a footer in its last 64 bytes; its size is a multiple of ALIGNED.
The process remembers the footer of every file that it has written, so a file that was damaged,
swapped with another or restored from an earlier time raises an error with its name, and nothing of
it is used. A file is written under another name and then renamed: if the process dies, either the
old file or the new one is there. ``docs/wire_formats.md`` has the layout.

Values whose encoding is no shorter are stored raw, with the footer behind them. So no file has
exactly the size of its values, which is the only thing that DeepSpeed checks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hybridcomp.channels.accounting.ledger import Ledger
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.beside import decode_beside, encode_beside
from hybridcomp.codecs.changes import change_kernels
from hybridcomp.codecs.registry import make_codec
from hybridcomp.collectives import Meter
from hybridcomp.errors import CodecError, StateFileError

MAGIC = b"hcstate1"
SIZE, ALIGNED = 64, 4096
_LAYOUT = struct.Struct("<8sBBHIQQQQII4x")
_CHECK = struct.Struct("<I")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: form of a payload: raw values, values relative to bf16 parameters, or a codec's output
FORMS = ("raw", "beside", "expcode", "mpc")
#: suffixes of a file of DeepSpeed's swapper, and of a file that is still incomplete
SWAPPED, NEW = ".tensor.swp", ".new"
#: threads of an engine that encode and decode, and without libaio also read and write
THREADS = 2
RESTORE = "resume from a checkpoint (load_checkpoint writes all files anew)"
#: returns, for a file's path, the bf16 tensor relative to which it is encoded; None: there is none
Halves = Callable[[str], Tensor | None]


class Footer(NamedTuple):
    """Footer of a file, which lists its contents.

    Attributes:
        dtype, form: indices into ``DTYPES`` and ``FORMS``.
        rank: rank that wrote the file.
        numel: number of values.
        nbytes: bytes of the payload.
        version: time of writing, in nanoseconds since 1970.
        digest: checksum of the payload.
        half: checksum of the bf16 values relative to which the payload is encoded; 0: none.
        name: checksum of the file's name.
    """

    dtype: int
    form: int
    rank: int
    numel: int
    nbytes: int
    version: int
    digest: int
    half: int
    name: int

    def pack(self) -> bytes:
        """Return the footer as 64 bytes."""
        body = _LAYOUT.pack(MAGIC, self.dtype, self.form, 0, *self[2:])
        return body + _CHECK.pack(zlib.crc32(body))

    @classmethod
    def of(cls, data: bytes) -> Footer | None:
        """Read the footer at the end of ``data``; return None if there is none or it is damaged."""
        if len(data) != SIZE or not data.startswith(MAGIC):
            return None
        if _CHECK.unpack(data[-4:])[0] != zlib.crc32(data[:-4]):
            return None
        _, dtype, form, _, rank, *rest = _LAYOUT.unpack(data[:-4])
        known = dtype < len(DTYPES) and form < len(FORMS)
        return cls(dtype, form, rank, *rest) if known else None


def pack(
    values: Tensor, name: str, rank: int, codec: Codec, half: Tensor | None, room: Tensor,
    aligned: int = ALIGNED,
) -> tuple[int, Footer]:  # fmt: skip
    """Write the file of ``values`` into ``room``; return its bytes, and its footer.

    Args:
        values: 1-D fp32/bf16/fp16 on the host, contiguous.
        name: name of the file, without folders.
        half: bf16 parameters of the first values, on the host; used if those round to it exactly.
        room: 1-D uint8 of ``room_for`` bytes.
        aligned: the file's size becomes a multiple of this.
    """
    raw = values.view(torch.uint8)
    form, used = "raw", None
    if half is not None and values.dtype == torch.float32:
        form, used = "beside", encode_beside(values, half, room[: raw.numel()])
    if used is None:
        form, half, used = codec.name, None, codec.encode(values, room)
    size = -(-(used + SIZE) // aligned) * aligned
    if size >= raw.numel():
        form, half, used = "raw", None, raw.numel()
        room[:used].copy_(raw)
        size = -(-(used + SIZE) // aligned) * aligned
    footer = Footer(
        DTYPES.index(values.dtype), FORMS.index(form), rank, values.numel(), used, time.time_ns(),
        digest(room[:used]), 0 if half is None else digest(half) & 0xFFFFFFFF,
        zlib.crc32(name.encode()),
    )  # fmt: skip
    room[used : size - SIZE].zero_()
    room[size - SIZE : size].copy_(torch.frombuffer(bytearray(footer.pack()), dtype=torch.uint8))
    return size, footer


def room_for(values: Tensor, codec: Codec, aligned: int = ALIGNED) -> int:
    """Return the maximum bytes of the file of ``values``, including room for encoding."""
    most = max(values.nbytes, codec.wire_nbytes(values.numel(), values.dtype))
    return -(-(most + SIZE) // aligned) * aligned


def digest(data: Tensor) -> int:
    """Return 64 bits of the xxh3 checksum of ``data`` on the host."""
    found = change_kernels().digest(data.data_ptr(), data.nbytes, torch.get_num_threads())
    return int.from_bytes(found[:8], "little")


def check(path: str, data: Tensor, rank: int, expected: bytes | None) -> Footer:
    """Return the footer of the file whose bytes are ``data``.

    ``expected``: the footer that it must have; None: any footer with this file's name. Raises
    StateFileError.
    """
    found = Footer.of(bytes(data[-SIZE:].tolist()))
    wanted = None if expected is None else Footer.of(expected)
    if found is None:
        size = "" if wanted is None else f" of {wanted.nbytes} payload bytes and more"
        raise damaged(path, f"expected a file{size} that ends in its footer, found "
                      f"{data.numel()} bytes that do not")  # fmt: skip
    if found.name != zlib.crc32(Path(path).name.encode()) or found.rank != rank:
        raise damaged(path, "it is the file of another state or rank, under this name")
    if wanted is not None and found != wanted:
        raise damaged(path, _difference(found, wanted))
    if data.numel() < found.nbytes + SIZE:
        raise damaged(path, f"expected {found.nbytes} payload bytes, found {data.numel() - SIZE}")
    if digest(data[: found.nbytes]) != found.digest:
        raise damaged(path, "its checksum differs from what was written: bits of it have changed")
    return found


def _difference(found: Footer, wanted: Footer) -> str:
    if (found.dtype, found.numel) != (wanted.dtype, wanted.numel):
        shown = [f"{one.numel} values of {_name(one.dtype)}" for one in (wanted, found)]
        return f"expected {shown[0]}, found {shown[1]}"
    age = (wanted.version - found.version) / 1e9
    kind = "an older version" if age > 0 else "another version"
    return f"it is {kind}, written {age:.3f} s before the last"


def _name(dtype: int) -> str:
    return str(DTYPES[dtype]).removeprefix("torch.")


def unpack(path: str, data: Tensor, footer: Footer, half: Tensor | None, out: Tensor) -> None:
    """Write the values of a checked file into ``out``, 1-D on the host.

    Raises StateFileError if ``out`` or ``half`` differs from the tensors that were written.
    """
    if (DTYPES[footer.dtype], footer.numel) != (out.dtype, out.numel()):
        shown = f"{footer.numel} values of {_name(footer.dtype)}"
        raise damaged(path, f"expected {out.numel()} values of {out.dtype}, found {shown}")
    payload, form = data[: footer.nbytes], FORMS[footer.form]
    if form == "raw":
        out.view(torch.uint8).copy_(payload)
    elif form == "beside":
        if half is None or digest(half) & 0xFFFFFFFF != footer.half:
            why = "the bf16 parameters that it was written beside were changed since"
            raise StateFileError(f"{path}: {why}; {RESTORE}")
        decode_beside(payload, half, out)
    else:
        try:
            make_codec(form).decode(payload, out)
        except CodecError as error:
            raise damaged(path, str(error)) from error


def damaged(path: str, what: str) -> StateFileError:
    """Return the error for a file whose bytes have changed since it was written."""
    return StateFileError(f"{path} is damaged: {what}; {RESTORE}")


@dataclass
class StateFiles:
    """Files of one engine's states on this rank, and their known footers.

    Attributes:
        codec: the lossless codec of the files.
        rank: rank of this process.
        halves: returns the bf16 parameters of a file of master weights, on any device.
        poisons: whether a failed read leaves NaN and is raised later by ``hold``, because other
            ranks wait in an upstream message that this rank must still reach.
        ledger: counts reads and writes once the engine is attached.
        failed: the first failure that was not raised yet.
        loaded: bf16 parameters from a checkpoint, by path, until they are copied into the model.
    """

    codec: Codec
    rank: int
    halves: Halves = lambda path: None
    poisons: bool = False
    ledger: Ledger | None = None
    failed: StateFileError | None = None
    loaded: dict[str, Tensor] = field(default_factory=dict)
    pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(THREADS, thread_name_prefix="hybridcomp_states")
    )
    #: footers of all files that this process has written, by path; no two engines share a file
    known: ClassVar[dict[str, bytes]] = {}

    def half(self, path: str) -> Tensor | None:
        """Return the bf16 parameters that belong to a file, on the host."""
        found = self.loaded.get(path)
        if found is None:
            found = self.halves(path)
        return None if found is None else found.detach().cpu()

    def hold(self) -> None:
        """Raise the first failure that was not raised yet."""
        if self.failed is not None:
            raise self.failed

    def count(self, raw_nbytes: int, file_nbytes: int, seconds: float) -> None:
        """Count the read or write of a file."""
        if self.ledger is not None:
            meter = Meter(codec_s=seconds, used={self.codec.spec: None})
            meter.sent(file_nbytes)
            self.ledger.record(("offload", "states"), raw_nbytes, meter)

    def adopt(
        self, folder: str, footers: Mapping[str, bytes], halves: Mapping[str, Tensor]
    ) -> None:
        """Expect from now on ``footers``, by file name, of a checkpoint's files in ``folder``.

        Files that DeepSpeed wrote without hybridcomp have no footer and are read as they are.
        ``halves``: the checkpoint's bf16 parameters, by file name.
        """
        for path in [one for one in self.known if os.path.dirname(one) == folder]:
            del self.known[path]
        self.known.update({os.path.join(folder, name): data for name, data in footers.items()})
        self.loaded = {os.path.join(folder, name): half for name, half in halves.items()}


def sweep(folder: str) -> None:
    """Remove incomplete files that an interrupted run has left in ``folder``."""
    for path in Path(folder).glob(f"*{NEW}"):
        path.unlink(missing_ok=True)


def unwritten(path: str, error: OSError, nbytes: int) -> StateFileError:
    """Return the error for a file that could not be written; the previous file is intact."""
    with contextlib.suppress(OSError):
        Path(path + NEW).unlink(missing_ok=True)
    free = shutil.disk_usage(os.path.dirname(path)).free
    return StateFileError(
        f"{path} cannot be written ({error.strerror or error}): it needs {nbytes} bytes, and "
        f"{free} are free; the file before is still there: make room and {RESTORE}"
    )
