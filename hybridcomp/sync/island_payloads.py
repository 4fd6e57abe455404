"""Serialize messages between separate jobs: values and state, as self-describing bytes.

A line before the values states their encoding and, with ``outlier``, the sender's sum of squares,
since receivers on different hardware would compute it with different bits. Encodings may differ
between islands: an island that has just started may still send natively (``start_step``), and a
guard trips in a single island.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybridcomp.channels import Channel
from hybridcomp.codecs.base import Codec
from hybridcomp.errors import CodecError

#: number of ranks for which a codec is chosen, whatever number of islands receives the message
ENDS = 2
NATIVE = "none"


def pack(channel: Channel, values: Tensor) -> bytes:
    """Encode ``values`` (1-D, contiguous) to bytes as the block says; record the message."""
    codec = channel.choose(values.numel(), values.dtype, ENDS, "forward")
    if codec is None:
        channel.count_native(values.nbytes)
        return _line(channel, NATIVE, values) + _bytes(values)
    codec, meter = _whole(codec, values.dtype), channel.meter(values.device)
    channel.sample(values, codec, "forward")
    with meter.coding():
        room = codec.wire_nbytes(values.numel(), values.dtype)
        buffer = torch.empty(room, dtype=torch.uint8, device=values.device)
        buffer = buffer[: codec.encode(values, buffer)]
    line = _line(channel, codec.spec, values)
    meter.used[codec.spec] = None
    meter.sent(len(line) + buffer.numel())
    channel.record(meter, values.nbytes, "forward", 1.0)
    return line + _bytes(buffer)


def unpack(channel: Channel, data: bytes | bytearray, out: Tensor) -> float:
    """Decode ``data`` into ``out``; return the sender's sum of squares, or 0 if there is none.

    Raises CodecError if the message does not fit ``out``.
    """
    line, _, rest = bytes(data).partition(b"\n")
    try:
        spec, dtype, numel, square = json.loads(line)
    except (TypeError, ValueError):
        raise CodecError(f"a message of another island is damaged: {line[:60]!r}") from None
    if (dtype, numel) != (str(out.dtype), out.numel()):
        raise CodecError(
            f"another island sent {numel} values of {dtype}, and {out.numel()} of {out.dtype} were "
            "expected; start all with the same model and version"
        )
    payload = torch.frombuffer(bytearray(rest), dtype=torch.uint8) if rest else out.new_empty(0)
    if spec == NATIVE:
        out.copy_(payload.view(out.dtype))
        return float(square)
    codec = channel.state.policy.codecs.get(("sync", "forward"))
    if codec is not None:
        codec = _whole(codec.for_message(out.numel(), out.dtype, ENDS), out.dtype)
    if codec is None or codec.spec != spec:
        raise CodecError(
            f"another island encoded with {spec}, and this one has {codec and codec.spec}; start "
            "all with the same block"
        )
    codec.decode(payload.to(out.device), out)
    return float(square)


def pack_state(state: Mapping[str, Any]) -> memoryview:
    """Return plain types and CPU tensors as bytes."""
    file = io.BytesIO()
    torch.save(dict(state), file)
    return file.getbuffer()


def unpack_state(data: bytes | bytearray) -> dict[str, Any]:
    """Return the packed state, to be checked by ``take_state``. Raises CodecError if damaged."""
    try:
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise CodecError(f"the state that another island gave is damaged: {first}") from error
    if not isinstance(found, dict):
        raise CodecError(f"another island gave a {type(found).__name__} in the place of its state")
    return found


def _whole(codec: Codec, dtype: torch.dtype) -> Codec:
    """Return ``codec`` with the whole error budget, since a message is quantized only once."""
    (only,) = codec.split_error_budget(1, 1, result=dtype)
    return only


def _line(channel: Channel, spec: str, values: Tensor) -> bytes:
    square = 0.0
    if channel.state.config.sync.outlier is not None:
        square = float(torch.linalg.vector_norm(values, dtype=torch.float64).square())
    return json.dumps([spec, str(values.dtype), values.numel(), square]).encode() + b"\n"


def _bytes(values: Tensor) -> bytes:
    return values.detach().cpu().view(torch.uint8).numpy().tobytes()
