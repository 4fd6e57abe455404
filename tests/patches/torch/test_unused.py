"""DDP discards the sum of a parameter that no rank used: its residual is unchanged."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

import hybridcomp
from hybridcomp.channels.residuals.saved_residuals import held_in
from tests.ranks import RunRanks
from tests.selection import by_day

CODECS: dict[str, dict[str, Any]] = {
    "blockint": {"codec": "blockint", "bits": 3, "error_feedback": True},
    "powersgd": {"codec": "powersgd", "rank": 1},
}


class Gated(nn.Module):
    """An optional layer between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 40)

    def forward(self, values: Tensor, extra: bool) -> Tensor:
        values = self.first(values)
        values = values + self.extra(values) if extra else values
        found: Tensor = self.last(values)
        return found


def missing(attached: Any) -> dict[str, Tensor]:
    """Return the residuals' sum over the ranks, by name."""
    found = {name: torch.zeros(p.numel()) for name, p in Gated().named_parameters()}
    for name, (offset, values) in held_in(attached.channels.residuals.state_dict()):
        found[name][offset : offset + values.numel()] += values
    for values in found.values():
        dist.all_reduce(values)
    return found


def kept(codec: str, hierarchy: int | str, used: list[tuple[bool, ...]]) -> list[float]:
    """Return, per step of ``used``, applied plus residuals minus the gradients."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Gated(), find_unused_parameters=True, bucket_cap_mb=0.005)
    block = {"dp": CODECS[codec], "min_bytes": 0, "hierarchy": hierarchy, "ledger": {"every": 999}}
    attached = hybridcomp.attach(model, block)
    rank, off = dist.get_rank(), []
    before = missing(attached)
    for step, of_rank in enumerate(used):
        generator = torch.Generator().manual_seed(100 * step + rank)
        values = torch.randn(8, 40, generator=generator)
        plain = Gated()
        plain.load_state_dict(model.module.state_dict())
        plain(values, of_rank[rank]).square().mean().backward()
        model.zero_grad()
        model(values, of_rank[rank]).square().mean().backward()
        after, worst = missing(attached), 0.0
        for (name, one), other in zip(
            model.module.named_parameters(), plain.parameters(), strict=True
        ):
            given = torch.zeros_like(one) if other.grad is None else other.grad.clone()
            dist.all_reduce(given)
            applied = torch.zeros_like(one) if one.grad is None else one.grad
            left = given / len(of_rank) + (before[name] - after[name]).view_as(one) - applied
            worst = max(worst, float(left.norm() / (1e-6 + before[name].norm() + given.norm())))
        off.append(worst)
        before = after
    return off


#: codec and levels; factors are summed in one level
CASES: list[tuple[str, int | str]] = [("blockint", 2), ("powersgd", "none"), ("blockint", "none")]


@pytest.mark.parametrize(("codec", "hierarchy"), by_day(CASES, CASES[:2]))
def test_nothing_goes_with_a_sum_that_is_thrown_away(
    codec: str, hierarchy: int | str, on_ranks: RunRanks
) -> None:
    every, nobody = (True,) * 4, (False,) * 4
    used = [every, nobody, (False, True, False, False), nobody, nobody, every]
    for off in on_ranks(4, kept, codec, hierarchy, used):
        assert max(off) < 1e-4, off


def lost(used: list[bool]) -> str:
    """Return the messages of a run whose guard gives up after the second of the steps ``used``."""
    guarded = {**CODECS["blockint"], "guard": {"residual": 1e-3}}
    model = DistributedDataParallel(Gated(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ledger = {"every": 999, "sample_every": 1}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        hybridcomp.attach(model, {"dp": guarded, "min_bytes": 0, "ledger": ledger})
        for extra in used:
            optimizer.zero_grad()
            model(torch.randn(8, 40), extra).square().mean().backward()
            optimizer.step()
    hybridcomp.detach(model)
    return said.getvalue()


def test_what_a_fallback_cannot_send_is_told(on_ranks: RunRanks) -> None:
    """The step that sends residuals uses the layer in the first run, but not in the second."""
    words = r"dp: what error feedback held back, of norm [\d.e-]+ on rank 0 after step 3, goes into"
    for used, count in (([True] * 4, 0), ([True, True, False, True], 1)):
        said, silent = on_ranks(2, lost, used)
        assert "native from step 2 on" in said and silent == ""
        assert len(re.findall(words, said)) == count, said


def left_behind() -> tuple[int, int]:
    """Record gradients by hooks on parameters: attached, and detached."""
    model = DistributedDataParallel(Gated(), find_unused_parameters=True)
    hybridcomp.attach(model, {"dp": CODECS["blockint"], "ledger": {"every": 999}})
    counts = [sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())]
    hybridcomp.detach(model)
    counts += [sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())]
    return counts[0], counts[1]


def test_a_detached_model_notes_no_gradients(on_ranks: RunRanks) -> None:
    assert on_ranks(2, left_behind) == [(6, 0)] * 2


def one_layer(zeros: bool) -> list[Any]:
    """Train one layer of a group by a method, natively and encoded; return the gradients."""
    found: list[Any] = []
    for block in (None, {"dp": {"codec": "mpc"}, "min_bytes": 0, "ledger": {"every": 999}}):
        torch.manual_seed(0)
        model: Any = fully_shard(Gated())
        model.loss = lambda values, model=model: model.extra(values).square().mean()
        register_fsdp_forward_method(model, "loss")
        if zeros:
            model.set_reduce_scatter_unused_params(True)
        if block is not None:
            hybridcomp.attach(model, block)
        model.loss(torch.ones(2, 40) * (1 + dist.get_rank())).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        found.append([None if one is None else one.to_local().tolist() for one in gradients])
    hybridcomp.detach(model)
    return found


@pytest.mark.parametrize("zeros", [False, True])
def test_a_group_of_which_a_method_uses_one_layer(zeros: bool, on_ranks: RunRanks) -> None:
    """``register_fsdp_forward_method`` calls no hook of the module."""
    if zeros and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip("this torch reduces no zeros")
    for native, encoded in on_ranks(2, one_layer, zeros):
        assert native == encoded
        assert [one is None for one in native].count(True) == (0 if zeros else 4)
