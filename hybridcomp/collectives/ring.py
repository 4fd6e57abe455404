"""Send ring attention's tensors round a group: encode them once, forward the same bytes.

A ``PackedMessage`` holds several tensors of one dtype. Its owner packs it; every other rank
receives it, decodes the tensors that it needs, and forwards the same bytes. In host memory it
starts with a header (``headers.Header``), so that a rank whose neighbour has other shapes or
another "compression" block raises an error instead of computing with wrong values. On a GPU there
is no header, since the host would have to wait to read it.

Payload sizes, if they vary, follow the header. On a GPU they are a separate message, sent before
the payload. The host waits only for the sizes; the payload is sent while attention is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.wire import payload_sizes, transport
from hybridcomp.collectives.wire.encoding import POOL, add_values
from hybridcomp.collectives.wire.group import Group
from hybridcomp.collectives.wire.handle import Meter, Pending, Steps
from hybridcomp.collectives.wire.headers import HEADER_NBYTES, Header, check_match, spec_digest
from hybridcomp.errors import CodecError

#: spec in the header of unencoded values
NATIVE = "none"


@dataclass(frozen=True)
class Contents:
    """Contents of a message: the elements of each of its tensors, and their common dtype."""

    numels: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Return the elements of all tensors."""
        return sum(self.numels)


@dataclass(eq=False)
class PackedMessage:
    """Message of several tensors, uint8: ``head`` bytes, then one payload of ``nbytes[i]`` each.

    ``release`` gives ``buffer`` back to the pool once the message is no longer read.
    """

    contents: Contents
    message: Tensor
    nbytes: Sequence[int]
    head: int
    buffer: Tensor | None = None

    def payload(self, index: int) -> Tensor:
        """Return the payload of tensor ``index``."""
        start = self.head + sum(self.nbytes[:index])
        return self.message[start : start + self.nbytes[index]]

    def release(self) -> None:
        """Give the buffer back; nothing may read the message afterwards."""
        POOL.give(self.buffer)
        self.buffer = None


@dataclass(eq=False)
class Ring:
    """Ring of ranks that forward packed messages, with group, meter and device of the messages.

    ``codec`` None: tensors are sent unencoded.
    """

    codec: Codec | None
    group: Group
    meter: Meter
    device: torch.device

    @property
    def posts_ahead(self) -> bool:
        """Return whether a receive may be posted before its send: over gloo between CPUs."""
        return self.device.type == "cpu" and self.group.backends.get("cpu") == "gloo"

    def pack(self, tensors: Sequence[Tensor]) -> PackedMessage:
        """Encode ``tensors`` (1-D, contiguous, one dtype) into one message, a payload for each."""
        contents = Contents(tuple(t.numel() for t in tensors), tensors[0].dtype)
        head, most = self._head(contents), self._most(contents)
        message = torch.empty(head + sum(most), dtype=torch.uint8, device=self.device)
        nbytes: list[int] = []
        position = head
        with self.meter.coding():
            for tensor, room in zip(tensors, most, strict=True):
                nbytes.append(self._encode(tensor, message[position : position + room]))
                position += nbytes[-1]
        message = message[:position]
        if head:
            dtype, numel = _told(contents)
            header = Header(spec_digest(self._spec), dtype, numel, sum(nbytes))
            message[:HEADER_NBYTES] = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
            if self._varies:
                payload_sizes.write_head(message[HEADER_NBYTES:], nbytes)
        return PackedMessage(contents, message, nbytes, head)

    def open(self, parcel: PackedMessage, index: int, out: Tensor) -> None:
        """Decode tensor ``index`` into ``out`` (1-D, contiguous, of its dtype)."""
        with self.meter.coding():
            if self.codec is None:
                out.copy_(parcel.payload(index).view(out.dtype))
            elif out.numel():
                self.codec.decode(parcel.payload(index), out)

    def add(self, parcel: PackedMessage, index: int, total: Tensor) -> None:
        """Add tensor ``index`` to ``total`` (1-D, contiguous, fp32 or fp64)."""
        dtype = parcel.contents.dtype
        with self.meter.coding():
            if self.codec is not None and total.numel():
                self.codec.decode_add(parcel.payload(index), total, dtype)
            elif total.dtype == torch.float32:
                add_values(total, parcel.payload(index).view(dtype))
            else:
                total.add_(parcel.payload(index).view(dtype))

    def shift(
        self, parcel: PackedMessage | None, by: int, expected: Contents | None
    ) -> Pending[PackedMessage | None]:
        """Send to group rank ``rank + by`` and receive from ``rank - by``, modulo the size.

        It returns once the messages are posted; ``wait()`` returns the received message.
        ``parcel`` None: send nothing; ``expected`` None: receive nothing. The neighbours must call
        ``shift`` accordingly.
        """
        return Pending(self._shift(parcel, by, expected), self.meter, async_op=True)

    def _shift(
        self, parcel: PackedMessage | None, by: int, expected: Contents | None
    ) -> Steps[PackedMessage | None]:
        """1 exchange sizes unless a header has them, 2 exchange messages, 3 check the header."""
        group = self.group
        dst, src = (group.rank + by) % group.size, (group.rank - by) % group.size
        # 1
        told = None
        if self._varies and self.device.type != "cpu":
            told = self._tell_sizes(parcel, expected, src, dst)
        # 2
        room = None if expected is None else self._room(expected, told)
        message = None if parcel is None else parcel.message
        into = None if room is None else room.message
        yield transport.shift(into, message, src, dst, group, self.meter)
        # 3
        if room is not None and room.head:
            self._check(room, src)
        return room

    def _tell_sizes(
        self, parcel: PackedMessage | None, expected: Contents | None, src: int, dst: int
    ) -> list[int]:
        """Exchange payload sizes with the neighbours; the host waits for the received sizes."""
        mine = out = None
        if parcel is not None:
            mine = torch.tensor(parcel.nbytes, dtype=torch.int64, device=self.device)
        if expected is not None:
            out = torch.empty(len(expected.numels), dtype=torch.int64, device=self.device)
        transport.shift(out, mine, src, dst, self.group, self.meter).wait()
        if out is None or expected is None:
            return []
        return self._checked([int(size) for size in out.tolist()], expected, src)

    def _checked(self, sizes: list[int], contents: Contents, src: int) -> list[int]:
        """Return ``sizes``; raise CodecError if rank ``src`` announced an impossible size."""
        assert self.codec is not None, "sizes of values without a codec are known"
        sender = f"rank {self.group.global_ranks[src]}"
        for nbytes, largest in zip(sizes, self._most(contents), strict=True):
            payload_sizes.check_size(self.codec, sender, nbytes, largest)
        return sizes

    def _room(self, expected: Contents, told: list[int] | None) -> PackedMessage:
        """Allocate a receive buffer for payloads of ``told`` bytes; None: of the largest sizes."""
        head, nbytes = self._head(expected), self._most(expected) if told is None else told
        buffer, message = POOL.take_bytes(head + sum(nbytes), self.device)
        return PackedMessage(expected, message, nbytes, head, buffer)

    def _encode(self, tensor: Tensor, slot: Tensor) -> int:
        if self.codec is None:
            slot.copy_(tensor.view(torch.uint8))
            return slot.numel()
        return self.codec.encode(tensor, slot) if tensor.numel() else 0

    def _most(self, contents: Contents) -> list[int]:
        """Return the largest possible bytes of each payload; the exact ones for fixed sizes."""
        if self.codec is None:
            return [numel * contents.dtype.itemsize for numel in contents.numels]
        return [self.codec.wire_nbytes(numel, contents.dtype) for numel in contents.numels]

    @property
    def _varies(self) -> bool:
        return self.codec is not None and not self.codec.fixed_size

    @property
    def _spec(self) -> str:
        return NATIVE if self.codec is None else self.codec.spec

    def _head(self, contents: Contents) -> int:
        """Return the bytes in front of the payloads."""
        if self.device.type != "cpu":
            return 0
        sizes = payload_sizes.head_nbytes(len(contents.numels)) if self._varies else 0
        return HEADER_NBYTES + sizes

    def _check(self, arrived: PackedMessage, src: int) -> None:
        """Compare the header with the expected contents, and truncate the message to its length.

        Raises CodecError that names both sides.
        """
        world, (dtype, numel) = self.group.global_ranks[src], _told(arrived.contents)
        header = Header.unpack(bytes(arrived.message[:HEADER_NBYTES].tolist()))
        check_match(header, world, numel, dtype, self._spec)
        if header.dtype != dtype:
            raise CodecError(
                f"rank {world} sent {header.dtype} elements, rank {dist.get_rank()} expects "
                f"{dtype}; all ranks must compute attention in one dtype"
            )
        if self._varies:
            count = len(arrived.contents.numels)
            sizes = payload_sizes.read_head(arrived.message[HEADER_NBYTES:], count)
            arrived.nbytes = self._checked(sizes, arrived.contents, src)
            arrived.message = arrived.message[: arrived.head + sum(arrived.nbytes)]


def _told(contents: Contents) -> tuple[torch.dtype, int]:
    """Return dtype and elements for a header; an fp64, which codecs refuse, counts as two fp32."""
    if contents.dtype == torch.float64:
        return torch.float32, 2 * contents.numel
    return contents.dtype, contents.numel
