"""Masters encoded relative to bf16 parameters: lossless, and other parameters are rejected."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridcomp.codecs.beside import decode_beside, encode_beside


def with_lower_halves(upper: int) -> Tensor:
    """Return all 65,536 lower halves with one upper half."""
    return (torch.arange(1 << 16, dtype=torch.int32) | (upper << 16)).view(torch.float32)


def some() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), dtype=torch.int64, generator=generator)
    special = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38, -3.4028235e38, 1e-45]
    return {
        "normal": torch.randn(1 << 16, generator=generator),
        "even upper": with_lower_halves(0x3F80),
        "odd upper": with_lower_halves(0x3F81),
        "bits": bits.to(torch.int32).view(torch.float32),
        "special": torch.tensor(special).repeat(1000),
        "one": torch.tensor([1.5]),
        "none": torch.empty(0),
    }


@pytest.mark.parametrize("rest", [0, 1, 7])
@pytest.mark.parametrize("name", some())
def test_every_bit_comes_back(name: str, rest: int) -> None:
    values = some()[name]
    half = values.bfloat16()
    master = torch.cat([values, torch.full((rest,), 1 / 3)])
    room = torch.empty(master.nbytes + 16, dtype=torch.uint8)
    used = encode_beside(master, half, room)
    assert used is not None and used <= 2 * values.numel() + 4 * rest + 6 * values.numel() // 8
    found = torch.empty_like(master)
    decode_beside(room[:used], half, found)
    assert torch.equal(found.view(torch.int32), master.view(torch.int32))
    if name == "normal":
        assert used < 0.51 * master.nbytes


def test_other_parameters_are_refused() -> None:
    master = torch.randn(100)
    half = master.bfloat16()
    half[3] += 1
    assert encode_beside(master, half, torch.empty(400, dtype=torch.uint8)) is None


def test_what_saves_nothing_is_refused() -> None:
    middle = torch.full((100,), 0x3F818000, dtype=torch.int32).view(torch.float32)
    assert encode_beside(middle, middle.bfloat16(), torch.empty(400, dtype=torch.uint8)) is None
