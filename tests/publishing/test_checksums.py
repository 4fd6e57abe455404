"""Checksums: the same on any number of threads, and what the page says that they are."""

from __future__ import annotations

import hashlib

import pytest
import torch

from hybridcomp.publishing.checksums import BLOCK, digest_of, in_threads


@pytest.mark.parametrize("numel", [0, 1, BLOCK // 2, BLOCK // 2 + 1, 3 * BLOCK // 2 + 5])
def test_a_checksum_is_of_the_digests_of_blocks(numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    data = values.view(torch.uint8).numpy().tobytes()
    blocks = [data[low : low + BLOCK] for low in range(0, len(data), BLOCK)]
    inner = b"".join(hashlib.blake2b(block, digest_size=16).digest() for block in blocks)
    expected = hashlib.blake2b(inner, digest_size=16).hexdigest()
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert digest_of(values) == expected
    finally:
        torch.set_num_threads(threads)
    if numel:
        values.view(torch.int16)[-1] += 1
        assert digest_of(values) != expected


def test_the_first_error_is_raised() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert in_threads(lambda n: n * n, range(20)) == [n * n for n in range(20)]
        with pytest.raises(ZeroDivisionError):
            in_threads(lambda n: 1 // n, [1, 0, 2])
    finally:
        torch.set_num_threads(threads)
