"""Messages of ring attention: several tensors encoded once, handed on as the bytes they are.

A ``Parcel`` is the message of some tensors of one dtype. Its owner packs it; every other rank takes
it in, opens what it needs of it, and hands the same bytes on. In host memory a header travels in
front (``send_recv.Header``): a rank whose neighbour holds other shapes or runs another block learns
so instead of computing with rubbish. A message of a GPU has none, as nobody could read it there.

Sizes that vary stand behind the header. On a GPU they are a message of their own, ahead of the
payload; the host waits for it, and the payload is under way while a block of attention computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.wire import (
    HEADER_NBYTES,
    POOL,
    Group,
    Header,
    Meter,
    Pending,
    Steps,
    add_values,
    check_match,
    first,
    payload_sizes,
    spec_digest,
    transport,
)
from hybridcomp.errors import CodecError

#: what stands for the codec in the header of values that travel as they are
NATIVE = "none"


@dataclass(frozen=True)
class Contents:
    """What a parcel holds: the elements of each of its tensors, which have one dtype."""

    numels: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(self.numels)


@dataclass(eq=False)
class Parcel:
    """A message on its way: ``message`` (uint8) with payloads of ``nbytes`` bytes behind ``head``.

    ``buffer``: what goes back to the pool once nobody reads the message any more.
    """

    contents: Contents
    message: Tensor
    nbytes: Sequence[int]
    head: int
    buffer: Tensor | None = None

    def payload(self, index: int) -> Tensor:
        """The payload of the tensor with this number."""
        start = self.head + sum(self.nbytes[:index])
        return self.message[start : start + self.nbytes[index]]

    def release(self) -> None:
        """Give the buffer back; nothing may read the message afterwards."""
        POOL.give(self.buffer)
        self.buffer = None


@dataclass(eq=False)
class Ring:
    """How parcels travel: with which codec (None: as they are), between whom, and who counts.

    ``device``: where messages are.
    """

    codec: Codec | None
    group: Group
    meter: Meter
    device: torch.device

    def pack(self, tensors: Sequence[Tensor]) -> Parcel:
        """Encode ``tensors`` (1-D, contiguous, one dtype), each for itself, into one message."""
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
        return Parcel(contents, message, nbytes, head)

    def open(self, parcel: Parcel, index: int, out: Tensor) -> None:
        """Decode the tensor with this number into ``out`` (1-D, contiguous, of its dtype)."""
        with self.meter.coding():
            if self.codec is None:
                out.copy_(parcel.payload(index).view(out.dtype))
            elif out.numel():
                self.codec.decode(parcel.payload(index), out)

    def add(self, parcel: Parcel, index: int, total: Tensor) -> None:
        """Add the tensor with this number to ``total`` (1-D, contiguous, fp32 or fp64)."""
        dtype = parcel.contents.dtype
        with self.meter.coding():
            if self.codec is not None and total.numel():
                self.codec.decode_add(parcel.payload(index), total, dtype)
            elif total.dtype == torch.float32:
                add_values(total, parcel.payload(index).view(dtype))
            else:
                total.add_(parcel.payload(index).view(dtype))

    def shift(
        self, parcel: Parcel | None, by: int, expected: Contents | None
    ) -> Pending[Parcel | None]:
        """Send to the rank that is ``by`` further, and receive from the one as far before.

        The messages are under way when this returns; ``wait()`` gives the parcel that came. None:
        nothing goes that way, which the other side has to know.
        """
        return Pending(self._shift(parcel, by, expected), self.meter, async_op=True)

    def _shift(
        self, parcel: Parcel | None, by: int, expected: Contents | None
    ) -> Steps[Parcel | None]:
        """1 tell sizes that no header can hold, 2 move the bytes, 3 look at what came."""
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
        self, parcel: Parcel | None, expected: Contents | None, src: int, dst: int
    ) -> list[int]:
        """The sizes of what comes; the host waits for them."""
        mine = out = None
        if parcel is not None:
            mine = torch.tensor(parcel.nbytes, dtype=torch.int64, device=self.device)
        if expected is not None:
            out = torch.empty(len(expected.numels), dtype=torch.int64, device=self.device)
        transport.shift(out, mine, src, dst, self.group, self.meter).wait()
        return [] if out is None else [int(size) for size in out.tolist()]

    def _room(self, expected: Contents, told: list[int] | None) -> Parcel:
        """A parcel to receive into, as long as what comes, or as it may be at most."""
        head, nbytes = self._head(expected), self._most(expected) if told is None else told
        buffer = POOL.take(head + sum(nbytes), self.device)
        return Parcel(expected, first(buffer, head + sum(nbytes)), nbytes, head, buffer)

    def _encode(self, tensor: Tensor, slot: Tensor) -> int:
        if self.codec is None:
            slot.copy_(tensor.view(torch.uint8))
            return slot.numel()
        return self.codec.encode(tensor, slot) if tensor.numel() else 0

    def _most(self, contents: Contents) -> list[int]:
        """The most bytes of each payload; exactly as many where sizes are fixed."""
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
        """Bytes in front of the payloads."""
        if self.device.type != "cpu":
            return 0
        sizes = payload_sizes.head_nbytes(len(contents.numels)) if self._varies else 0
        return HEADER_NBYTES + sizes

    def _check(self, arrived: Parcel, src: int) -> None:
        """Hold the header against what was expected, and cut the message to its length.

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
            arrived.nbytes = payload_sizes.read_head(arrived.message[HEADER_NBYTES:], count)
            arrived.message = arrived.message[: arrived.head + sum(arrived.nbytes)]


def _told(contents: Contents) -> tuple[torch.dtype, int]:
    """What a header says of ``contents``: fp64, which no codec takes, as pairs of fp32 words."""
    if contents.dtype == torch.float64:
        return torch.float32, 2 * contents.numel
    return contents.dtype, contents.numel
