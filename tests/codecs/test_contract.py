"""Contract of every codec (codecs/base.py), on buffers that end at an unreadable page."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridcomp.codecs import (
    CODECS,
    VALUE_DTYPES,
    BlockInt,
    Codec,
    Radix,
    make_codec,
    testing,
)
from hybridcomp.errors import CodecError
from tests.codecs import arrays, guarded
from tests.selection import by_day
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
often = arrays.often(75)


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
def test_any_message_keeps_the_contract(values: Tensor, codec: Codec) -> None:
    testing.check_message(codec, guarded.copy(values))


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


@pytest.mark.parametrize("codec", by_day(ALL, DAY), ids=str)
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


def test_specs_identify_codecs() -> None:
    assert len(set(ALL)) == len({repr(codec) for codec in ALL}) == len(ALL)
    assert all(CODECS[codec.name] is type(codec) for codec in ALL)


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


REFUSED: list[tuple[str, Mapping[str, object], str]] = [
    ("zstd", {}, "unknown codec 'zstd'.*blockint"),
    ("blockint", {"level": 3}, "level"),
    *(("blockint", {"bits": bits}, "bits") for bits in (1, 9, 4.0, True, "8", None)),
    ("blockint", {"bits": 5, "rotate": True}, "rotate.*4 bits and fewer"),
    ("blockint", {"bits": 4, "rotate": 1}, "rotate must be true or false"),
    ("blockint", {"bits": 3, "levels": "gaussian"}, "levels gaussian.*4 bits"),
    ("blockint", {"bits": 8, "levels": "lloyd"}, "levels lloyd are 15, for 4 bits and not 8"),
    ("blockint", {"bits": 4, "levels": "normal"}, "levels must be one of"),
    ("blockint", {"rounding": "up"}, "rounding must be one of"),
    *(
        ("blockint", {"bits": 4, "levels": levels, "rounding": "random"}, f"levels {levels}; remo")
        for levels in ("gaussian", "lloyd")
    ),
    ("fp8", {"format": "e3m4"}, "format"),
    *(("mpc", {"dim": dim}, "dim") for dim in (0, 33, 1.0, True, "1")),
    *(("zfp", {"rate": rate}, "rate") for rate in (2.25, 32.5, math.nan, "8", True)),
    *(("radix", {"error_bound": e}, "error_bound") for e in (0.0, -1.0, 1.0, math.nan, True, "1")),
    ("radix", {"error_bound": math.inf, "mode": "abs"}, "error_bound"),
    *(("radix", {"segment": segment}, "segment") for segment in (48, 8192, 100, 64.0)),
    ("radix", {"mode": "relative"}, "mode"),
]


@pytest.mark.parametrize(("name", "given", "words"), REFUSED, ids=str)
def test_wrong_settings_are_refused(name: str, given: Mapping[str, object], words: str) -> None:
    with pytest.raises(CodecError, match=words):
        make_codec(name, **given)


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
@pytest.mark.parametrize("codec", by_day(ALL, DAY), ids=str)
def test_a_payload_may_begin_at_any_byte(codec: Codec, dtype: torch.dtype) -> None:
    """On a CPU; a GPU requires a multiple of 16. Values begin anywhere as well."""
    values = arrays.make("outliers", 3008, 5, dtype)[5:-2]
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
        whole, added = torch.zeros(len(values) + 8, dtype=dtype), torch.ones(values.numel())
        found = whole[5:-3]
        codec.decode(shifted, found)
        assert not whole[:5].any() and not whole[-3:].any()
        codec.decode_add(shifted, added, dtype)
        assert torch.equal(arrays.bits_of(found), arrays.bits_of(expected))
        assert torch.equal(arrays.bits_of(added), arrays.bits_of(total))
