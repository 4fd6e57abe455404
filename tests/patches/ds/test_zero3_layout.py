"""Shards of ZeRO 3: the owner of each gradient element, for any number of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import NAME
from hybridcomp.codecs import make_codec
from hybridcomp.collectives import Shards
from hybridcomp.patches.ds.zero.zero3 import _Gradients

CASES: dict[str, tuple[int, list[tuple[int, ...]]]] = {
    "even": (4, [(8, 4), (16,)]),
    "the last is shorter": (4, [(13,), (8,)]),
    "the last has nothing": (4, [(9,)]),
    "more ranks than elements": (16, [(7,), (50, 3), (0,), (16,)]),
    "many ranks": (300, [(299,), (64, 65), (1,)]),
    "one rank": (1, [(5,), (2, 2)]),
}


def message(ranks: int, gradients: list[Tensor]) -> _Gradients:
    params = [SimpleNamespace(**{NAME: f"p{n}"}) for n in range(len(gradients))]
    return _Gradients(
        numel=sum(g.numel() for g in gradients), dtype=torch.float32, group=None,
        tensors=gradients, params=params, in_fp32=True,
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)], ids=str)
@pytest.mark.parametrize("case", ["even", "the last is shorter"])
def test_shards_for_two_levels_are_the_same(case: str, shape: tuple[int, int]) -> None:
    ranks, sizes = CASES[case]
    gradients = [torch.randn(size).bfloat16() for size in sizes]
    found = []
    with mock.patch.object(dist, "get_world_size", lambda group: ranks):
        for in_order in ((), shape):
            sent = message(ranks, gradients)
            sent.in_fp32, sent.dtype, sent.shape = False, torch.bfloat16, in_order
            found.append(sent.load(make_codec("blockint")))
    usual, by_node = found
    assert isinstance(by_node, Shards) and by_node.shape == (shape if case == "even" else ())
    assert [one.tolist() for one in by_node] == [one.tolist() for one in usual]
    if by_node.shape:
        nodes, width = shape
        columns = [usual[node * width + local] for local in range(width) for node in range(nodes)]
        assert torch.equal(by_node.flat, torch.cat(columns)), "as the node sums it"


@pytest.mark.parametrize("case", CASES)
def test_every_rank_gets_its_part_of_every_gradient(case: str) -> None:
    ranks, sizes = CASES[case]
    gradients = [torch.randn(size) for size in sizes]
    chunks = [-(-g.numel() // ranks) for g in gradients]
    with mock.patch.object(dist, "get_world_size", lambda group: ranks):
        sent = message(ranks, gradients)
        shards, pieces = sent.load(make_codec("blockint")), sent.pieces()
        assert pieces is message(ranks, gradients).pieces(), "known by their identity"
    assert len(shards) == len(pieces) == ranks
    for rank, (shard, row) in enumerate(zip(shards, pieces, strict=True)):
        both = zip(gradients, chunks, strict=True)
        parts = [g.reshape(-1)[rank * chunk : (rank + 1) * chunk] for g, chunk in both]
        own = torch.cat(parts) / ranks
        torch.testing.assert_close(shard[: own.numel()], own, rtol=0, atol=0)
        assert not shard[own.numel() :].any(), "zeros behind, which change no scale"
        named = [(p.name, p.offset, p.numel) for p in row if p.numel and p.name]
        assert named == [
            (f"p{n}", rank * chunk, part.numel())
            for n, (part, chunk) in enumerate(zip(parts, chunks, strict=True))
            if part.numel()
        ]
        assert sum(piece.numel for piece in row) == shard.numel()
    short = [shard.numel() for shard in shards]
    assert short[:-1] == short[:1] * (ranks - 1), "one launch takes them all"
