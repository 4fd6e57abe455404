"""Replaced slots of torch: bytes, errors, exact gathers, loss scales, automatic attaching."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.nn.parallel import DistributedDataParallel

import hybridcomp
from hybridcomp.errors import AgreementError, ConfigError
from hybridcomp.patches.torch import auto_attach, steps
from hybridcomp.patches.torch.attach import ATTRIBUTE
from hybridcomp.session import process
from tests.patches.torch.trainer import Job, build, optimizer_of, train
from tests.ranks import RunRanks
from tests.selection import by_day

B8: dict[str, Any] = {"codec": "blockint", "bits": 8}
B4: dict[str, Any] = {"codec": "blockint", "bits": 4, "error_feedback": True}
QUIET = {"ledger": {"every": 1_000_000}, "min_bytes": 0}


def wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3)))


def once(model: nn.Module) -> None:
    """Run a forward and a backward pass."""
    model(torch.randn(2, 512)).square().mean().backward()


def bytes_of(model: nn.Module) -> dict[str, tuple[float, float]]:
    attached = hybridcomp.attach(model)
    assert attached is not None
    rows = attached.channels.ledger.interval.items()
    return {key[0]: (entry.raw_nbytes, entry.wire_nbytes) for key, entry in rows if entry.messages}


def count_bytes() -> dict[str, Any]:
    """Return raw and wire bytes of a pass of each engine, on this rank."""
    sharded = wide()
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    hybridcomp.attach(sharded, {"dp": {**B4, "bits": 4}, "zero": B8, **QUIET})
    replicated = DistributedDataParallel(wide())
    hybridcomp.attach(replicated, {"dp": B4, **QUIET})
    for model in (sharded, replicated):
        once(model)
    return {"fsdp2": bytes_of(sharded), "ddp": bytes_of(replicated)}


@pytest.mark.parametrize("world_size", by_day([2, 4], [4]))
def test_bytes_have_their_closed_form(module_ranks: RunRanks, world_size: int) -> None:
    """4 or 8 bits a value and 8 bits a block of 32, of a ring's fp32 bytes."""
    numel, share = 3 * 512 * 512, (world_size - 1) / world_size
    for found in module_ranks(world_size, count_bytes):
        raw, wire = found["fsdp2"]["dp"]
        assert raw == numel * 4 * share
        assert wire == pytest.approx(numel * 4.25 / 8 * share, rel=0.01)
        raw, wire = found["fsdp2"]["zero"]  # forward and backward, as layers are resharded
        assert raw == 2 * numel * 4 * share
        assert wire == pytest.approx(2 * numel * 8.25 / 8 * share, rel=0.01)
        raw, wire = found["ddp"]["dp"]
        assert raw == pytest.approx(2 * numel * 4 * share)
        assert wire == pytest.approx(2 * numel * 4.25 / 8 * share, rel=0.01)


def sharded(**given: Any) -> nn.Module:
    model = wide()
    fully_shard(model, **given)
    return model


def hooked() -> nn.Module:
    model = DistributedDataParallel(wide())
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model.register_comm_hook(None, fp16_compress_hook)
    return model


def twice() -> nn.Module:
    model = DistributedDataParallel(wide())
    hybridcomp.attach(model, {"dp": B8})
    return model


def custom() -> nn.Module:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

    class Mine(DefaultAllGather):
        pass

    model: Any = sharded()
    model.set_custom_all_gather(Mine())
    return model  # type: ignore[no-any-return]


def symmetric() -> nn.Module:
    """Set the model's state as ``set_symm_mem_for_comm`` would, which needs NCCL."""
    kind: Any = _fsdp_collectives.SymmMemAllGather
    model: Any = sharded()
    comm = kind.__new__(kind)
    model._get_fsdp_state()._fsdp_param_groups[0]._all_gather_comm = comm
    return model  # type: ignore[no-any-return]


def cut() -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = wide()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(use_local_output=False)})
    fully_shard(model, mesh=mesh["dp"])
    return model


def replicated_mesh() -> nn.Module:
    return sharded(mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))


def ddp() -> nn.Module:
    return DistributedDataParallel(wide())


def empty() -> Any:
    model = wide()
    fully_shard(model, ignored_params=set(model.parameters()))
    return model


#: model, block, what the error names
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "several hooks": (hooked, {"dp": B8}, "another communication hook"),
    "attached twice": (twice, {"dp": B8}, "a second block"),
    "zero under DDP": (ddp, {"dp": B8, "zero": B8}, "compression.zero"),
    "tp under DDP": (ddp, {"dp": B8, "tp": B8}, "compression.tp"),
    "deltas": (sharded, {"zero": {**B8, "delta": True}}, "delta"),
    "steps": (sharded, {"zero": "stepcode"}, "stepcode"),
    "low rank": (sharded, {"dp": {"codec": "powersgd", "rank": 2}}, "powersgd"),
    "pp under FSDP2": (sharded, {"pp": B8}, "compression.pp"),
    "tp without cuts": (sharded, {"tp": B8}, "compression.tp"),
    "tp through DTensor": (cut, {"tp": B8}, "functional collectives"),
    "cut layers": (cut, {"zero": B8}, "tensor parallel"),
    "custom all-gather": (custom, {"zero": B8}, "set_custom_all_gather"),
    "symmetric memory": (symmetric, {"zero": B8}, "set_symm_mem_for_comm"),
    "nodes": (replicated_mesh, {"dp": B8, "hierarchy": 2}, "compression.hierarchy"),
    "levels": (replicated_mesh, {"dp": B8, "hierarchy": [2, 2]}, "compression.hierarchy"),
    "no shards": (replicated_mesh, {"dp": B8, "zero": B8}, "compression.zero"),
    "neither": (wide, {"dp": B8}, "DistributedDataParallel"),
    "no parameters": (empty, {"dp": B8}, "fully_shard shards no parameter of it"),
}
if not hasattr(_fsdp_collectives, "SymmMemAllGather"):  # torch 2.11 and older
    del REFUSED["symmetric memory"]


def refusals() -> dict[str, str]:
    found = {}
    for name, (make, block, _) in REFUSED.items():
        model = make()
        try:
            hybridcomp.attach(model, block)
        except ConfigError as error:
            found[name] = str(error)
    return found


def test_what_cannot_act_is_refused(module_ranks: RunRanks) -> None:
    for found in module_ranks(2, refusals):
        assert set(found) == set(REFUSED)
        for name, (_, _, named) in REFUSED.items():
            assert named in found[name], (name, found[name])


def wholly_frozen() -> int:
    """Attach a model that was frozen after it was wrapped, such as a reference model."""
    model = ddp().requires_grad_(False)
    attached = hybridcomp.attach(model, {"dp": B8, **QUIET})
    assert attached is not None
    model(torch.randn(2, 512))
    hybridcomp.detach(model)
    return attached.step


def test_a_model_of_which_nothing_trains_is_attached(module_ranks: RunRanks) -> None:
    assert module_ranks(2, wholly_frozen) == [0, 0]


def other_blocks() -> str:
    with pytest.raises(AgreementError) as caught:
        hybridcomp.attach(ddp(), {"dp": {**B8, "bits": 8 - dist.get_rank()}})
    return str(caught.value)


def test_ranks_with_other_blocks_are_named(module_ranks: RunRanks) -> None:
    for found in module_ranks(2, other_blocks):
        assert "rank(s) 1 differ from rank 0" in found
        assert "compression.dp" in found


def unsharded_weights() -> dict[str, bool]:
    """Return whether parameters are exact: gathered by hand, and in a forward pass."""
    weight: Any = wide()[0].weight
    exact = weight.detach().clone()
    model: Any = sharded(reshard_after_forward=False)
    hybridcomp.attach(model, {"zero": {**B8, "bits": 4}, **QUIET})
    model.unshard()
    found = {"by hand": torch.equal(model[0].weight, exact)}
    model.reshard()
    model(torch.randn(2, 512))
    found["forward"] = torch.equal(model[0].weight, exact)
    model.reshard()
    handle = model.unshard(async_op=True)
    handle.wait()
    found["asynchronous"] = torch.equal(model[0].weight, exact)
    return found


def test_what_is_gathered_by_hand_is_exact(module_ranks: RunRanks) -> None:
    for found in module_ranks(2, unsharded_weights):
        assert found == {"by hand": True, "forward": False, "asynchronous": True}


def chunked_loss() -> list[bool]:
    """Return by step whether a head gathered by hand equals the forward pass's; exact at last."""
    model: Any = wide()
    fully_shard(model[2])
    fully_shard(model, reshard_after_forward=False)
    hybridcomp.attach(model, {"zero": {**B8, "bits": 4}, **QUIET})
    optimizer, head = torch.optim.SGD(model.parameters(), lr=0.1), model[2]
    seen: list[torch.Tensor] = []
    head.register_forward_pre_hook(lambda module, _: seen.append(module.weight.detach().clone()))
    found = []

    def keep(kept: bool) -> None:
        head.set_reshard_after_backward(not kept)
        head.set_requires_gradient_sync(not kept, recurse=False)

    for _ in range(3):
        output = model(torch.randn(2, 512))
        keep(True)
        head.unshard()
        found.append(torch.equal(head.weight, seen[-1]))
        keep(False)
        head.reshard()
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    exact = head.weight.full_tensor()
    keep(True)
    head.unshard()
    return [*found, torch.equal(head.weight, exact)]


def test_a_head_that_is_gathered_for_a_loss_in_chunks_is_the_forward_pass_s(
    module_ranks: RunRanks,
) -> None:
    assert module_ranks(2, chunked_loss) == [[True] * 4] * 2


def asynchronous_gathers() -> bool:
    """Check that gathers awaited through the handle equal synchronous ones."""
    weights = []
    for is_async in (False, True):
        model: Any = sharded(reshard_after_forward=False)
        model._set_unshard_async_op(is_async)
        hybridcomp.attach(model, {"zero": B8, **QUIET})
        model(torch.randn(2, 512))
        weights.append(model[0].weight.detach().clone())
    return torch.equal(*weights)


def test_asynchronous_gathers(module_ranks: RunRanks) -> None:
    assert module_ranks(2, asynchronous_gathers) == [True, True]


def scaled() -> dict[str, Any]:
    """Return residuals when the loss scale grows, and after a skipped step."""
    model = ddp()
    attached = hybridcomp.attach(model, {"dp": B4, **QUIET})
    assert attached is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    found: dict[str, Any] = {}

    def step(factor: float) -> None:
        scaler.scale(model(torch.ones(2, 512)).square().mean() * factor).backward()
        scaler.step(optimizer)
        optimizer.zero_grad()

    step(1.0)
    before = attached.channels.residuals.norm()
    scaler.update()
    found["grown"] = attached.channels.residuals.norm() / before
    step(float("inf"))
    found["skipped"] = attached.channels.residuals.norm()
    found["steps"] = attached.step
    scaler.update()
    step(1.0)
    found["after"] = attached.channels.residuals.norm()
    steps.forget_all()
    return found


def test_residuals_follow_the_loss_scale(module_ranks: RunRanks) -> None:
    for found in module_ranks(2, scaled):
        assert found["grown"] == pytest.approx(2.0)
        assert found["skipped"] == 0.0
        assert found["steps"] == 1
        assert 0 < found["after"] < float("inf")


def by_themselves() -> dict[str, Any]:
    """Run models that are never attached explicitly, in an armed process with a block."""
    found: dict[str, Any] = {}
    early = ddp()
    process.configure({"dp": B8, **QUIET})
    auto_attach.arm()
    once(early)
    found["early"] = vars(early)[ATTRIBUTE] is not None
    for engine in ("ddp", "fsdp2"):
        job = Job(engine=engine)
        model = build(job)
        assert ATTRIBUTE not in vars(model)
        train(job, model, optimizer_of(job, model), 0, 3)
        attached = vars(model)[ATTRIBUTE]
        entry = attached.channels.ledger.interval["dp", "forward"]
        found[engine] = (attached.step, entry.messages > 0, entry.native)
    late = hooked()
    try:
        once(late)
    except ConfigError as error:
        found["hooked"] = str(error)
    process.configure(None)
    native = ddp()
    once(native)
    found["no block"] = vars(native)[ATTRIBUTE]
    auto_attach.disarm()
    plain = ddp()
    once(plain)
    found["disarmed"] = ATTRIBUTE in vars(plain)
    return found


def test_models_attach_by_themselves(module_ranks: RunRanks) -> None:
    for found in module_ranks(2, by_themselves):
        assert found["ddp"] == found["fsdp2"] == (3, True, 0)
        assert "another communication hook" in found["hooked"]
        assert found["early"]
        assert found["no block"] is None
        assert found["disarmed"] is False
