"""Send and receive one encoded tensor, with a header that describes its payload.

DeepSpeed's pipeline may receive into a buffer of another dtype, so the message must state its
dtype. A 32-byte header is sent first as a separate message; it gives the length of the payload.

Over NCCL the sending stream continues while the message is sent. The payload is kept until the next
send, or until ``finish_sends`` at the end of a step: either makes the stream wait for the message
before the payload's memory is reused. So at most one payload is held, as if each send were waited
for. Over gloo the host waits for each send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.wire import payload_sizes, transport
from hybridcomp.collectives.wire.encoding import POOL, EncodeRequest, check_values, encode_sum
from hybridcomp.collectives.wire.group import Transfer
from hybridcomp.collectives.wire.handle import Pending, Steps
from hybridcomp.collectives.wire.headers import (
    HEADER_NBYTES,
    UNREAD,
    Header,
    check_match,
    spec_digest,
)
from hybridcomp.errors import CodecError

_SIZE_AT = slice(16, 24)  # bytes of the header that give the size of the payload
#: limit on the bytes of a payload of another codec or shape, received only to report the error:
#: this many times the bytes of the expected values, plus a spare
MOST_TIMES, SPARE_NBYTES = 16, 4096


@lru_cache(maxsize=1024)
def _packed(header: Header, device: torch.device) -> Tensor:
    # cached: a pipeline sends the same few shapes again and again, and copying to a GPU takes time
    return torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8).to(device)


@dataclass
class Leaving:
    """Message sent over NCCL for which no stream has waited yet, with its tensors."""

    works: Sequence[Work] = ()
    tensors: list[Tensor] = field(default_factory=list)

    def finish(self) -> Steps[None]:
        """Wait for the message on the current stream; then its memory may be reused."""
        works, self.works = self.works, ()
        tensors, self.tensors = self.tensors, []
        yield from works
        POOL.give(*tensors)


#: the last message that this process sent over NCCL
LEAVING = Leaving()


def finish_sends() -> None:
    """Make the current stream wait for the last sent message, and free the message's payload."""
    for work in LEAVING.finish():
        work.wait()


def send(tensor: Tensor, dst: int, via: Transfer) -> None:
    """Send ``tensor`` to the global rank ``dst``, which calls ``recv``.

    ``tensor`` may be written again when this returns, by the current stream.

    Args:
        tensor: 1-D contiguous fp32/bf16/fp16.
        dst: global rank, member of the group.
        via: codec, the same on both sides, group and meter; this side counts the bytes.

    Raises CodecError on other tensors.
    """
    tensor = tensor.detach()
    check_values("tensor", tensor)
    Pending(_send(tensor, dst, via), via.meter, async_op=False)


def _send(tensor: Tensor, dst: int, via: Transfer) -> Steps[None]:
    group, meter, works = via.group, via.meter, list[Work]()
    # whether the stream waits for the message later, so that the host need not wait now
    leaves = tensor.is_cuda and group.backends.get("cuda") != "gloo"
    if leaves:
        yield from LEAVING.finish()
    (codec,) = via.codec.split_error_budget(1, 1, result=tensor.dtype)
    meter.used[codec.spec] = None
    payload = POOL.take(codec.wire_nbytes(tensor.numel(), tensor.dtype), tensor.device)
    late = payload_sizes.SIZES.stay(codec, tensor.device) and tensor.numel() > 0
    word = payload.new_empty(1, dtype=torch.int64) if late else None
    with meter.coding():
        request, dtype = EncodeRequest(tensor), tensor.dtype
        used = encode_sum(codec, request, payload, dtype, word) if tensor.numel() else 0
    header = Header(spec_digest(codec.spec), tensor.dtype, tensor.numel(), used)
    packed, arrival = _packed(header, tensor.device), None
    if word is not None:
        packed, arrival = packed.clone(), payload_sizes.SIZES.copied(word)
        packed[_SIZE_AT].copy_(word.view(torch.uint8))
    works.append(transport.send(packed, dst, group, meter))
    if not leaves:
        yield works.pop()
    if arrival is not None:  # the receiver already has the header
        yield arrival
        (used,) = arrival.sizes()
    if used:
        works.append(transport.send(payload[:used], dst, group, meter))
    if leaves:
        LEAVING.works, LEAVING.tensors = works, [payload, packed]
        return
    yield from works
    POOL.give(payload)


def recv(tensor: Tensor, src: int, via: Transfer) -> None:
    """Receive into ``tensor`` from the global rank ``src``, which calls ``send``; blocking.

    Decodes to the sender's dtype, then casts into ``tensor`` if its dtype differs. An error bound
    holds before this cast, which adds its rounding. On a GPU the host waits for the header, which
    gives the length of the payload. For codecs of fixed size the host waits only once for each
    source, length and dtype; ``check_headers`` compares later headers.

    Args:
        tensor: 1-D contiguous fp32/bf16/fp16 of as many elements as were sent.
        src: global rank, member of the group.
        via: codec, group and meter; the meter counts times, no bytes.

    Raises CodecError, naming both sides, if codec or length differ. It first receives the payload,
    so that the sender does not hang.
    """
    tensor = tensor.detach()
    check_values("tensor", tensor)
    Pending(_recv(tensor, src, via), via.meter, async_op=False)


def _recv(tensor: Tensor, src: int, via: Transfer) -> Steps[None]:
    codec, group, meter = via.codec, via.group, via.meter
    packed = torch.empty(HEADER_NBYTES, dtype=torch.uint8, device=tensor.device)
    works = [transport.recv(packed, src, group)]
    kind = (src, tensor.numel(), tensor.dtype, codec.spec)
    later = UNREAD.looks_later(kind, tensor.device)
    header = expected = _expected(codec, tensor)
    if not later:
        yield works.pop()
        header = Header.unpack(bytes(packed.tolist()))
        _check_length(header, tensor.numel(), tensor.dtype, src, codec)
    (codec,) = codec.split_error_budget(1, 1, result=header.dtype)
    meter.used[codec.spec] = None
    payload = POOL.take(header.nbytes, tensor.device)
    if header.nbytes:
        works.append(transport.recv(payload[: header.nbytes], src, group))
    yield from works
    if later:
        UNREAD.add(packed, partial(_compare, codec, src, expected))
    else:
        check_match(header, src, tensor.numel(), tensor.dtype, codec.spec)
        if codec.fixed_size and header == expected:
            UNREAD.kinds.add(kind)
    if header.nbytes:
        with meter.coding():
            if header.dtype == tensor.dtype:
                codec.decode(payload[: header.nbytes], tensor)
            else:
                decoded = tensor.new_empty(tensor.numel(), dtype=header.dtype)
                codec.decode(payload[: header.nbytes], decoded)
                tensor.copy_(decoded)
    POOL.give(payload)


def _expected(codec: Codec, tensor: Tensor) -> Header:
    """Return the header of a payload of fixed size that fills ``tensor``."""
    (codec,) = codec.split_error_budget(1, 1, result=tensor.dtype)
    nbytes = codec.wire_nbytes(tensor.numel(), tensor.dtype)
    return Header(spec_digest(codec.spec), tensor.dtype, tensor.numel(), nbytes)


def _check_length(header: Header, numel: int, dtype: torch.dtype, src: int, codec: Codec) -> None:
    """Raise CodecError for an impossibly long payload, before memory is allocated for it.

    A shorter payload is received even if codec or shape differ; ``check_match`` then raises.
    """
    (codec,) = codec.split_error_budget(1, 1, result=header.dtype)
    if (header.spec_digest, header.numel) == (spec_digest(codec.spec), numel):
        largest = codec.wire_nbytes(numel, header.dtype)
        payload_sizes.check_size(codec, f"rank {src}", header.nbytes, largest)
    elif header.nbytes > MOST_TIMES * numel * dtype.itemsize + SPARE_NBYTES:
        check_match(header, src, numel, dtype, codec.spec)


def _compare(codec: Codec, src: int, expected: Header, data: bytes) -> None:
    """Raise CodecError unless ``data`` is the expected header."""
    header = Header.unpack(data)
    check_match(header, src, expected.numel, expected.dtype, codec.spec)
    if header != expected:
        raise CodecError(
            f"rank {src} sent {header.dtype} in {header.nbytes} bytes where rank {dist.get_rank()} "
            f"had so far received {expected.dtype} in {expected.nbytes} bytes: messages of one "
            "length between two ranks must keep their dtype"
        )
