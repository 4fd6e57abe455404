"""Headers of sent payloads: spec digest, dtype, elements and bytes; checked at once or later.

A payload of fixed size has a known length, so on a GPU its decoding need not wait for the header.
Once a message of a kind had the expected header, later messages of this kind are decoded at once.
Their headers are compared later, together: after every optimizer step the headers that have reached
the host, at a report and before a checkpoint all of them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.codecs import LateRead, read_together
from hybridcomp.codecs.base import VALUE_DTYPES
from hybridcomp.errors import CodecError

#: most headers that may wait to be compared, for jobs without optimizer steps
MOST = 1024

Kind = tuple[int, int, torch.dtype, str]  # source, elements, dtype and spec of a message
Check = Callable[[bytes], None]


MAGIC = b"HYCP"
VERSION = 1
#: magic, version, dtype (index into VALUE_DTYPES), numel, bytes of the payload, spec digest
_LAYOUT = struct.Struct("<4sHHQQ8s")
HEADER_NBYTES = _LAYOUT.size
assert HEADER_NBYTES == 32


@dataclass(frozen=True)
class Header:
    """Description of a payload, sent as a message ahead of it or at the start of its message."""

    spec_digest: bytes
    dtype: torch.dtype
    numel: int
    nbytes: int

    def pack(self) -> bytes:
        """Return the header as 32 bytes."""
        index = VALUE_DTYPES.index(self.dtype)
        return _LAYOUT.pack(MAGIC, VERSION, index, self.numel, self.nbytes, self.spec_digest)

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """Read 32 bytes. Raises CodecError when they are no header of this version."""
        magic, version, index, numel, nbytes, digest = _LAYOUT.unpack(data)
        if magic != MAGIC:
            raise CodecError(
                f"found no header but {data[:8]!r}...: the sender did not use hybridcomp's send; "
                "check that both ranks run the same block"
            )
        if version != VERSION or index >= len(VALUE_DTYPES):
            raise CodecError(
                f"found header version {version}, dtype {index}; this is version {VERSION}: "
                "install the same hybridcomp on all ranks"
            )
        return cls(digest, VALUE_DTYPES[index], numel, nbytes)


@cache
def spec_digest(spec: str) -> bytes:
    """Return 8 bytes that identify a codec spec."""
    return hashlib.sha256(spec.encode()).digest()[:8]


def check_match(header: Header, src: int, numel: int, dtype: torch.dtype, spec: str) -> None:
    """Raise CodecError that names both sides unless ``header`` has the expected spec and length."""
    digest = spec_digest(spec)
    if header.spec_digest == digest and header.numel == numel:
        return
    me = dist.get_rank()
    sent = "the same codec" if header.spec_digest == digest else "another codec"
    raise CodecError(
        f"rank {src} sent {header.numel} {header.dtype} elements with {sent} (spec digest "
        f"{header.spec_digest.hex()}); rank {me} expects {numel} {dtype} elements "
        f"with {spec} (spec digest {digest.hex()}); both must run the same block and shapes"
    )


@dataclass
class Unread:
    """Headers that wait on devices, each with a function that raises if the header is wrong."""

    kinds: set[Kind] = field(default_factory=set)
    waiting: list[tuple[Tensor, Check]] = field(default_factory=list)
    # headers on their way to the host
    asked: list[tuple[Tensor, Check]] = field(default_factory=list)
    late: LateRead = field(default_factory=LateRead)

    def looks_later(self, kind: Kind, device: torch.device) -> bool:
        """Return whether a message of this kind may be decoded before its header is read."""
        return device.type != "cpu" and kind in self.kinds

    def add(self, header: Tensor, check: Check) -> None:
        """Keep ``header``, whose bytes a later ``poll`` or ``check`` passes to ``check``."""
        self.waiting.append((header, check))
        if len(self.waiting) >= MOST:
            self.check()

    def check(self) -> None:
        """Wait for the devices and compare all headers; raise the error of the first wrong one."""
        waiting, self.waiting, self.asked = self.asked + self.waiting, [], []
        rows = read_together([header for header, _ in waiting])
        for row, (_, check) in zip(rows, waiting, strict=True):
            check(bytes(row))

    def poll(self) -> None:
        """Compare headers whose copies have reached the host; start copying more; never wait."""
        found = self.late.take()
        if found is not None:
            asked, self.asked = self.asked, []  # ``asked`` is empty if ``check`` was faster
            for header, (_, check) in zip(found.tolist(), asked, strict=False):
                check(bytes(header))
        if self.waiting and not self.late.pending:
            self.asked, self.waiting = self.waiting, []
            self.late.start(torch.stack([header for header, _ in self.asked]))


#: the pending headers of this process
UNREAD = Unread()


def check_headers() -> None:
    """Raise CodecError if a message since the last check had an unexpected header."""
    UNREAD.check()


def poll_headers() -> None:
    """Raise like ``check_headers``, but only for headers that are already on the host."""
    UNREAD.poll()
