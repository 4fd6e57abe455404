"""Test that a codec, ours or another package's, satisfies the contract of ``codecs.base``.

A test of a codec calls ``check(codec)`` once for every setting that matters. ``check`` encodes
values of every kind and length, on the CPU unless ``device`` is set, and raises an AssertionError
that names the codec, the broken promise and the message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import get_args

import torch
from torch import Tensor

from hybridcomp.codecs.base import PAYLOAD_ALIGN, VALUE_DTYPES, Codec
from hybridcomp.codecs.budget import FLOOR, worst_ratio
from hybridcomp.errors import CodecError

LENGTHS = (0, 1, 2, 31, 33, 1000, 4097, 9001)
CPU = torch.device("cpu")
#: fills output buffers before a codec writes, so that unwritten bytes show
DIRT = 0xA5


def check(codec: Codec, device: torch.device = CPU) -> None:
    """Raise AssertionError unless ``codec`` keeps every promise on messages on ``device``."""
    check_names(codec)
    check_ladder(type(codec))
    check_refusals(codec, device)
    for what, values in messages(device):
        try:
            check_message(codec, values)
        except AssertionError as error:
            raise AssertionError(f"{codec.spec}, {what}: {error}") from error


def messages(device: torch.device = CPU) -> Iterator[tuple[str, Tensor]]:
    """Yield values of every kind, length and dtype, with a description."""
    for number, numel in enumerate(LENGTHS):
        for kind in ("normal", "zeros", "sparse", "wide", "outliers", "nonfinite"):
            generator = torch.Generator().manual_seed(number)
            wide = _made(kind, numel, generator)
            for dtype in VALUE_DTYPES:
                values = wide.to(dtype).to(device)
                yield f"{numel} {kind} values of {dtype}", values


def _made(kind: str, numel: int, generator: torch.Generator) -> Tensor:
    values = torch.randn(numel, generator=generator, dtype=torch.float32, device="cpu")
    chosen = torch.rand(numel, generator=generator, dtype=torch.float32, device="cpu")
    if kind == "zeros":
        return values.zero_()
    if kind == "sparse":
        return values.masked_fill_(chosen < 0.9, 0.0)
    if kind == "wide":
        return values.sign() * 10.0 ** (chosen * 60 - 35)
    if kind == "outliers":
        return torch.where(chosen < 0.05, values * 1e6, values)
    if kind == "nonfinite":
        values[::97] = math.nan
        values[50::301] = math.inf
        values[60::301] = -math.inf
    return values


def check_names(codec: Codec) -> None:
    """Check that ``spec`` names the codec and all its settings: equal specs mean equal bytes."""
    _require(codec.spec.startswith(codec.name), f"spec {codec.spec!r} begins with another name")
    if not codec.settings:
        return
    _require(codec == type(codec)(**settings_of(codec)), "its settings do not make it again")
    for setting in codec.settings:
        found = settings_of(codec)[setting.name]
        ends = [end for end in (setting.least, setting.most) if end is not None]
        tried = [True, False] if setting.type is bool else [*get_args(setting.type), *ends]
        for value in tried:
            one = int(value) if setting.type is int else value
            try:
                other = type(codec)(**{**settings_of(codec), setting.name: one})
            except CodecError:
                continue  # these settings exclude each other
            same = other.spec == codec.spec
            _require(same == (one == found), f"spec does not tell {setting.name}={one!r}")


def settings_of(codec: Codec) -> dict[str, object]:
    """Return the settings of ``codec``, each of which is an attribute of the same name."""
    return {setting.name: getattr(codec, setting.name) for setting in codec.settings}


def check_ladder(codec: type[Codec]) -> None:
    """Check a ladder: fixed sizes, one block size, and smaller errors for more bits."""
    ladder = codec.ladder()
    _require(all(rung.fixed_size for rung in ladder), "a ladder takes codecs of fixed size")
    _require(
        len({rung.block_size for rung in ladder}) < 2,
        "a ladder takes codecs of one block_size",
    )
    costs = [rung.bits_per_value(torch.float32) for rung in ladder]
    errors = [worst_ratio(rung, torch.float32, FLOOR) for rung in ladder]
    _require(costs == sorted(costs), "a ladder begins with the cheapest")
    _require(errors == sorted(errors, reverse=True), "a ladder ends with the smallest error")


def check_message(codec: Codec, values: Tensor) -> None:
    """Check one message: its sizes, bytes, values and sums."""
    payload = _check_encoding(codec, values)
    _check_decoding(codec, values, payload)
    _check_tail(codec, values, payload)
    _check_sum(codec, values, payload)


def _check_encoding(codec: Codec, values: Tensor) -> Tensor:
    nbytes = codec.wire_nbytes(values.numel(), values.dtype)
    _require(nbytes % PAYLOAD_ALIGN == 0, f"wire_nbytes {nbytes} is no multiple of 16")
    _require((nbytes > 0) == (values.numel() > 0), f"{nbytes} bytes for {values.numel()} values")
    dirts = (DIRT, 0x3C)
    rooms = [_bytes(nbytes + 64, values.device, dirt) for dirt in dirts]
    used = [codec.encode(values, room) for room in rooms]
    _require(used[0] == used[1], "encoded a second time it has another size")
    fits = used[0] == nbytes if codec.fixed_size else used[0] <= nbytes
    _require(fits and used[0] % PAYLOAD_ALIGN == 0, f"{used[0]} bytes used, wire_nbytes {nbytes}")
    payload = rooms[0][: used[0]]
    _require(torch.equal(payload, rooms[1][: used[0]]), "not every byte of the payload is written")
    beyond = [
        bool((room[nbytes:] == dirt).all()) for room, dirt in zip(rooms, (DIRT, 0x3C), strict=True)
    ]
    _require(all(beyond), "it writes behind wire_nbytes")
    sizes = torch.full((3,), -7, device=values.device)
    codec.encode_into(values, _bytes(nbytes, values.device), sizes[1:2])
    _require(sizes.tolist() == [-7, used[0], -7], f"encode_into stores {sizes.tolist()}")
    return payload


def _check_decoding(codec: Codec, values: Tensor, payload: Tensor) -> None:
    out = _decoded(codec, payload, values.numel(), values.dtype)
    bad = ~values.isfinite()
    _require(not bool(out[bad].isfinite().any()), "NaN or Inf became finite")
    if codec.lossless:
        same = torch.equal(out.view(torch.uint8), values.view(torch.uint8))
        _require(same, "it is lossless, and decodes other bits")
        _require(codec.element_bound(1.0, values.dtype) == 0.0, "lossless with an element_bound")
        return
    block = max(codec.block_size, codec.segment)
    wide = _decoded(codec, payload, values.numel(), torch.float32)
    # padding repeats a value of the last block, so it does not change the block's maximum or error
    exact = _blocks(values.double(), block)
    tops = exact.abs().amax(1).tolist()
    errors = (_blocks(wide.double(), block) - exact).abs().amax(1).tolist()
    for number, (top, error) in enumerate(zip(tops, errors, strict=True)):
        if not math.isfinite(top):
            continue
        bound = codec.element_bound(top, values.dtype)
        _require(
            error <= bound,
            f"from value {number * block} on off by {error:g}, element_bound {bound:g} of the "
            f"largest of its block (block_size {codec.block_size})",
        )


def _blocks(values: Tensor, block: int) -> Tensor:
    """Return ``[blocks, block]``, the last block filled up with the last value."""
    missing = -values.numel() % block
    return torch.cat([values, values[-1:].expand(missing)]).view(-1, block)


def _check_tail(codec: Codec, values: Tensor, payload: Tensor) -> None:
    out = _decoded(codec, payload, values.numel(), values.dtype)
    longer = torch.cat([payload, _bytes(100, values.device)])
    again = _decoded(codec, longer, values.numel(), values.dtype)
    same = torch.equal(out.view(torch.uint8), again.view(torch.uint8))
    _require(same, "what lies behind a payload changes what is decoded")


def _check_sum(codec: Codec, values: Tensor, payload: Tensor) -> None:
    start = torch.linspace(-1, 1, values.numel(), device=values.device, dtype=torch.float32)
    total = start.clone()
    codec.decode_add(payload, total, values.dtype)
    dtype = values.dtype if codec.lossless else torch.float32
    expected = start + _decoded(codec, payload, values.numel(), dtype).float()
    same = torch.equal(total.nan_to_num(7.0, 8.0, 9.0), expected.nan_to_num(7.0, 8.0, 9.0))
    _require(same, "decode_add is not decode and add")


def check_refusals(codec: Codec, device: torch.device = CPU) -> None:
    """Check that tensors that cannot be encoded or decoded raise a CodecError."""
    values, room = torch.ones(100, device=device, dtype=torch.float32), _bytes(4096, device)
    payload = room[: codec.encode(values, room)]
    wrong = torch.ones(100, dtype=torch.float64, device=device)
    narrow = torch.ones(100, dtype=torch.bfloat16, device=device)
    calls: dict[str, Callable[[], object]] = {
        "encodes float64": lambda: codec.encode(wrong, room),
        "sizes float64": lambda: codec.wire_nbytes(100, torch.float64),
        "decodes to float64": lambda: codec.decode(payload, wrong),
        "encodes into too few bytes": lambda: codec.encode(values, room[:8]),
        "decodes from too few bytes": lambda: codec.decode(payload[:8], values),
        "adds to bfloat16": lambda: codec.decode_add(payload, narrow, torch.float32),
        "encodes two dimensions": lambda: codec.encode(values.view(10, 10), room),
    }
    for what, call in calls.items():
        try:
            call()
        except CodecError:
            continue
        raise AssertionError(f"{codec.spec} {what} without a CodecError")


def _decoded(codec: Codec, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    out = torch.full((numel,), 3.0, dtype=dtype, device=payload.device)
    codec.decode(payload, out)
    return out


def _bytes(numel: int, device: torch.device, value: int = DIRT) -> Tensor:
    return torch.full((numel,), value, dtype=torch.uint8, device=device)


def _require(kept: bool, message: str) -> None:
    if not kept:
        raise AssertionError(message)
