"""What native would have sent: NCCL's accounting on round numbers."""

from __future__ import annotations

import torch

from hybridcomp.collectives import native


def test_native_bytes() -> None:
    assert native.all_reduce_nbytes(1000, torch.float32, 4) == 6000
    assert native.all_reduce_nbytes(1000, torch.bfloat16, 2) == 2000
    assert native.reduce_scatter_nbytes(1000, torch.float32, 4) == 3000
    assert native.all_gather_nbytes(250, torch.float32, 4) == 3000
    assert native.all_to_all_nbytes(1000, torch.float16, 4) == 1500
    assert native.send_nbytes(1000, torch.float16) == 2000


def test_one_rank_sends_nothing() -> None:
    for nbytes in (
        native.all_reduce_nbytes,
        native.reduce_scatter_nbytes,
        native.all_gather_nbytes,
        native.all_to_all_nbytes,
    ):
        assert nbytes(1000, torch.float32, 1) == 0
