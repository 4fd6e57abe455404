"""Checksums and comparisons: as documented, and the same for any number of threads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from hybridcomp.codecs.changes import change_kernels
from hybridcomp.publishing.checksums import (
    BLAKE2B,
    BLOCK,
    compare,
    digest_of,
    empty_mask,
    in_threads,
)
from tests.publishing.numpy_reader import checksum
from tests.publishing.xxh3_reference import xxh3_128

SIZES = [0, 1, 31, 127, 128, 129, 511, 512, 513, 8191, 8200, BLOCK // 2, BLOCK // 2 + 1]


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Set torch's number of threads temporarily."""
    threads = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def made(numel: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def test_the_reference_is_xxh3() -> None:
    """Compares with digests by the package xxhash 4.1.0 (library 0.8.3)."""
    data = bytes(n * n % 251 for n in range(5000))
    known = {
        241: "8f7b3b6898244931fa3e3f950b821a67",
        1024: "58ffb390b197a68aa3115476086f73f1",
        1025: "99fd280e417dee6866b070bd27327c00",
        5000: "03b1968210409dc8924c0d5e41418245",
    }
    assert {size: xxh3_128(data[:size]).hex() for size in known} == known


@pytest.mark.parametrize("numel", SIZES)
def test_a_checksum_is_of_the_digests_of_blocks(numel: int) -> None:
    values = made(numel)
    whole = checksum(values.view(torch.uint8).numpy().tobytes())
    for count in (1, 2, 3):
        with on_threads(count):
            assert digest_of(values) == whole
            assert compare(values, values) == (0, whole)
    if numel:
        values.view(torch.int16)[-1] += 1
        assert digest_of(values) != whole


def test_the_checksum_of_format_1() -> None:
    values = made(3 * BLOCK // 4)
    data = values.view(torch.uint8).numpy().tobytes()
    blocks = [data[low : low + BLOCK] for low in range(0, len(data), BLOCK)]
    inner = b"".join(hashlib.blake2b(block, digest_size=16).digest() for block in blocks)
    for count in (1, 2):
        with on_threads(count):
            found = digest_of(values, BLAKE2B)
            assert found == hashlib.blake2b(inner, digest_size=16).hexdigest()


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_what_differs_is_found_taken_and_put_back(numel: int, share: float) -> None:
    old, values = made(numel), made(numel)
    moved = torch.rand(numel, generator=torch.Generator().manual_seed(numel)) < share
    values.view(torch.int16)[moved] += 1
    mask = empty_mask(numel)
    changed, digest = compare(values, old, mask)
    assert (changed, digest) == (int(moved.sum()), digest_of(values))
    places = torch.empty(changed, dtype=torch.int64)
    picked = torch.empty(changed, dtype=values.dtype)
    change_kernels().places(mask.data_ptr(), numel, places.data_ptr())
    assert torch.equal(places, moved.nonzero().reshape(-1))
    assert (
        change_kernels().pick(values.data_ptr(), mask.data_ptr(), numel, picked.data_ptr())
        == changed
    )
    assert torch.equal(picked.view(torch.int16), values.view(torch.int16)[moved])
    change_kernels().put(picked.data_ptr(), mask.data_ptr(), numel, old.data_ptr())
    assert torch.equal(old.view(torch.int16), values.view(torch.int16))


def test_zeros_of_both_signs_and_nans_differ() -> None:
    old = torch.tensor([0.0, float("nan"), 1.0], dtype=torch.bfloat16)
    values = old.clone()
    values.view(torch.int16)[0] = -(2**15)
    values.view(torch.int16)[1] ^= 1
    assert compare(values, old)[0] == 2


def test_the_first_error_is_raised() -> None:
    with on_threads(2):
        assert in_threads(lambda n: n * n, range(20)) == [n * n for n in range(20)]
        with pytest.raises(ZeroDivisionError):
            in_threads(lambda n: 1 // n, [1, 0, 2])
