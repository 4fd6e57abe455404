"""stepcode: exact for every pair of bit patterns, close to the entropy; damage is rejected."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridcomp.codecs import StepCode
from hybridcomp.errors import CodecError
from hybridcomp.kernels import DTYPE_CODES, KernelSet
from tests.codecs import arrays, guarded, stepcode_reference

DTYPES = (torch.bfloat16, torch.float16)
CHANGES = tuple(stepcode_reference.CHANGES)
CODEC = StepCode()
KERNELS: Any = CODEC.kernels.on(torch.device("cpu"))
LIMITS: Any = KernelSet[Any]("instructions").on(torch.device("cpu"))
#: instruction sets of the loops, the best first
WAYS = ("avx512", "avx2", "plain")

pairs = st.builds(
    stepcode_reference.pair,
    st.sampled_from(tuple(arrays.KINDS)),
    st.sampled_from(CHANGES),
    st.one_of(st.sampled_from(arrays.LENGTHS), st.integers(0, 1100)),
    st.integers(0, 2**31),
    st.sampled_from(DTYPES),
)


def encoded(values: Tensor, reference: Tensor | None) -> Tensor:
    """Return the payload, encoded into a dirty buffer."""
    room = torch.full((CODEC.wire_nbytes(values.numel(), values.dtype),), 0xA5, dtype=torch.uint8)
    return room[: CODEC.encode(values, reference, room)]


def decoded(payload: Tensor, reference: Tensor | None, numel: int, dtype: torch.dtype) -> Tensor:
    out = torch.full((numel,), 3.0, dtype=dtype)
    CODEC.decode(payload, reference, out)
    return out


def check(values: Tensor, reference: Tensor) -> Tensor:
    """Check size, values and decoding in place; return the payload."""
    payload = encoded(values, reference)
    assert payload.numel() % 16 == 0 and payload.numel() <= 32 + 2 * values.numel() + 15
    found = decoded(payload, reference, values.numel(), values.dtype)
    assert torch.equal(arrays.bits_of(found), arrays.bits_of(values))
    held = reference.clone()
    CODEC.decode(torch.cat([payload, torch.full((99,), 7, dtype=torch.uint8)]), held, held)
    assert torch.equal(arrays.bits_of(held), arrays.bits_of(values))
    return payload


@contextmanager
def limited(way: str) -> Iterator[None]:
    """Use loops with these instructions; skip if this machine lacks them."""
    try:
        if LIMITS.limit(way) != way:
            pytest.skip(f"this machine has no {way}")
        yield
    finally:
        LIMITS.limit(WAYS[0])


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test with each instruction set."""
    with limited(request.param):
        yield request.param


def test_what_the_loops_may_use_is_one_of_three() -> None:
    with pytest.raises(ValueError, match="plain, avx2 or avx512, found sse"):
        LIMITS.limit("sse")


@given(pair=pairs)
@arrays.often(80)
def test_every_pair_is_exact_and_the_format_is_what_is_written(
    pair: tuple[Tensor, Tensor],
) -> None:
    values, reference = pair
    payload = check(values, reference)
    if values.numel() == 0:
        assert payload.numel() == 0
        return
    old, code = stepcode_reference.patterns(reference), DTYPE_CODES[values.dtype]
    slow = stepcode_reference.decode(payload.numpy().tobytes(), old, code)
    assert slow == stepcode_reference.patterns(values)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("by", [0, 1, -1, 127, 2**15, -(2**15) + 1, 12345])
def test_every_pattern_as_value_and_as_reference(dtype: torch.dtype, by: int) -> None:
    """-0.0, subnormals, infinities and every NaN; 2^15 flips the sign of each."""
    reference = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    values = (reference.int() + by).to(torch.int16)
    shuffled = reference[torch.randperm(2**16, generator=torch.Generator().manual_seed(by % 97))]
    check(values.view(dtype), reference.view(dtype))
    check(shuffled.view(dtype), reference.view(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_all_instructions_and_threads_write_the_same_bytes(change: str, dtype: torch.dtype) -> None:
    for numel in (8192 * 9 + 1, 300_001):
        values, reference = stepcode_reference.pair("normal", change, numel, 5, dtype)
        payload, threads = check(values, reference), torch.get_num_threads()
        for way in WAYS:
            if LIMITS.limit(way) == way:
                assert torch.equal(check(values, reference), payload), way
        LIMITS.limit(WAYS[0])
        torch.set_num_threads(3)
        try:
            assert torch.equal(check(values, reference), payload)
        finally:
            torch.set_num_threads(threads)


def test_the_bytes_stay_what_they_are() -> None:
    """x = (i * 2654435761) mod 2^32 as reference, deltas from its lowest bits."""
    x = np.arange(20_000, dtype=np.uint64) * 2654435761 & 0xFFFFFFFF
    old = (0x3C00 + (x >> 22)).astype(np.uint16)
    new = old + (x & 3).astype(np.uint16) * ((x & 0x70) == 0)
    values, reference = (
        torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(torch.bfloat16)
        for bits in (new, old)
    )
    payload = check(values, reference)
    assert hashlib.sha256(payload.numpy().tobytes()).hexdigest()[:16] == "b6751cd28d511a62"


def entropy(values: Tensor, reference: Tensor) -> float:
    """Return bits per value of the delta given the exponent of the reference (bf16)."""
    old, new = (bits.view(torch.int16).long() & 0xFFFF for bits in (reference, values))
    exponent, step = old >> 7 & 0xFF, (new - old) % 2**16

    def total(found: Tensor) -> float:
        counts = torch.bincount(found).double()
        counts = counts[counts > 0]
        return float(-(counts * (counts / counts.sum()).log2()).sum())

    return (total(exponent << 16 | step) - total(exponent)) / values.numel()


@pytest.mark.parametrize(
    ("rate", "least", "most"), [(1e-3, 0.9, 1.0), (1e-4, 0.4, 0.7), (1e-6, 0.01, 0.05)]
)
def test_at_most_a_tenth_more_than_the_entropy(rate: float, least: float, most: float) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(1 << 20, generator=generator) * 0.02
    moved = weights + rate * 0.6 * torch.randn(1 << 20, generator=generator)
    values, reference = moved.bfloat16(), weights.bfloat16()
    bits = check(values, reference).numel() * 8
    changed = int((values != reference).sum())
    assert least < changed / values.numel() < most
    assert bits / values.numel() < 1.1 * entropy(values, reference)
    if most < 0.1:
        assert bits / changed < 7.0


def test_nothing_changed_costs_a_header_and_everything_changed_the_values() -> None:
    reference = arrays.make("normal", 1 << 20, 1, torch.bfloat16)
    assert encoded(reference.clone(), reference).numel() <= 32 + 64 + 4 * 128
    values, _ = stepcode_reference.pair("normal", "everything", 1 << 20, 1, torch.bfloat16)
    assert encoded(values, reference).numel() <= 32 + (2 << 20)


def test_only_tiles_that_code_badly_are_stored() -> None:
    """The first half is noise, the second is unchanged."""
    values, reference = stepcode_reference.pair("normal", "everything", 1 << 18, 1, torch.bfloat16)
    values[1 << 17 :] = reference[1 << 17 :]
    assert check(values, reference).numel() < 1.02 * 2 * (1 << 17)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 31, 5000])
def test_without_a_reference(numel: int, dtype: torch.dtype) -> None:
    values = arrays.make("nonfinite", numel, 1, dtype)
    payload = encoded(values, None)
    found = decoded(payload, None, numel, dtype)
    assert torch.equal(arrays.bits_of(found), arrays.bits_of(values))
    if numel == 0:
        return
    if numel == 5000:
        assert payload.numel() < 2 * numel
    with pytest.raises(CodecError, match="pass reference=None"):
        decoded(payload, values, numel, dtype)
    with pytest.raises(CodecError, match="steps from a reference, found reference=None"):
        decoded(encoded(values, values), None, numel, dtype)
    with pytest.raises(CodecError, match="another number of values"):
        decoded(payload, None, numel - 1 or 2, dtype)
    other = DTYPES[1 - DTYPES.index(dtype)]
    with pytest.raises(CodecError, match="another dtype"):
        decoded(payload, None, numel, other)
    with pytest.raises(CodecError, match="not one of this codec"):
        decoded(torch.zeros(64, dtype=torch.uint8), None, numel, dtype)


def test_encode_into_stores_the_size() -> None:
    values, reference = stepcode_reference.pair("normal", "few", 5000, 1, torch.bfloat16)
    sizes = torch.full((3,), -7)
    room = torch.empty(CODEC.wire_nbytes(5000, torch.bfloat16), dtype=torch.uint8)
    CODEC.encode_into(values, reference, room, sizes[1:2])
    assert sizes.tolist() == [-7, encoded(values, reference).numel(), -7]


def test_what_cannot_be_encoded_is_refused_in_one_line() -> None:
    values = torch.ones(100, dtype=torch.bfloat16)
    room = torch.empty(CODEC.wire_nbytes(100, torch.bfloat16), dtype=torch.uint8)
    wide, short = values.float(), values[:99]
    calls: dict[str, Callable[[], object]] = {
        "float32 cannot be encoded": lambda: CODEC.encode(wide, wide, room),
        "must be like values: expected 100": lambda: CODEC.encode(values, short, room),
        "found 100 torch.float16": lambda: CODEC.encode(values, values.half(), room),
        "must be 1-D": lambda: CODEC.encode(values.view(10, 10), values, room),
        "reference must be 1-D": lambda: CODEC.encode(values, values.view(10, 10), room),
        "out is too short": lambda: CODEC.encode(values, values, room[:-1]),
        "fewer than 2\\^32": lambda: CODEC.wire_nbytes(2**32, torch.bfloat16),
        "payload is too short": lambda: CODEC.decode(room[:31], values, values),
    }
    both = torch.ones(150, dtype=torch.bfloat16)
    calls["overlaps the reference"] = lambda: CODEC.decode(room, both[:100], both[50:])
    for expected, call in calls.items():
        with pytest.raises(CodecError, match=expected) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", ["few", "many", "far", "everything"])
def test_a_cut_payload_is_refused(change: str) -> None:
    values, reference = stepcode_reference.pair("normal", change, 9000, 2, torch.bfloat16)
    payload = encoded(values, reference)
    cuts = {*range(0, 200, 7), *range(200, payload.numel() - 16, 97), payload.numel() - 17}
    for cut in cuts:
        with pytest.raises(CodecError):
            decoded(guarded.copy(payload[:cut]), reference, 9000, torch.bfloat16)


@pytest.mark.usefixtures("way")
def test_a_changed_word_or_state_is_noticed() -> None:
    """The final states must be those in which every encoder begins."""
    values, reference = stepcode_reference.pair("normal", "many", 9000, 2, torch.bfloat16)
    payload = encoded(values, reference)
    model = int.from_bytes(payload[24:28].numpy().tobytes(), "little")
    for place in range(32 + model + 8, 32 + model + 3000, 41):
        broken = payload.clone()
        broken[place] ^= 0x10
        with pytest.raises(CodecError, match="a tile is damaged"):
            decoded(broken, reference, 9000, torch.bfloat16)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("change", ["few", "many", "far", "everything"])
def test_random_bytes_never_read_or_write_beyond(change: str) -> None:
    """Arrays end at an unreadable page, so an access beyond crashes."""
    generator = torch.Generator().manual_seed(0)
    for numel in (37, 20_000):
        pair = stepcode_reference.pair("normal", change, numel, 3, torch.bfloat16)
        values, reference = (guarded.copy(one) for one in pair)
        room = guarded.empty(CODEC.wire_nbytes(numel, torch.bfloat16))
        payload = room[: CODEC.encode(values, reference, room)]
        for turn in range(2000 if arrays.NIGHTLY else 100):
            broken = guarded.copy(payload)
            first = (0, 32, min(200, broken.numel() - 1))[turn % 3]
            where = torch.randint(first, broken.numel(), (1 + turn % 4,), generator=generator)
            broken[where] = torch.randint(0, 256, where.shape, generator=generator).byte()
            out = guarded.empty(2 * numel, torch.bfloat16)
            try:
                CODEC.decode(broken, reference, out)
            except CodecError as error:
                assert "\n" not in str(error)


@pytest.mark.usefixtures("way")
def test_symbols_without_extra_bits_read_none_behind_the_payload() -> None:
    """Flipped signs have no extra bits, and a payload may end with its last word."""
    for numel in range(300, 400):
        reference = torch.linspace(1, 2, numel).to(torch.bfloat16)
        values = torch.where(torch.arange(numel) % 7 == 0, -reference, reference)
        payload = guarded.copy(encoded(values, reference))
        assert torch.equal(decoded(payload, reference, numel, torch.bfloat16), values)


def test_another_reference_is_noticed_where_its_exponents_differ() -> None:
    values, reference = stepcode_reference.pair("normal", "many", 9000, 2, torch.bfloat16)
    payload = encoded(values, reference)
    with pytest.raises(CodecError, match="a tile is damaged"):
        decoded(payload, reference * 2, 9000, torch.bfloat16)


@pytest.mark.parametrize("offset", [1, 2, 6, 15])
def test_a_payload_may_begin_at_any_byte(offset: int) -> None:
    values, reference = stepcode_reference.pair("normal", "many", 3001, 5, torch.bfloat16)
    expected = encoded(values[1:], reference[1:])
    buffer = torch.empty(CODEC.wire_nbytes(3000, torch.bfloat16) + 32, dtype=torch.uint8)
    shifted = buffer[(offset - buffer.data_ptr()) % 16 :]
    shifted = shifted[: CODEC.encode(values[1:], reference[1:], shifted)]
    assert torch.equal(shifted, expected)
    found = decoded(shifted, reference[1:], 3000, torch.bfloat16)
    assert torch.equal(arrays.bits_of(found), arrays.bits_of(values[1:]))


@pytest.mark.parametrize("numel", [0, 1, 8192, 8193, 1 << 24])
def test_the_room_is_what_the_kernels_need(numel: int) -> None:
    for dtype in DTYPES:
        assert CODEC.wire_nbytes(numel, dtype) >= KERNELS.wire_nbytes(numel)
