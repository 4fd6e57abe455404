"""Sums of micro-batches inside the node under FSDP2, 4 ranks as 2 nodes: ``dp.accumulate``."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import hybridcomp
from hybridcomp.channels.residuals.node_sums import IDLE
from hybridcomp.errors import ConfigError
from tests.patches.torch.trainer import digest
from tests.ranks import RunRanks
from tests.selection import by_day
from tests.training.integers import USED, Integers

NODE = {"codec": "expcode", "accumulate": "node"}
BLOCK: dict[str, Any] = {"dp": NODE, "min_bytes": 0, "hierarchy": 2}


@dataclass
class Found:
    """A rank's results: parameters, whether anything was kept, bytes between nodes."""

    parameters: str
    kept: bool = False
    between: int = 0


def sharded(bf16: bool = False, replicas: int = 1) -> Any:
    """Return the model under ``fully_shard``, with a group per part."""
    torch.manual_seed(0)
    model: Any = Integers()
    shape: tuple[int, ...] = (dist.get_world_size(),)
    names: tuple[str, ...] = ("shard",)
    if replicas > 1:
        shape, names = (replicas, shape[0] // replicas), ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None)
    for part in model.parts.values():
        fully_shard(part, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def backward(model: Any, used: list[str], step: int, *, tells: bool = True) -> None:
    """Run a step's micro-batches; ``tells``: whether FSDP2 is told which is the last."""
    for number, names in enumerate(used):
        model.set_requires_all_reduce(number == len(used) - 1 or not tells)
        loss = model(names, 1000 * step + 10 * number + dist.get_rank())
        (loss / len(used)).backward()


def trained(block: dict[str, Any] | None, used: list[str], bf16: bool = False) -> Found:
    """Two steps."""
    model, kept = sharded(bf16), False
    attached = None if block is None else hybridcomp.attach(model, block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    for step in range(2):
        backward(model, used, step)
        if attached is not None:
            assert not attached.channels.node_sums.left, "all has crossed"
            kept = attached.channels.node_sums.has_kept
        optimizer.step()
        optimizer.zero_grad()
    found = Found(digest(model), kept)
    if attached is not None:
        found.between = int(attached.channels.ledger.interval["dp", "forward"].inter_nbytes)
        attached.detach()
    return found


def all_trained(jobs: list[tuple[Any, ...]]) -> list[Found]:
    return [trained(*job) for job in jobs]


@pytest.mark.parametrize("bf16", by_day([False, True], [True]))
@pytest.mark.parametrize("case", by_day(USED, ["some in the last alone"]))
def test_integers_are_summed_as_natively(module_ranks: RunRanks, case: str, bf16: bool) -> None:
    """For any used parameters, including entirely unused groups: the same bits."""
    jobs = [(block, USED[case], bf16) for block in (None, BLOCK)]
    for native, found in module_ranks(4, all_trained, jobs):
        assert found.parameters == native.parameters
        assert found.kept


def test_an_eighth_crosses(module_ranks: RunRanks) -> None:
    fixed = {"codec": "bf16"}
    blocks = [{**BLOCK, "dp": fixed}, {**BLOCK, "dp": {**fixed, "accumulate": "node"}}]
    jobs = [(block, USED["all"]) for block in blocks]
    ranks = module_ranks(4, all_trained, jobs)
    each, once = (sum(found[place].between for found in ranks) for place in (0, 1))
    assert each == 8 * once > 0


def gradients(model: Any) -> list[Any]:
    found = [p.grad for part in "ab" for p in model.parts[part].parameters()]
    return [None if one is None else one.full_tensor().tolist() for one in found]


def zeroed(block: dict[str, Any] | None) -> tuple[list[Any], list[str], int]:
    """Return gradients after an abandoned step; its optimizer's error; bytes kept at the end."""
    model, told = sharded(), []
    attached: Any = None if block is None else hybridcomp.attach(model, block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model.set_requires_all_reduce(False)
    model("ab", dist.get_rank()).backward()
    try:
        optimizer.step()
    except ConfigError as error:
        told.append(str(error))
    optimizer.zero_grad()
    model("a", dist.get_rank() + 10).backward()
    model.set_requires_all_reduce(True)
    model("a", dist.get_rank() + 20).backward()
    found = gradients(model)
    if attached is None:
        return found, told, 0
    model.set_requires_all_reduce(False)
    model("ab", dist.get_rank()).backward()
    kept = attached.channels.node_sums.nbytes
    attached.detach()
    assert kept > 0
    return found, told, attached.channels.node_sums.nbytes


def test_a_step_that_is_given_up_leaves_nothing(module_ranks: RunRanks) -> None:
    """``optimizer.step`` before any message raises; ``zero_grad`` and detaching free the sums."""
    runs = (module_ranks(4, zeroed, block) for block in (None, BLOCK))
    for native, found in zip(*runs, strict=True):
        assert found[0] == native[0]
        (told,) = found[1]
        assert "set_requires_all_reduce(True)" in told and not native[1] and not found[2]


def refused() -> str:
    with pytest.raises(ConfigError, match="HSDP") as error:
        hybridcomp.attach(sharded(replicas=2), BLOCK)
    return str(error.value)


def refused_of_ddp() -> str:
    with pytest.raises(ConfigError, match="DistributedDataParallel") as error:
        hybridcomp.attach(DistributedDataParallel(torch.nn.Linear(8, 8)), BLOCK)
    return str(error.value)


def test_engines_that_sum_micro_batches_themselves_are_refused_on_all_ranks(
    module_ranks: RunRanks,
) -> None:
    assert all("set_requires_all_reduce" in told for told in module_ranks(4, refused))
    assert all("no_sync()" in told for told in module_ranks(4, refused_of_ddp))


def idle() -> str:
    """Run two steps without announcing the last micro-batch; return what they print."""
    model, printed = sharded(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        attached: Any = hybridcomp.attach(model, BLOCK)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for step in range(2):
            backward(model, ["ab", "ab"], step, tells=False)
            optimizer.step()
    attached.detach()
    return printed.getvalue()


def test_a_step_with_nothing_to_sum_is_told_once(module_ranks: RunRanks) -> None:
    first, *others = module_ranks(4, idle)
    assert first.count(IDLE) == 1 and not any(IDLE in one for one in others)
