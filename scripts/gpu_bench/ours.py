"""Our codecs, as work to time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hybridcomp.codecs import BlockInt, Codec, make_codec
from hybridcomp.kernels import DTYPE_CODES, kernels_of

from gpu_bench.measure import Work

#: ranks of the sum that is encoded again
RANKS = 8


def codecs() -> list[Codec]:
    """What the table has a row for."""
    return [
        make_codec("blockint", bits=8),
        make_codec("blockint", bits=4),
        make_codec("fp8"),
        make_codec("bf16"),
        make_codec("zfp", rate=8),
        make_codec("zfp", rate=16),
        make_codec("mpc"),
        make_codec("expcode"),
        make_codec("radix", error_bound=1e-2),
        make_codec("radix", error_bound=1e-3),
    ]


def works(values: Tensor) -> Iterator[Work]:
    """Encode, decode and decode-add of every codec; the fused sum of blockint."""
    raw = values.nbytes
    for codec in codecs():
        room = values.new_empty(codec.wire_nbytes(values.numel(), values.dtype), dtype=torch.uint8)
        used = codec.encode(values, room)
        payload, out = room[:used], torch.empty_like(values)
        total = values.new_zeros(values.numel(), dtype=torch.float32)
        note = "" if codec.fixed_size else "encode waits for its size"
        yield Work(codec.spec, "encode", raw + used, _encode(codec, values, room), note)
        yield Work(codec.spec, "decode", raw + used, _decode(codec, payload, out))
        yield Work(codec.spec, "decode_add", used + 2 * total.nbytes, _add(codec, payload, total, values.dtype))
        if isinstance(codec, BlockInt):
            yield _reduce(codec, values, payload)


def _encode(codec: Codec, values: Tensor, room: Tensor) -> object:
    return lambda: codec.encode(values, room)


def _decode(codec: Codec, payload: Tensor, out: Tensor) -> object:
    return lambda: codec.decode(payload, out)


def _add(codec: Codec, payload: Tensor, total: Tensor, dtype: torch.dtype) -> object:
    return lambda: codec.decode_add(payload, total, dtype)
