"""Bytes of native collectives."""

from __future__ import annotations

import torch

from hybridcomp.collectives import native_nbytes


def test_native_bytes() -> None:
    assert native_nbytes.all_reduce_nbytes(1000, torch.float32, 4) == 6000
    assert native_nbytes.all_reduce_nbytes(1000, torch.bfloat16, 2) == 2000
    assert native_nbytes.reduce_scatter_nbytes(1000, torch.float32, 4) == 3000
    assert native_nbytes.all_gather_nbytes(250, torch.float32, 4) == 3000
    assert native_nbytes.all_to_all_nbytes(1000, torch.float16, 4) == 1500
    assert native_nbytes.send_nbytes(1000, torch.float16) == 2000


def test_one_rank_sends_nothing() -> None:
    for nbytes in (
        native_nbytes.all_reduce_nbytes,
        native_nbytes.reduce_scatter_nbytes,
        native_nbytes.all_gather_nbytes,
        native_nbytes.all_to_all_nbytes,
    ):
        assert nbytes(1000, torch.float32, 1) == 0
