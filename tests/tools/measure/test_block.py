"""The timed block's memory and operations are the stated ones."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hybridcomp.errors import ConfigError
from hybridcomp.tools.measure.block import BlockSize, TransformerBlock, kept_nbytes


def test_sizes_as_text() -> None:
    assert BlockSize.parse("8x128x256") == BlockSize(8, 128, 256, 32)
    assert BlockSize.parse("8x128x256x4") == BlockSize(8, 128, 256, 64)
    for text in ("8x128", "8x128x256x3", "axbxc", "0x1x32", "1x1x32x32"):
        with pytest.raises(ConfigError, match=f"--block: found '{text}'"):
            BlockSize.parse(text)


@pytest.mark.parametrize("size", [BlockSize(2, 16, 64), BlockSize(1, 32, 96)])
def test_flops_are_those_of_the_counter(size: BlockSize) -> None:
    with torch.device("meta"):
        block, hidden = TransformerBlock(size), torch.empty(size.batch, size.length, size.width)
        with FlopCounterMode(display=False) as counter:
            block(hidden)
    linear = 24 * size.batch * size.length * size.width**2
    assert size.flops >= linear
    # on meta tensors attention may be counted, or be an operation unknown to the counter
    assert counter.get_total_flops() in (linear, size.flops)


def test_kept_bytes_are_those_of_activations_alone() -> None:
    size = BlockSize(2, 16, 64)
    block = TransformerBlock(size)
    hidden = torch.randn(size.batch, size.length, size.width, requires_grad=True)
    values = hidden.nbytes
    found = kept_nbytes(block, hidden)
    # at least both inputs of the norms, q, k, v, the attention's output, gelu's input and output
    assert 14 * values <= found < 30 * values
    with torch.no_grad():
        assert kept_nbytes(block, hidden) == 0
