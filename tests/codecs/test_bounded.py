"""Splitting a bound over several quantizations, and codecs that satisfy the shares."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridcomp.codecs import Bf16, BlockInt, Bounded, ExpCode, Fp8, Radix, Zfp
from hybridcomp.codecs.base import VALUE_DTYPES, Codec
from hybridcomp.codecs.bounded import make_bounded
from hybridcomp.codecs.budget import (
    FLOOR,
    ROUNDING,
    best_bound,
    shares,
    worst_ratio,
)
from hybridcomp.codecs.cheapest import LOSSLESS_BELOW, SMALL_NUMEL
from hybridcomp.codecs.registry import CODECS, families, ladder_of
from hybridcomp.errors import CodecError

BIG = 1 << 30
LADDERS = {codec.name: codec.ladder() for codec in CODECS.built_in.values() if codec.ladder()}


@given(
    st.floats(1e-7, 0.99),
    st.sampled_from([1, 2]),
    st.integers(1, 4096),
    st.sampled_from(list(ROUNDING.values())),
)
def test_shares_add_up_to_the_bound(bound: float, count: int, sums: int, rounding: float) -> None:
    """In exact arithmetic, with little slack."""
    errors = shares(bound, "rel", count, 7, sums, rounding)
    assert len(errors) == count
    unit = sums * Fraction(1, 2**24)
    product = (1 + unit / (1 - unit)) * (1 + Fraction(rounding))
    for error in errors:
        assert error >= 0
        product *= 1 + Fraction(error)
    if errors[0] > 0:
        assert product <= 1 + Fraction(bound)
        assert product >= 1 + Fraction(bound) * (1 - Fraction(1, 10**6))
    else:
        assert product >= 1 + Fraction(bound)


def test_absolute_shares() -> None:
    assert shares(8.0, "abs", 1, 1, 0, 0.0) == (8.0,)
    assert shares(8.0, "abs", 1, 0, 3, 0.0) == (8.0,)
    assert shares(8.0, "abs", 1, 4, 7, 2.0**-8) == (2.0,)
    assert shares(8.0, "abs", 2, 4, 7, 2.0**-8) == (1.0, 4.0)


@pytest.mark.parametrize("family", LADDERS)
@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
def test_the_worst_ratio_is_the_worst(family: str, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    for codec in LADDERS[family]:
        worst = worst_ratio(codec, dtype, info.smallest_normal)
        magnitude = info.smallest_normal
        while magnitude < info.max:
            assert codec.element_bound(magnitude, dtype) <= worst * magnitude * (1 + 1e-12)
            magnitude *= 1.7


def hops(bound: Bounded, count: int, dtype: torch.dtype = torch.float32) -> tuple[Codec, ...]:
    return bound.split_error_budget(count, 2, result=dtype, exact=1)


def test_two_hops_share_and_one_hop_has_it_all() -> None:
    bound = Bounded(1e-2)
    first, second = hops(bound, 2)
    assert isinstance(first, Radix) and first == second
    assert first.error_bound == pytest.approx(1e-2 / 2, rel=0.01)
    (once,) = hops(bound, 1)
    (moved,) = bound.split_error_budget(1, 1)
    assert isinstance(once, Radix) and isinstance(moved, Radix)
    assert 0.00999 < once.error_bound < moved.error_bound <= 1e-2
    narrow, _ = hops(bound, 2, torch.bfloat16)
    assert isinstance(narrow, Radix)
    assert (1 + narrow.error_bound) ** 2 * (1 + 2.0**-8) == pytest.approx(1.01, abs=1e-5)


def test_codecs_are_made_once() -> None:
    bound, same = Bounded(1e-2), Bounded(1e-2)
    assert hops(bound, 2)[0] is hops(same, 2)[0]
    small = bound.for_message(100, torch.float16, 2)
    assert small is same.for_message(100, torch.float16, 2)
    assert bound.for_presummed(4) is same.for_presummed(4)


def test_what_no_quantization_keeps_is_lossless() -> None:
    tight = Bounded(3e-3)
    assert hops(tight, 2, torch.bfloat16) == (ExpCode(), ExpCode())
    assert isinstance(hops(tight, 2, torch.float16)[0], Radix)
    assert isinstance(hops(tight, 1)[0], Radix), "a sum in fp32 has no such rounding"
    assert isinstance(tight.split_error_budget(1, 1, result=torch.bfloat16)[0], Radix)


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
def test_auto_takes_the_cheaper_codec(dtype: torch.dtype) -> None:
    """Measure the threshold between radix and lossless again."""
    values = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)).to(dtype)

    def nbytes(codec: Codec) -> int:
        out = torch.empty(codec.wire_nbytes(values.numel(), dtype), dtype=torch.uint8)
        return codec.encode(values, out)

    edge = LOSSLESS_BELOW[dtype]
    assert nbytes(Radix(edge * 1.5)) < nbytes(ExpCode()) < nbytes(Radix(edge / 2))
    assert Bounded(edge * 0.9).for_message(BIG, dtype, 2) == ExpCode()
    above = Bounded(edge * 1.1).for_message(BIG, dtype, 2)
    assert isinstance(above, Bounded) and isinstance(
        above.split_error_budget(1, 1, result=dtype)[0], Radix
    )


def test_auto_is_fixed_size_only_where_every_value_is_safe() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert Bounded(0.1).for_message(100, dtype, 2) == Bounded(0.1)
    small = Bounded(0.1).for_message(100, torch.float16, 2)
    assert small.fixed_size and small.bounded
    assert small.split_error_budget(2, 8, result=torch.float16)[0] == BlockInt(5)
    assert worst_ratio(BlockInt(5), torch.float16, 2.0**-24) < 0.05
    assert not Bounded(0.1).for_message(SMALL_NUMEL, torch.float16, 2).fixed_size
    assert not Bounded(0.1, segment=512).for_message(100, torch.float16, 2).fixed_size
    assert not Bounded(1e-3).for_message(100, torch.float16, 2).fixed_size


def test_families_take_their_smallest_setting() -> None:
    assert hops(Bounded(0.1, family="blockint"), 1) == (BlockInt(4),)
    assert hops(Bounded(0.1, family="blockint"), 2) == (BlockInt(5),) * 2
    assert hops(Bounded(0.1, family="fp8"), 2) == (Fp8(),) * 2
    assert hops(Bounded(0.01, family="bf16"), 2) == (Bf16(),) * 2
    (zfp,) = Bounded(1e-3, family="zfp").split_error_budget(1, 1)
    assert isinstance(zfp, Zfp) and worst_ratio(zfp, torch.float32, FLOOR) <= 1e-3
    assert worst_ratio(Zfp(zfp.rate - 0.25), torch.float32, FLOOR) > 1e-3
    six = make_bounded("blockint", {"bits": 6}, {"error_bound": 0.03})
    assert hops(six, 1) == (BlockInt(6),)
    assert hops(six, 2) == (ExpCode(), ExpCode()), "six bits do not keep half of it"


def test_fixed_size_is_promised_only_where_messages_have_it() -> None:
    bound = Bounded(1e-2, family="blockint")
    assert bound.for_message(BIG, torch.bfloat16, 2).fixed_size
    tight = Bounded(5e-3, family="blockint")
    assert tight.for_message(BIG, torch.float32, 2).fixed_size
    assert tight.for_message(BIG, torch.bfloat16, 2) == ExpCode()


def test_best_bound_is_kept() -> None:
    for name, ladder in LADDERS.items():
        for count in (1, 2):
            least = best_bound(ladder, count)
            if least < 1:
                kept = Bounded(least * (1 + 1e-9), family=name).split_error_budget(count, 8)
                assert not kept[0].lossless
                less = Bounded(least * 0.6, family=name).split_error_budget(count, 8)
                assert less[0].lossless


def test_a_bound_is_a_codec_for_what_is_moved() -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    for dtype in VALUE_DTYPES:
        for family in ("auto", "blockint"):
            bound, given = Bounded(2e-2, family=family), values.to(dtype)
            payload = torch.empty(bound.wire_nbytes(5000, dtype), dtype=torch.uint8)
            used = bound.encode(given, payload)
            out, added = torch.empty_like(given), torch.zeros(5000)
            bound.decode(payload[:used], out)
            bound.decode_add(payload[:used], added, dtype)
            allowed = 2e-2 * given.float().abs().max()
            for found in (out.float(), added):
                assert (found - given.float()).abs().max() <= allowed
            assert bound.element_bound(1.0, dtype) <= 2e-2


def test_sums_of_sums_leave_room() -> None:
    bound = Bounded(1e-4)
    deep = bound.for_presummed(512, torch.float16)
    assert deep != bound and deep.spec != bound.spec
    outer, inner = deep.split_error_budget(1, 2)[0], bound.split_error_budget(1, 2)[0]
    assert outer.lossless, "fp16 rounds the result by more than 1e-4"
    wide = bound.for_presummed(512).split_error_budget(1, 2)[0]
    assert isinstance(wide, Radix) and isinstance(inner, Radix)
    assert wide.error_bound < inner.error_bound - 500 * 2.0**-24


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"error_bound": 1.0}, "error_bound must be from 2"),
        ({"error_bound": 0.0, "mode": "abs"}, "error_bound must be from 2"),
        ({"error_bound": 0.1, "mode": "relative"}, "error_bound_mode must be one of"),
        ({"error_bound": 0.1, "segment": 32}, "segment must be a multiple of 16"),
        ({"error_bound": 0.1, "segment": 64, "family": "blockint"}, "a multiple of 1024"),
        ({"error_bound": 0.1, "mode": "abs", "family": "fp8"}, "must be rel for fp8"),
    ],
    ids=str,
)
def test_wrong_settings(settings: dict[str, object], said: str) -> None:
    with pytest.raises(CodecError, match=said):
        Bounded(**settings)  # type: ignore[arg-type]


def test_ladders_are_what_a_bound_may_pick_from() -> None:
    assert families() == ("auto", "radix", *LADDERS)
    assert not ladder_of("mpc") and not ladder_of("powersgd") and not ladder_of("zstd")
