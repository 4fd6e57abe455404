"""Tiles of expcode and chunks of mpc on a warp's uncommon paths: the CPU's bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hybridcomp.codecs import VALUE_DTYPES, make_codec
from hybridcomp.errors import CodecError
from tests.codecs import arrays
from tests.kernels.cuda.common import kernels_replaced, payload_of
from tests.kernels.cuda.emulated import KERNELS, check

TILE, BLOCK = 2048, 32
#: more tiles than a thread block has warps, the last one partial
NUMEL = 9 * TILE + 700


def _one_zero_block(values: Tensor) -> None:
    """Zero a different block in every tile, including the first and the last."""
    for tile in range(9):
        block = tile * 8 - (tile == 8)
        values[tile * TILE + block * BLOCK :][:BLOCK] = 0


def _few_blocks(values: Tensor) -> None:
    """Return fewer blocks than are sampled; a tile without any."""
    kept = values.clone()
    values.zero_()
    for block in (5, 64, 127, 3 * 64 + 1):
        values[block * BLOCK :][:BLOCK] = kept[block * BLOCK :][:BLOCK]


def _late_low_half(values: Tensor) -> None:
    """Return widened bf16, except for one value of an unsampled block."""
    values.copy_(values.bfloat16().to(values.dtype))
    values[3 * TILE + 9 * BLOCK + 5] = 1.2345678


def _misleading_sample(values: Tensor) -> None:
    """Give sampled blocks a single exponent, others all: escapes make the tile too long."""
    wide = arrays.make("bits", values.numel(), 5, values.dtype)
    values.copy_(wide)
    for block in range(0, values.numel() // BLOCK, 8):
        values[block * BLOCK :][:BLOCK] = 1.5


def _zeros_and_few_exponents(values: Tensor) -> None:
    """Use the code for zero, and bases that tie."""
    values.copy_(torch.where(values > 0.5, 1.5, torch.where(values < -0.5, -2.5, 0.0)))


def _small_exponents(values: Tensor) -> None:
    """Use exponents close to zero: windows that begin below the lowest one."""
    tiny = torch.finfo(values.dtype).tiny
    values.copy_(values.float().abs().clamp(0, 3) * tiny)


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
@pytest.mark.parametrize(
    "change",
    [
        _one_zero_block, _few_blocks, _late_low_half, _misleading_sample, _zeros_and_few_exponents,
        _small_exponents,
    ],
    ids=lambda change: change.__name__,
)  # fmt: skip
def test_tiles_that_are_not_plain(change: Callable[[Tensor], None], dtype: torch.dtype) -> None:
    values = arrays.make("normal", NUMEL, 2, dtype)
    change(values)
    check(make_codec("expcode"), values)


@pytest.mark.parametrize("dim", [1, 2, 7, 32])
def test_chunks_of_every_dim(dim: int) -> None:
    """More chunks than a block has warps; partial ends inside a group and after a group."""
    codec = make_codec("mpc", dim=dim)
    for numel in (9 * 1024 + 64, 9 * 1024 + 77):
        check(codec, arrays.make("walk", numel, dim))


@pytest.mark.parametrize("name", ["mpc", "expcode"])
def test_damage_beyond_the_first_tiles_is_told(name: str) -> None:
    """Any warp may detect it."""
    codec, values = make_codec(name), arrays.make("normal", NUMEL, 4)
    payload = payload_of(codec, values)
    cut = payload[: payload.numel() - 64 & ~15].clone()
    with kernels_replaced(KERNELS):
        codec.decode(cut, torch.empty_like(values))
    with pytest.raises(CodecError, match="damaged"):
        KERNELS.check()
    if name == "mpc":
        return
    tiles = -(-NUMEL // TILE)
    offset = int(payload[32 + 4 * 3 :][:4].view(torch.int32))
    escapes = 32 + 4 * tiles + 4 * offset + 2  # in the fourth tile
    payload[escapes] ^= 1
    with kernels_replaced(KERNELS):
        codec.decode(payload, torch.empty_like(values))
    with pytest.raises(CodecError, match="damaged"):
        KERNELS.check()
