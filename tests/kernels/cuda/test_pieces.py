"""Variable-size payloads of a message, all in a constant number of launches."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from hybridcomp.codecs import VALUE_DTYPES, Codec, make_codec
from hybridcomp.codecs.exact_steps import ExactSteps
from hybridcomp.codecs.varying_pieces import PieceKernel
from hybridcomp.codecs.words import DTYPE_NAMES
from hybridcomp.errors import CodecError
from hybridcomp.kernels.cuda import CudaKernels, pieces
from hybridcomp.kernels.cuda.functions import DamageFlag
from tests.codecs import arrays, guarded, stepcode_reference
from tests.kernels.cuda.common import bits_but_nan, kernels_replaced, payload_of
from tests.kernels.cuda.emulated import EmulatedLauncher
from tests.kernels.cuda.sources import NIGHTLY
from tests.selection import by_day

BF16 = torch.bfloat16
VARYING = [
    make_codec("expcode"), make_codec("mpc", dim=1), make_codec("mpc", dim=3), make_codec("radix"),
    make_codec("radix", error_bound=1e-5, mode="abs", segment=256),
]  # fmt: skip
DAY = [VARYING[i] for i in (0, 1, 3)]
#: none, one value, partial tiles, several blocks of tiles; more pieces than fit the arguments
LENGTHS = (1, 0, 31, 4099, 8192, 70_001, 513, 2)
MANY = (5, 40, 1, 0) * (pieces.NEAR // 4 + 4)


def kernel_of(codec: Codec) -> PieceKernel:
    """Return the codec's kernel on the installed back end."""
    found = codec.pieces(torch.device("cpu"))
    assert found is not None
    return found


def places_of(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return consecutive slices of a message, each after an unsent value."""
    ends = torch.tensor(lengths).add(1).cumsum(0).tolist()
    return [(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def encoded(
    codec: Codec, values: Tensor, places: list[tuple[int, int]]
) -> tuple[list[Tensor], list[int]]:
    """Return the slots of all pieces, and the sizes."""
    parts = [values[start:stop] for start, stop in places]
    sizes = [codec.wire_nbytes(part.numel(), values.dtype) for part in parts]
    slots = list(torch.split(torch.full((sum(sizes),), 0xA5, dtype=torch.uint8), sizes))
    words = torch.full((len(parts) + 2,), -7)
    kernel_of(codec).encode(parts, slots, words[1:-1], places)
    assert words[0] == words[-1] == -7
    return slots, words[1:-1].tolist()


def steps_of(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return a message's values with such pieces, and their references, of several kinds."""
    kinds = ("many", "nothing", "everything", "few", "far")
    pairs = [
        stepcode_reference.pair("normal", kinds[i % 5], max(n, 1), i, BF16)
        for i, n in enumerate(lengths)
    ]
    one, both = torch.zeros(1, dtype=BF16), [list[Tensor](), list[Tensor]()]
    for pair, length in zip(pairs, lengths, strict=True):
        for found, each in zip(both, pair, strict=True):
            found += (one, each[:length])
    new, old = map(torch.cat, both)
    return new, old


@pytest.mark.parametrize(
    "lengths", [LENGTHS if NIGHTLY else LENGTHS[:5], MANY], ids=["few", "many"]
)
def test_steps_of_all_pieces(lengths: tuple[int, ...]) -> None:
    """The bytes of an encoder that takes one after the other, decoded in place."""
    (values, reference), places = steps_of(lengths), places_of(lengths)
    codec, launcher = ExactSteps().against(reference), EmulatedLauncher()
    kernels = CudaKernels(launcher)
    refuse = AssertionError("the host waited")
    with kernels_replaced(kernels):
        with mock.patch.object(DamageFlag, "check", side_effect=refuse):
            slots, sizes = encoded(codec, values, places)
        held = reference.clone()
        kernel_of(codec).decode(slots, [held[start:stop] for start, stop in places])
        kernels.check()
    assert len(launcher.kernels) == 7
    for (start, stop), slot, size in zip(places, slots, sizes, strict=True):
        right = payload_of(codec.part(start, stop), values[start:stop])
        assert right.numel() == size and torch.equal(slot[:size], right)
        assert torch.equal(arrays.bits_of(held[start:stop]), arrays.bits_of(values[start:stop]))


def values_of(lengths: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a message's values with such pieces, of several kinds."""
    kinds, one = ("normal", "nonfinite", "sparse", "wide", "subnormal"), torch.zeros(1, dtype=dtype)
    parts = [arrays.make(kinds[i % 5], n, i, dtype) for i, n in enumerate(lengths)]
    return torch.cat([each for part in parts for each in (one, part)])


def outcomes(codec: Codec, payloads: list[Tensor], out: list[Tensor]) -> list[Tensor]:
    """Return the results of one launch per piece."""
    totals = [torch.linspace(-1, 1, one.numel()) for one in out]
    for payload, one, total in zip(payloads, out, totals, strict=True):
        codec.decode(payload, one)
        codec.decode_add(payload, total, one.dtype)
    return [bits_but_nan(one) for one in (*out, *totals)]


@pytest.mark.parametrize("dtype", by_day(VALUE_DTYPES, VALUE_DTYPES[1:2]), ids=str)
@pytest.mark.parametrize("codec", by_day(VARYING, DAY), ids=str)
def test_all_pieces(codec: Codec, dtype: torch.dtype) -> None:
    """Payloads are the CPU encoder's; values and sums are its bits, in one launch each."""
    for lengths in (LENGTHS[:5], MANY):
        values, places, launcher = values_of(lengths, dtype), places_of(lengths), EmulatedLauncher()
        kernels = CudaKernels(launcher)
        out = [torch.full((n,), 3.0, dtype=dtype) for n in lengths]
        totals = [torch.linspace(-1, 1, n) for n in lengths]
        with kernels_replaced(kernels):
            slots, sizes = encoded(codec, values, places)
            kernel_of(codec).decode(slots, out)
            kernel_of(codec).add([[slot] for slot in slots], totals, dtype)
            kernels.check()
        assert len(launcher.kernels) == 3
        parts = [values[start:stop] for start, stop in places]
        right = [payload_of(codec, part) for part in parts]
        assert sizes == [payload.numel() for payload in right]
        for slot, payload in zip(slots, right, strict=True):
            assert torch.equal(slot[: payload.numel()], payload)
        expected = outcomes(codec, right, [torch.empty_like(one) for one in out])
        for wanted, found in zip(expected, map(bits_but_nan, (*out, *totals)), strict=True):
            assert torch.equal(wanted, found)


@pytest.mark.parametrize("ranks", by_day([3, 40], [3]))
@pytest.mark.parametrize("dtype", by_day(VALUE_DTYPES, VALUE_DTYPES[1:2]), ids=str)
@pytest.mark.parametrize("codec", by_day(VARYING, DAY), ids=str)
def test_sums_over_ranks(codec: Codec, dtype: torch.dtype, ranks: int) -> None:
    """A single launch gives the bits of additions in rank order."""
    lengths, launcher = (5, 4099, 0, 300) if ranks < 40 else (5, 0, 70), EmulatedLauncher()
    rows = [
        [payload_of(codec, arrays.make("normal", n, 100 * i + r, dtype)) for r in range(ranks)]
        for i, n in enumerate(lengths)
    ]
    totals, right = ([torch.linspace(-1, 1, n) for n in lengths] for _ in range(2))
    kernels = CudaKernels(launcher)
    with kernels_replaced(kernels):
        kernel_of(codec).add(rows, totals, dtype)
        kernels.check()
    assert len(launcher.kernels) == 1
    for row, total, wanted in zip(rows, totals, right, strict=True):
        for payload in row:
            codec.decode_add(payload, wanted, dtype)
        assert torch.equal(arrays.bits_of(total), arrays.bits_of(wanted))


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
def test_sums_and_residuals_beside_the_codec(dtype: torch.dtype) -> None:
    """Of unaligned tensors, by three launches; the residual of non-finite values is 0."""
    lengths = (1, 0, 5000, 33, 4096) * 14  # more than fit the arguments
    whole, places = torch.full((sum(lengths) + len(lengths),), 7.0), places_of(lengths)
    out, more = whole.clone(), values_of(lengths, dtype)
    launcher = EmulatedLauncher()
    with kernels_replaced(CudaKernels(launcher)):
        kernel = kernel_of(make_codec("expcode"))
        parts = [out[start:stop] for start, stop in places]
        kernel.begin(parts, [index % 2 == 0 for index in range(len(parts))], torch.bfloat16)
        for index, ((start, stop), part) in enumerate(zip(places, parts, strict=True)):
            assert torch.equal(part.signbit(), torch.full((stop - start,), index % 2 == 0))
            assert not part.any()
        kernel.accumulate(parts, [more[start:stop] for start, stop in places])
        sums = out.clone()
        sent = [sums[start:stop].flip(0) for start, stop in places]
        kernel.settle(parts, sent)
    assert launcher.kernels == ["pieces_fill", f"pieces_add_{DTYPE_NAMES[dtype]}", "pieces_settle"]
    for index, ((start, stop), part, gone) in enumerate(zip(places, parts, sent, strict=True)):
        right = more[start:stop].float() + (0.0 if index % 2 else -0.0)
        assert torch.equal(bits_but_nan(sums[start:stop]), bits_but_nan(right))
        assert torch.equal(part, (sums[start:stop] - gone).nan_to_num(0.0, 0.0, 0.0))
        whole[start:stop] = part
    assert torch.equal(out, whole)


def test_more_pieces_than_a_grid_has_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MOST", 3)
    lengths = (9, 700, 1, 33)
    (values, reference), places = steps_of(lengths), places_of(lengths)
    codec, launcher = ExactSteps().against(reference), EmulatedLauncher()
    with kernels_replaced(CudaKernels(launcher)):
        slots, sizes = encoded(codec, values, places)
    assert len(launcher.kernels) == 10
    for (start, stop), slot, size in zip(places, slots, sizes, strict=True):
        assert torch.equal(slot[:size], payload_of(codec.part(start, stop), values[start:stop]))


def test_a_damaged_piece_is_told_at_the_check() -> None:
    lengths = (900, 900, 900)
    (values, reference), places = steps_of(lengths), places_of(lengths)
    codec, kernels = ExactSteps().against(reference), CudaKernels(EmulatedLauncher())
    with kernels_replaced(kernels):
        slots, _ = encoded(codec, values, places)
        slots[1][0] ^= 1
        kernel_of(codec).decode(slots, [reference[start:stop].clone() for start, stop in places])
        with pytest.raises(CodecError, match="damaged"):
            kernels.check()
        with pytest.raises(ValueError, match="multiple of 16 bytes"):
            kernel_of(codec).encode([values[:9]], [slots[0][1:]], torch.zeros(1, dtype=torch.int64))


def test_nothing_beside_the_pieces_is_touched() -> None:
    """Values, references and payloads end at an unreadable page."""
    values, reference = (guarded.copy(one) for one in steps_of((8200,)))
    codec, sizes = ExactSteps().against(reference), torch.zeros(2, dtype=torch.int64)
    parts = [values[1:100], values[100:]]
    rooms = [guarded.empty(codec.wire_nbytes(part.numel(), BF16)) for part in parts]
    with kernels_replaced(CudaKernels(EmulatedLauncher())):
        kernel_of(codec).encode(parts, rooms, sizes, [(1, 100), (100, 8201)])
        used = [guarded.copy(room[:size]) for room, size in zip(rooms, sizes.tolist(), strict=True)]
        out = guarded.copy(reference)
        kernel_of(codec).decode(used, [out[1:100], out[100:]])
    assert torch.equal(arrays.bits_of(out[1:]), arrays.bits_of(values[1:]))


@pytest.mark.parametrize("codec", [*by_day(VARYING, DAY), ExactSteps()], ids=str)
def test_payloads_that_are_too_short_are_damage(codec: Codec) -> None:
    """Lengths come from other ranks; reading a byte beyond crashes."""
    kernels, numel = CudaKernels(EmulatedLauncher()), 20_000
    held = torch.zeros(numel, dtype=BF16)
    bound = codec.against(held) if isinstance(codec, ExactSteps) else codec
    with kernels_replaced(kernels):
        for nbytes in (0, 16, 32, 64):
            short = guarded.copy(torch.zeros(nbytes, dtype=torch.uint8))
            kernel_of(bound).decode([short, short], [held, held.clone()])
            with pytest.raises(CodecError, match="damaged"):
                kernels.check()
