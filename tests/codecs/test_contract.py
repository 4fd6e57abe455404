"""Contract of every codec (codecs/base.py), on buffers that end at an unreadable page."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridcomp.codecs import (
    CODECS,
    PAYLOAD_ALIGN,
    VALUE_DTYPES,
    BlockInt,
    Codec,
    Radix,
    make_codec,
    testing,
)
from hybridcomp.errors import CodecError
from tests.codecs import arrays, guarded
from tests.selection import VARIABLE, by_day
from tests.stand_ins.plain_codecs import Identity

ALL: list[Codec] = [
    make_codec("bf16"),
    make_codec("fp16"),
    make_codec("fp8", format="e4m3"),
    make_codec("fp8", format="e5m2"),
    *(make_codec("blockint", bits=bits) for bits in range(2, 9)),
    *(make_codec("blockint", bits=bits, rotate=True) for bits in (2, 3, 4)),
    *(
        make_codec("blockint", bits=4, rotate=rotate, levels=levels)
        for rotate in (False, True)
        for levels in ("gaussian", "lloyd")
    ),
    *(make_codec("blockint", bits=bits, rounding="random") for bits in range(2, 9)),
    make_codec("blockint", bits=3, rotate=True, rounding="random"),
    *(make_codec("zfp", rate=rate) for rate in (2.5, 4, 8, 9, 9.25, 13.75, 16, 24, 32)),
    make_codec("powersgd", rank=2),
    make_codec("mpc", dim=1),
    make_codec("mpc", dim=3),
    make_codec("expcode"),
    make_codec("topk"),
    make_codec("topk", bits=5, density=0.2),
    make_codec("radix"),
    make_codec("radix", error_bound=1e-3, segment=256),
    make_codec("radix", error_bound=1e-5, mode="abs"),
]
#: one codec for each kind of arithmetic
DAY: list[Codec] = [
    make_codec("bf16"),
    make_codec("fp8", format="e4m3"),
    make_codec("blockint", bits=4),
    make_codec("blockint", bits=3, rotate=True),
    make_codec("blockint", bits=4, rounding="random"),
    make_codec("blockint", bits=4, rotate=True, levels="gaussian"),
    make_codec("blockint", bits=4, levels="lloyd"),
    make_codec("zfp", rate=9.25),
    make_codec("powersgd", rank=2),
    *ALL[-8:],
]
LOSSY = [codec for codec in ALL if not codec.lossless]
#: number of aligned values that share a scale, so that their absmax bounds each one's error
BOUND_BLOCK = {"fp8": 4096, "blockint": 1024, "zfp": 4, "topk": 4096}
#: number of aligned values that a NaN or Inf may spoil
NAN_BLOCK = {"blockint": 32, "zfp": 4, "topk": 4096}

codecs = st.sampled_from(ALL)
often = settings(max_examples=300 if os.environ.get(VARIABLE) == "1" else 100)


def bound_block(codec: Codec) -> int:
    return codec.segment if isinstance(codec, Radix) else BOUND_BLOCK.get(codec.name, 1)


def nan_block(codec: Codec) -> int:
    rotated = isinstance(codec, BlockInt) and codec.rotate
    return 64 if rotated else NAN_BLOCK.get(codec.name, 1)


def encoded(codec: Codec, values: Tensor) -> Tensor:
    """Return the payload, encoded from guarded values into a guarded buffer."""
    room = guarded.empty(codec.wire_nbytes(values.numel(), values.dtype))
    return room[: codec.encode(guarded.copy(values), room)]


def decoded(codec: Codec, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    out = guarded.empty(numel * dtype.itemsize, dtype)
    codec.decode(guarded.copy(payload), out)
    return out


def any_in_block(flags: Tensor, block: int) -> Tensor:
    """Return for each element whether any of its aligned block has the flag."""
    whole = torch.zeros(-(-flags.numel() // block) * block, dtype=torch.bool)
    whole[: flags.numel()] = flags
    spread = whole.view(-1, block).any(dim=1, keepdim=True).expand(-1, block)
    return spread.reshape(-1)[: flags.numel()]


@given(values=arrays.tensors(), codec=codecs)
@often
def test_sizes_and_reproducible_bytes(values: Tensor, codec: Codec) -> None:
    nbytes = codec.wire_nbytes(values.numel(), values.dtype)
    payload = encoded(codec, values)
    assert payload.numel() % PAYLOAD_ALIGN == 0
    assert payload.numel() == nbytes if codec.fixed_size else payload.numel() <= nbytes
    assert nbytes == 0 if values.numel() == 0 else nbytes > 0
    # again into dirty memory: every byte is written, none beyond
    room = torch.full((nbytes + 64,), 0x3C, dtype=torch.uint8)
    assert codec.encode(values, room) == payload.numel()
    assert torch.equal(room[: payload.numel()], payload)
    assert (room[nbytes:] == 0x3C).all()


@given(values=arrays.tensors(), codec=codecs, extra=st.integers(1, 200))
@often
def test_what_lies_behind_a_payload_changes_nothing(
    values: Tensor, codec: Codec, extra: int
) -> None:
    """A decoder may get a whole slot if only a device knows its used size."""
    payload, numel = encoded(codec, values), values.numel()
    noise = torch.randint(0, 256, (extra,), dtype=torch.uint8)
    longer = torch.cat([payload, noise])
    right, wrong = (decoded(codec, given, numel, values.dtype) for given in (payload, longer))
    assert torch.equal(arrays.bits_of(right), arrays.bits_of(wrong))
    sums = [torch.linspace(-1, 1, numel) for _ in range(2)]
    codec.decode_add(guarded.copy(payload), sums[0], values.dtype)
    codec.decode_add(guarded.copy(longer), sums[1], values.dtype)
    assert torch.equal(arrays.bits_of(sums[0]), arrays.bits_of(sums[1]))


@given(values=arrays.tensors(), codec=codecs)
@often
def test_element_bound(values: Tensor, codec: Codec) -> None:
    out = decoded(codec, encoded(codec, values), values.numel(), values.dtype)
    if codec.lossless:
        assert torch.equal(arrays.bits_of(out), arrays.bits_of(values))
        assert codec.element_bound(1.0, values.dtype) == 0.0
        return
    result = decoded(codec, encoded(codec, values), values.numel(), torch.float32).double()
    exact, block = values.double(), bound_block(codec)
    good = ~any_in_block(~exact.isfinite(), nan_block(codec))
    for start in range(0, values.numel(), block):
        here = slice(start, start + block)
        finite = exact[here][exact[here].isfinite()].abs()
        bound = codec.element_bound(float(finite.max()) if len(finite) else 0.0, values.dtype)
        error = (result - exact)[here][good[here]].abs()
        assert math.isfinite(bound) and (error <= bound).all(), (start, error.max(), bound)


@given(values=arrays.tensors(), codec=codecs)
@often
def test_non_finite_stays_and_does_not_spread(values: Tensor, codec: Codec) -> None:
    out = decoded(codec, encoded(codec, values), values.numel(), values.dtype)
    bad = ~values.isfinite()
    assert not out[bad].isfinite().any()
    assert out[~any_in_block(bad, nan_block(codec))].isfinite().all()


@given(values=arrays.tensors(), codec=codecs, seed=st.integers(0, 99))
@often
def test_decode_add_is_decode_and_add(values: Tensor, codec: Codec, seed: int) -> None:
    payload = encoded(codec, values)
    # a lossy codec decodes to fp32 without rounding to the values' dtype
    dtype = values.dtype if codec.lossless else torch.float32
    start = arrays.make("normal", values.numel(), seed)
    total = guarded.copy(start)
    codec.decode_add(guarded.copy(payload), total, values.dtype)
    expected = start + decoded(codec, payload, values.numel(), dtype).float()
    np.testing.assert_array_equal(total.numpy(), expected.numpy())


@given(values=arrays.tensors(), codec=st.sampled_from(LOSSY), target=st.sampled_from(VALUE_DTYPES))
@often
def test_decoding_narrows_the_fp32_result(
    values: Tensor, codec: Codec, target: torch.dtype
) -> None:
    payload = encoded(codec, values)
    wide = decoded(codec, payload, values.numel(), torch.float32)
    limit = torch.finfo(target).max
    expected = torch.where(wide.isfinite(), wide.clamp(-limit, limit), wide).to(target)
    out = decoded(codec, payload, values.numel(), target)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("codec", by_day(ALL, DAY), ids=str)
def test_bytes_do_not_depend_on_threads(codec: Codec) -> None:
    threads = torch.get_num_threads()
    values = arrays.make("outliers", 300_001, seed=5)
    values[::1000] = float("nan")
    try:
        torch.set_num_threads(1)
        payload = encoded(codec, values)
        single = decoded(codec, payload, values.numel(), torch.float32)
        for count in (2, 3, 4):
            torch.set_num_threads(count)
            assert torch.equal(encoded(codec, values), payload)
            several = decoded(codec, payload, values.numel(), torch.float32)
            assert torch.equal(arrays.bits_of(several), arrays.bits_of(single))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("codec", ALL, ids=str)
def test_views_at_any_offset(codec: Codec) -> None:
    values = arrays.make("normal", 3000, seed=2)
    payload = encoded(codec, values[5:2900])
    room = torch.zeros(payload.numel() + 1, dtype=torch.uint8)
    room[1:] = payload
    out = torch.zeros(3000)
    codec.decode(room[1:], out[5:2900])
    assert torch.equal(out[5:2900], decoded(codec, payload, 2895, torch.float32))
    assert not out[:5].any() and not out[2900:].any()


@given(
    seed=st.integers(0, 2**31), numel=st.integers(1, 3000), codec=codecs,
    dtype=st.sampled_from(VALUE_DTYPES), header=st.booleans(),
)  # fmt: skip
@often
def test_any_bytes_decode_or_raise(
    seed: int, numel: int, codec: Codec, dtype: torch.dtype, header: bool
) -> None:
    """Corrupt payloads give garbage or CodecError; guard pages catch accesses beyond the end."""
    noise = np.random.default_rng(seed).integers(0, 256, codec.wire_nbytes(numel, dtype), np.uint8)
    payload = torch.from_numpy(noise)
    if header:  # a valid beginning leads a variable-size decoder further
        payload[:8] = encoded(codec, arrays.make("normal", numel, seed, dtype))[:8]
    out = guarded.empty(numel * dtype.itemsize, dtype)
    total = guarded.copy(torch.zeros(numel))
    try:
        codec.decode(guarded.copy(payload), out)
        codec.decode_add(guarded.copy(payload), total, dtype)
    except CodecError:
        assert not codec.fixed_size


@pytest.mark.parametrize("codec", ALL, ids=str)
def test_wrong_tensors_are_refused(codec: Codec) -> None:
    values, room = torch.randn(100), torch.empty(1000, dtype=torch.uint8)
    payload = room[: codec.encode(values, room)]
    with pytest.raises(CodecError, match="too short"):
        codec.encode(values, torch.empty(8, dtype=torch.uint8))
    with pytest.raises(CodecError, match="too short"):
        codec.decode(payload[:8], values)
    with pytest.raises(CodecError, match="too short"):
        codec.decode_add(payload[:8], values, torch.float32)
    for bad in (torch.randn(100, dtype=torch.float64), torch.ones(100, dtype=torch.int32)):
        with pytest.raises(CodecError, match="dtype"):
            codec.encode(bad, room)
        with pytest.raises(CodecError, match="dtype"):
            codec.decode(payload, bad)
        with pytest.raises(CodecError, match="dtype"):
            codec.wire_nbytes(100, bad.dtype)
    with pytest.raises(CodecError, match="uint8"):
        codec.decode(payload.view(torch.int8), values)
    with pytest.raises(CodecError, match="1-D and contiguous"):
        codec.encode(torch.randn(10, 10), room)
    with pytest.raises(CodecError, match="1-D and contiguous"):
        codec.decode(payload, torch.empty(200)[::2])
    with pytest.raises(CodecError, match="float32"):
        codec.decode_add(payload, torch.empty(100, dtype=torch.bfloat16), torch.bfloat16)


@pytest.mark.parametrize("codec", ALL, ids=str)
def test_specs_identify_codecs(codec: Codec) -> None:
    assert [other for other in ALL if other == codec] == [codec]
    assert repr(codec) == codec.spec and codec.spec.startswith(codec.name)
    assert CODECS[codec.name] is type(codec)


@pytest.mark.parametrize("codec", by_day(ALL, DAY), ids=str)
def test_what_other_packages_check_theirs_with(codec: Codec) -> None:
    testing.check(codec)


class _Careless(Identity):
    """Codec that claims to be lossless but drops the sign of zero."""

    name = "careless"

    @property
    def spec(self) -> str:
        return "careless"

    def encode(self, values: Tensor, out: Tensor) -> int:
        return super().encode(values + 0.0, out)


def test_a_promise_that_is_broken_is_named() -> None:
    with pytest.raises(AssertionError, match=r"identity\(\) encodes float64 without a CodecError"):
        testing.check(Identity())
    values = torch.tensor([-0.0, 1.0])
    with pytest.raises(AssertionError, match="lossless, and decodes other bits"):
        testing.check_message(_Careless(), values)
    testing.check_message(Identity(), values)


def test_make_codec_refuses_what_it_does_not_know() -> None:
    with pytest.raises(CodecError, match="unknown codec 'zstd'.*blockint"):
        make_codec("zstd")
    with pytest.raises(CodecError, match="level"):
        make_codec("blockint", level=3)


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
@pytest.mark.parametrize("codec", ALL, ids=str)
def test_a_payload_may_begin_at_any_byte(codec: Codec, dtype: torch.dtype) -> None:
    """On a CPU; a GPU requires a multiple of 16."""
    values = arrays.make("outliers", 3001, 5, dtype)
    room = torch.empty(codec.wire_nbytes(values.numel(), dtype), dtype=torch.uint8)
    payload = room[: codec.encode(values, room)]
    expected, total = torch.empty_like(values), torch.ones(values.numel())
    codec.decode(payload, expected)
    codec.decode_add(payload, total, dtype)
    for offset in (1, 2, 6, 15):
        buffer = torch.empty(len(room) + 32, dtype=torch.uint8)
        shifted = buffer[(offset - buffer.data_ptr()) % 16 :]
        used = codec.encode(values, shifted)
        shifted = shifted[:used]
        assert torch.equal(shifted, payload)
        found, added = torch.empty_like(values), torch.ones(values.numel())
        codec.decode(shifted, found)
        codec.decode_add(shifted, added, dtype)
        assert torch.equal(arrays.bits_of(found), arrays.bits_of(expected))
        assert torch.equal(arrays.bits_of(added), arrays.bits_of(total))
