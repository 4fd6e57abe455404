"""Trials of delta gathers send alternating real deltas, not the same message repeatedly."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp import collectives
from hybridcomp.autotune import timing
from hybridcomp.autotune.trials import StepTraffic, TrialGroup, gathers
from hybridcomp.codecs import make_codec
from hybridcomp.collectives import Group
from hybridcomp.errors import PeerError
from hybridcomp.job.together import together as as_one
from tests.ranks import RunRanks, run_ranks

NUMELS = (4000, 4000, 10000)


def sent_in_trials(together: bool) -> list[tuple[float, bool, bool]]:
    """Return bits per value, whether all ranks received it, whether it is new, by message."""
    where = TrialGroup(Group.of(None), torch.bfloat16, torch.device("cpu"))
    native, coded = gathers(make_codec("stepcode"), where)(StepTraffic(NUMELS, "gather", together))
    gathers_seen: list[tuple[Tensor, Tensor, Any]] = []
    plain = collectives.all_gather

    def noted(shard: Tensor, out: Tensor, via: Any, async_op: bool = False) -> Any:
        gathers_seen.append((shard, out, via.meter))
        return plain(shard, out, via, async_op)

    results, before = [], dict[int, Tensor]()
    with patch.object(collectives, "all_gather", noted):
        for run in (coded, coded, native, coded, native, native, coded, coded):
            run()
            for index, (shard, out, meter) in enumerate(gathers_seen):
                bits = 8 * meter.wire_nbytes / shard.numel()
                arrived = torch.empty_like(out)
                dist.all_gather_into_tensor(arrived, shard)
                moved = index not in before or not torch.equal(before[index], out)
                results.append((bits, torch.equal(arrived, out), moved))
                before[index] = out.clone()
            gathers_seen.clear()
    return results


@pytest.mark.parametrize("together", [False, True])
def test_trials_send_steps(on_ranks: RunRanks, together: bool) -> None:
    for results in on_ranks(2, sent_in_trials, together):
        assert len(results) == 5 * len(NUMELS)
        assert all(arrived for _, arrived, _ in results)
        assert all(bits < 4 for bits, *_ in results), "a step of two values in five"
        assert all(moved for *_, moved in results[: 2 * len(NUMELS)])


def fails_to_prepare() -> None:
    """Rank 1 lacks memory for the second trial, so rank 0 may not start a message."""
    where = TrialGroup(Group.of(None), torch.float32, torch.device("cpu"))
    trial = gathers(make_codec("blockint"), where)
    begun: list[StepTraffic] = []

    def trials(sent: StepTraffic) -> Any:
        begun.append(sent)
        if len(begun) == 2 and dist.get_rank() == 1:
            raise RuntimeError("no memory is left")
        return trial(sent)

    sent = StepTraffic((1 << 22,), "gather")
    with (
        patch.object(timing, "SURE", 1e9),
        patch.object(timing, "BUDGET_S", 1e9),
        patch.object(timing, "REPEATS", (1, 1)),
        pytest.raises(PeerError, match=r"attaching: rank 1: .*no memory is left"),
        as_one("attaching"),
    ):
        timing.judge(trials, sent, 4, torch.device("cpu"), True)
    assert len(begun) == 2


def test_a_rank_that_cannot_prepare_a_trial_leaves_nobody_waiting() -> None:
    run_ranks(2, fails_to_prepare)
