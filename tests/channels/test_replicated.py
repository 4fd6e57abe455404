"""Small parameters replicated over tensor ranks are summed exactly, independent of neighbours."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import Channels
from hybridcomp.channels.residuals.pieces import Piece, cut
from hybridcomp.channels.residuals.replicated import Stretch, stretches_of
from hybridcomp.codecs import make_codec
from hybridcomp.collectives import OwnedRange
from hybridcomp.config import CompressionConfig
from tests.channels import sent
from tests.ranks import RunRanks

NUMEL = 2000
#: blocks of 32 straddle all these borders
PIECES = [Piece("up", 0, 1011), Piece("norm", 0, 45), Piece("down", 0, 900), Piece("bias", 0, 44)]
COMMON = [(1011, 1056), (1956, 2000)]
BLOCK = {"dp": {"codec": "blockint", "bits": 4, "error_feedback": True}, "min_bytes": 0}


def values(seed: int, rank: int) -> Tensor:
    """Return the gradient of ``rank``; ``seed`` changes all but the replicated parameters."""
    found = torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * seed + rank))
    common = torch.randn(NUMEL, generator=torch.Generator().manual_seed(7 + rank))
    for low, high in COMMON:
        found[low:high] = common[low:high]
    return found


def reduce(kind: str, names: frozenset[str], steps: int) -> list[tuple[list[Tensor], int]]:
    """Return sums and bytes sent of this rank, for two sets of neighbours."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    codec, found = make_codec("blockint", bits=4), []
    for seed in (0, 1):
        channels = Channels(CompressionConfig.parse(BLOCK))
        channels.common, channel = names, channels["dp"]
        assert channel.handling(codec).by_parameter
        for _ in range(steps):  # residuals must not leak between neighbours either
            tensor = values(seed, rank)
            if kind == "all_reduce":
                sent.all_reduce(channel, tensor, codec, None, pieces=PIECES).wait()
                sums = [tensor]
            elif kind == "reduce_scatter":
                half = NUMEL // world_size
                pieces = [cut(PIECES, r * half, (r + 1) * half) for r in range(world_size)]
                shards = list(torch.split(tensor, half))
                handle = sent.reduce_scatter(channel, shards, codec, None, pieces=pieces)
                sums = [handle.wait()]
            else:
                ranges = [OwnedRange(0, 1030, (0,)), OwnedRange(1030, NUMEL, (1,))]
                sums = sent.reduce_to_owners(channel, tensor, ranges, codec, None, pieces=PIECES)
        found.append((sums, int(channels.ledger.interval["dp", "forward"].wire_nbytes)))
    return found


@pytest.mark.parametrize("small", [True, False], ids=["exact", "too large"])
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "to_owners"])
def test_common_parameters_do_not_see_their_neighbours(
    kind: str, small: bool, on_ranks: RunRanks
) -> None:
    """Small ones are exact as well."""
    names = frozenset({"norm", "bias"} if small else {"some other"})
    exact = values(0, 0) + values(0, 1)
    starts = {"all_reduce": (0, 0), "reduce_scatter": (0, 1000), "to_owners": (0, 1030)}[kind]
    seen = 0
    for start, found in zip(starts, on_ranks(2, reduce, kind, names, 3), strict=True):
        first, second = (sums[0] for sums, _ in found)
        own = exact[start : start + len(first)]
        for low, high in COMMON:
            here = slice(max(0, low - start), max(0, min(len(first), high - start)))
            assert torch.equal(first[here], second[here])
            assert torch.equal(first[here], own[here]) or not small
            seen += len(first[here])
        assert not torch.equal(first, second) and not torch.equal(first, own)
    assert seen == (2 if kind == "all_reduce" else 1) * 89


def test_without_them_neighbours_matter(on_ranks: RunRanks) -> None:
    """Without exact sums neighbours matter; with them it costs four bytes a value, and padding."""
    lossy = on_ranks(2, reduce, "all_reduce", frozenset(), 1)[0]
    assert any(not torch.equal(lossy[0][0][0][a:b], lossy[1][0][0][a:b]) for a, b in COMMON)
    exact = on_ranks(2, reduce, "all_reduce", frozenset({"norm", "bias"}), 1)[0]
    assert 0 <= exact[0][1] - lossy[0][1] - 89 * 4 <= 2 * len(PIECES) * 32


def test_lossless_codecs_need_none_of_it() -> None:
    channels = Channels(CompressionConfig.parse({"dp": "mpc"}))
    channels.common = frozenset({"norm"})
    assert not channels["dp"].handling(make_codec("mpc")).by_parameter
    assert channels["dp"].handling(make_codec("blockint", bits=8)).by_parameter


def test_stretches() -> None:
    pieces = [[Piece("a", 0, 3), Piece("n", 0, 2)], [Piece("n", 2, 1), Piece("", 0, 4)]]
    assert stretches_of(pieces, {"n"}) == [Stretch(0, 3, 5), Stretch(1, 0, 1)]
    assert stretches_of(pieces, {"m"}) == []
