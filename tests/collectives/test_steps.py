"""All-gathers of deltas: decoded where the reference is, for every way of sending sizes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp import collectives
from hybridcomp.codecs import make_codec
from hybridcomp.codecs.exact_steps import typical_steps
from hybridcomp.collectives import Group, Meter, Transfer, all_gather_all_to_all
from hybridcomp.collectives.wire import chunking, message_rounds
from hybridcomp.kernels.cuda import CudaKernels
from tests.collectives.hierarchical.test_two_levels import levels_of
from tests.collectives.late import late, sizes_ahead
from tests.kernels.cuda.common import kernels_replaced
from tests.kernels.cuda.emulated import EmulatedLauncher, emulated
from tests.ranks import RunRanks

NUMEL = 9001
WAYS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "sizes in front": nullcontext,
    "sizes ahead": sizes_ahead,
    "sizes on a device": late,
}


def versions(rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a rank's old and new values, including NaN and zeros of both signs."""
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)).to(dtype)
    values[::997], values[1::1003], values[2::1009] = float("nan"), -0.0, float("-inf")
    return values, typical_steps(values, seed=rank)


def gathered(dtype: torch.dtype, way: str, nodes: int, edges: tuple[int, ...]) -> tuple[int, int]:
    """Gather three times, alternating; return messages and bytes of this rank."""
    me, ranks = dist.get_rank(), dist.get_world_size()
    group = Group.of(None) if nodes == 1 else Group.of(None, levels=levels_of(nodes))
    codec, meter = make_codec("stepcode"), Meter()
    every = [versions(rank, dtype) for rank in range(ranks)]
    out = torch.cat([before for before, _ in every])
    with WAYS[way]():
        for turn in range(3):
            held, now = every[me][turn % 2], every[me][1 - turn % 2]
            mine = out[me * NUMEL : (me + 1) * NUMEL]
            shard = mine.copy_(now) if turn else now.clone()
            # at first the reference is in ``out``, where the shard goes
            via = Transfer(codec.against(held if turn else mine), group, meter, edges)
            collectives.all_gather(shard, out, via, async_op=turn == 2).wait()
            expected = torch.cat([pair[1 - turn % 2] for pair in every])
            assert torch.equal(out.view(torch.int16), expected.view(torch.int16))
    return meter.messages, meter.wire_nbytes


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_rank_gets_every_bit(on_ranks: RunRanks, dtype: torch.dtype, way: str) -> None:
    for _, nbytes in on_ranks(3, gathered, dtype, way, 1, ()):
        assert nbytes < 3 * 2 * 2 * NUMEL / 3, "of two bytes a value at most a third is sent"


def test_cut_messages_and_nodes(on_ranks: RunRanks) -> None:
    on_ranks(3, gathered, torch.bfloat16, "sizes in front", 1, (1, 4097, 9000))
    on_ranks(4, gathered, torch.bfloat16, "sizes in front", 2, ())


def in_rounds(values: int) -> int:
    """Gather in rounds of at least so many values; return this rank's rounds."""
    with (
        mock.patch.multiple(message_rounds, ROUND=values, HALF=values),
        mock.patch.object(chunking, "SEGMENT_ALIGN", 512),
        mock.patch.object(
            all_gather_all_to_all, "_gather_round", side_effect=all_gather_all_to_all._gather_round
        ) as rounds,
    ):
        gathered(torch.bfloat16, "sizes in front", 1, ())
    return rounds.call_count


def test_rounds_take_their_part_of_what_is_held(on_ranks: RunRanks) -> None:
    """Their rounds are four times as long as others'."""
    assert on_ranks(2, in_rounds, 1024) == [3 * 2] * 2
    assert on_ranks(2, in_rounds, NUMEL // 4 + 1) == [3] * 2


def on_device() -> tuple[int, int]:
    with kernels_replaced(CudaKernels(EmulatedLauncher())):
        return gathered(torch.bfloat16, "sizes on a device", 1, ())


def test_with_the_kernels_of_a_device(on_ranks: RunRanks) -> None:
    emulated("stepcode.cu")  # built once, or skipped
    on_ranks(2, on_device)
