"""Saved state identifies its model: a restart loads its own, whatever else was in the process."""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hybridcomp
from hybridcomp.errors import CheckpointError, ConfigError
from hybridcomp.job import saved
from hybridcomp.patches.torch.attached import Attached
from hybridcomp.patches.torch.state.identity import identity_of, with_plain_names
from tests.patches.torch.trainer import Job, build, optimizer_of, train
from tests.ranks import RunRanks
from tests.selection import by_day

DP: dict[str, Any] = {
    "dp": {"codec": "blockint", "bits": 3, "error_feedback": True},
    "min_bytes": 0,
    "ledger": {"every": 1_000_000},
}
JOBS = {"DDP": Job(engine="ddp"), "FSDP2": Job()}


def attached(model: nn.Module) -> Attached:
    found = hybridcomp.attach(model, DP)
    assert found is not None
    return found


def trained(job: Job, steps: int) -> Any:
    model = build(job)
    attached(model)
    train(job, model, optimizer_of(job, model), 0, steps)
    return model


def state_of(model: nn.Module) -> tuple[int, float]:
    found = hybridcomp.attach(model)
    assert found is not None
    return found.step, found.channels.residuals.norm()


def are(models: Sequence[nn.Module], states: Sequence[tuple[int, float]]) -> bool:
    """Return whether models have these states; norms add up in another order after a load."""
    rows = zip(map(state_of, models), states, strict=True)
    return all(a[0] == b[0] and math.isclose(a[1], b[1], rel_tol=1e-14) for a, b in rows)


def rebuilt(job: Job, folder: Path) -> dict[str, Any]:
    """Drop earlier models; return a model's state before saving, and another's after loading it."""
    gc.disable()  # the first models are not collected by chance
    first = trained(job, 1)
    hybridcomp.save_state(folder / "first")
    del first
    second = trained(job, 3)
    found: dict[str, Any] = {"saved": state_of(second)}
    hybridcomp.save_state(folder / "second")
    found["files"] = sorted(path.name for path in (folder / "second").iterdir())
    del second
    third = build(job)
    attached(third)
    hybridcomp.load_state(folder / "second")
    found["loaded"] = state_of(third)
    gc.enable()
    return found


@pytest.mark.parametrize("name", by_day(JOBS, ["DDP"]))
def test_a_model_that_died_before_is_no_matter(
    module_ranks: RunRanks, name: str, tmp_path: Path
) -> None:
    for found in module_ranks(2, rebuilt, JOBS[name], tmp_path):
        step, norm = found["saved"]
        assert step == 3 and norm > 0
        assert found["loaded"] == (3, pytest.approx(norm))
        assert len(found["files"]) == 2 and found["files"][0].endswith("_00_rank_00000.pt")


def wrapped(engine: str, folder: Path) -> list[bool]:
    """Save and load with other wrappers around a layer; return whether the next sums are equal."""
    found = []
    for before, after in ((checkpoint_wrapper, None), (None, torch.compile)):
        sums = []
        for is_first, wrap in ((True, before), (False, after)):
            torch.manual_seed(0)
            layer: Any = nn.Linear(24, 24)
            layer = layer if wrap is None else wrap(layer)
            model: Any = nn.Sequential(layer)
            model = DistributedDataParallel(model) if engine == "ddp" else fully_shard(model)
            state = attached(model)
            if is_first:
                model(torch.ones(2, 24) * (1 + dist.get_rank())).square().mean().backward()
                torch.optim.SGD(model.parameters(), lr=0.0).step()
                hybridcomp.save_state(folder)
                dist.barrier()
            else:
                hybridcomp.load_state(folder)
            model.zero_grad()
            model(torch.ones(2, 24)).square().mean().backward()
            own: Any = [parameter.grad for parameter in model.parameters()]
            sums.append([getattr(one, "_local_tensor", one).tolist() for one in own])
            assert state.step == 1
            hybridcomp.detach(model)
        found.append(sums[0] == sums[1])
    return found


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_wrappers_of_layers_may_change(module_ranks: RunRanks, engine: str, tmp_path: Path) -> None:
    assert module_ranks(2, wrapped, engine, tmp_path) == [[True, True]] * 2


def linear(width: int) -> nn.Module:
    torch.manual_seed(width)
    return DistributedDataParallel(nn.Linear(width, 64))


def step(model: nn.Module, width: int) -> None:
    model(torch.randn(2, width)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def several(folder: Path) -> dict[str, Any]:
    """Load files of two equal models and a different one; return the results."""
    found: dict[str, Any] = {}
    models = [linear(8), linear(32), linear(8)]
    for model in models:
        attached(model)
    for times, (model, width) in enumerate(zip(models, (8, 32, 8), strict=True), start=1):
        for _ in range(times):
            step(model, width)
    hybridcomp.save_state(folder)
    states = [state_of(model) for model in models]
    for model in models:
        hybridcomp.detach(model)
    # in another order, except for equal ones
    again = [linear(8), linear(8), linear(32)]
    for model in again:
        attached(model)
    hybridcomp.load_state(folder)
    found["again"] = are(again, [states[0], states[2], states[1]])
    hybridcomp.detach(again[0])
    found["one of two"] = refused(folder)
    found["untouched"] = are(again[1:], [states[2], states[1]])
    hybridcomp.detach(again[1])
    hybridcomp.load_state(folder)  # the others stay where they are
    hybridcomp.detach(again[2])
    other = attached(linear(16))
    found["another"] = refused(folder)
    with pytest.raises(ConfigError) as caught:
        other.load_state_dict(saved_part(32))
    found["part"] = str(caught.value)
    hybridcomp.load_state(folder / "empty")
    found["empty"] = (other.step, other.channels.residuals.norm())
    return found


def saved_part(width: int) -> dict[str, Any]:
    """Return the entry that ``torch.distributed.checkpoint`` would store for another model."""
    model = linear(width)
    part = attached(model).state_dict()
    hybridcomp.detach(model)
    return part


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        hybridcomp.load_state(folder)
    return str(caught.value)


def test_state_of_other_models_is_refused(module_ranks: RunRanks, tmp_path: Path) -> None:
    for found in module_ranks(2, several, tmp_path):
        assert found["again"] and found["untouched"]
        assert "the state of 2 models" in found["one of two"]
        assert "attached 1 of them" in found["one of two"]
        assert "the state of another model" in found["another"]
        assert "this one is" in found["part"] and "the state of" in found["part"]
        assert found["empty"] == (0, 0.0)
        assert all("\n" not in found[name] for name in ("one of two", "another", "part"))


def swapped(folder: Path) -> list[str]:
    """Return the load error of two ranks' swapped files; older files do not identify the rank."""
    found = []
    model = linear(8)
    state = attached(model)
    for case in ("said", "not said"):
        step(model, 8)
        hybridcomp.save_state(folder)
        dist.barrier()
        if not dist.get_rank():
            first, second = sorted(folder.glob("*.pt"))
            held = [saved.read(second), saved.read(first)]
            for path, one in zip((first, second), held, strict=True):
                if case == "not said":
                    del one["rank"]
                saved.write(path, one)
        dist.barrier()
        before = state.channels.residuals.norm()
        try:
            hybridcomp.load_state(folder)
            found.append("")
        except CheckpointError as error:
            found.append(str(error))
            assert state.channels.residuals.norm() == before
    return found


def test_files_of_two_ranks_that_were_swapped_are_refused(
    module_ranks: RunRanks, tmp_path: Path
) -> None:
    for said, not_said in module_ranks(2, swapped, tmp_path):
        named = re.match(r"loading the state of hybridcomp: rank ([01]): .*'rank' cannot be ", said)
        assert named and f"rank_0000{named[1]}.pt" in said
        assert not_said == ""


def test_identity_is_that_of_names_and_shapes() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    same = identity_of(model)
    assert identity_of(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))) == same
    assert identity_of(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 6))) != same
    assert identity_of(nn.Sequential(*model, nn.Linear(1, 1))) != same
    model[0]._modules["_orig_mod"] = nn.Linear(3, 4)
    del model[0]._parameters["weight"], model[0]._parameters["bias"]
    assert identity_of(model) == same  # torch.compile's names


def test_names_of_earlier_versions_lose_their_wrappers() -> None:
    odd = {"between replicas: a._orig_mod.weight": 1.0}
    state = {"step": 2, "divisors": odd, "residuals": {"sender": odd, "owner": {}}}
    plain = {"between replicas: a.weight": 1.0}
    found = with_plain_names(state)
    assert found == {"step": 2, "divisors": plain, "residuals": {"sender": plain, "owner": {}}}
