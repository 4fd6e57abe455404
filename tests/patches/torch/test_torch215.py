"""Features of FSDP2 and DDP in torch 2.14 and 2.15, against native; older releases lack them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import hybridcomp
from tests.patches.torch.trainer import digest
from tests.ranks import run_ranks

WIDTH = 32
B4: dict[str, Any] = {"codec": "blockint", "bits": 4, "error_feedback": True}
B8: dict[str, Any] = {"codec": "blockint", "bits": 8}
QUIET: dict[str, Any] = {"min_bytes": 0, "ledger": {"every": 1_000_000}}
LOSSLESS: dict[str, Any] = {"dp": {"codec": "mpc"}, "zero": {"codec": "mpc"}}
LOSSY: dict[str, Any] = {"dp": B4, "zero": B8}

if not hasattr(FSDPModule, "set_manual_backward_finalization"):
    pytest.skip("torch 2.15 is the first with this", allow_module_level=True)


class Layers(nn.Module):
    """Three layers, the middle one optional."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, values: torch.Tensor, every: bool = True) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            if every or place != 1:
                values = torch.tanh(layer(values))
        return values


def sharded(**given: Any) -> Any:
    torch.manual_seed(0)
    model: Any = Layers()
    for layer in model.layers if not given.pop("one_group", False) else ():
        fully_shard(layer, **given)
    return fully_shard(model, **given)


def data(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator)


def trained(model: Any, block: dict[str, Any] | None, passes: Any = None) -> tuple[str, Any]:
    """Return the parameters' digest after three steps, and the attached parts."""
    attached = None if block is None else hybridcomp.attach(model, {**QUIET, **block})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        (passes or plain)(model, number)
        optimizer.step()
        optimizer.zero_grad()
    return digest(model), attached


def plain(model: Any, number: int) -> None:
    model(data(number)).square().mean().backward()


# ---- FSDP2: set_manual_backward_finalization


def finalized(model: Any, number: int) -> None:
    """Run two micro-batches, the first without the middle layer, with manual finalization."""
    model.set_manual_backward_finalization(True)
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        model(data(2 * number + micro), micro == 1).square().mean().backward()
    model.finalize_backward(async_op=True).wait()


def by_hand() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, block in (("native", None), ("lossless", LOSSLESS), ("lossy", LOSSY)):
        model, attached = trained(sharded(), block, finalized)
        found[name] = (model, 0 if attached is None else attached.step)
    return found


def test_gradients_that_are_reduced_by_hand() -> None:
    for found in run_ranks(2, by_hand):
        assert found["lossless"] == (found["native"][0], 3)
        assert found["lossy"][0] != found["native"][0] and found["lossy"][1] == 3


# ---- FSDP2: set_keep_unsharded_storage


def kept() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for keep in (False, True):
        for name, block in (("native", None), ("lossless", LOSSLESS), ("lossy", LOSSY)):
            model = sharded()
            model.set_keep_unsharded_storage(keep)
            weights, attached = trained(model, block)
            wire = 0.0
            if attached is not None:
                wire = attached.channels.ledger.interval["zero", "forward"].wire_nbytes
            found[f"{name} {keep}"] = (weights, wire)
    return found


def test_unsharded_parameters_that_are_kept_are_gathered_as_ever() -> None:
    for found in run_ranks(2, kept):
        assert found["lossless True"] == found["lossless False"]
        assert found["lossy True"] == found["lossy False"]
        assert found["native True"] == found["native False"]
        assert found["lossless True"][0] == found["native True"][0] != found["lossy True"][0]


def stepped(keep: bool, number: int, way: str) -> dict[str, Any]:
    """Return weights after training in bf16 with stepcode and natively, and the gathers."""
    found: dict[str, Any] = {}
    steps = {"zero": {"codec": "stepcode", "resync_every": number}}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for name, block in (("native", None), ("steps", steps)):
        given: dict[str, Any] = {"mp_policy": policy}
        if way == "columns":
            given["shard_placement_fn"] = lambda p: Shard(p.dim() - 1)
        model = sharded(one_group=way == "one group", **given)
        model.set_keep_unsharded_storage(keep)
        attached = None if block is None else hybridcomp.attach(model, {**QUIET, **block})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses = []
        for step in range(4):
            if way == "resync" and step == 2 and attached is not None and dist.get_rank() == 0:
                hybridcomp.resync(model)
            if way == "written" and step == 2 and attached is not None and dist.get_rank() == 1:
                (group,) = model.layers[1]._get_fsdp_state()._fsdp_param_groups
                group.fsdp_params[0].all_gather_outputs[0].zero_()
            loss = model(data(step)).float().square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        found[name] = (digest(model), losses)
        if attached is not None:
            entry = attached.channels.ledger.interval["zero", "forward"]
            found["gathers"] = (entry.messages, entry.native)
            found["bytes"] = (entry.raw_nbytes, entry.wire_nbytes)
    return found


@pytest.mark.parametrize(
    ("way", "native"),
    # a forward and a backward gather of every layer and step; the first sends the reference
    [("layers", 3), ("one group", 1), ("columns", 3), ("resync", 6), ("written", 4)],
)
def test_kept_parameters_are_what_steps_are_taken_from(way: str, native: int) -> None:
    for found in run_ranks(2, stepped, True, 0, way):
        assert found["steps"] == found["native"]
        messages, left = found["gathers"]
        assert left == native < messages
        raw, wire = found["bytes"]
        assert wire < raw


def test_kept_parameters_are_gathered_exactly_every_so_often() -> None:
    for found in run_ranks(2, stepped, True, 2, "layers"):
        assert found["steps"] == found["native"]
        messages, left = found["gathers"]
        assert left == messages / 2


# ---- FSDP2: messages in the order of their dtypes, sums that wait


def of_mixed_dtypes() -> dict[str, Any]:
    """Order shards by their gradients' dtypes within a message: 0, 2, then 1."""
    found: dict[str, Any] = {}
    for name, block in (("native", None), ("lossless", LOSSLESS), ("lossy", LOSSY)):
        torch.manual_seed(0)
        model: Any = Layers()
        model.layers[1].weight.grad_dtype = torch.bfloat16
        fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        weights, attached = trained(model, block, by_dtype)
        found[name] = weights
        if attached is not None:
            found["residuals"] = attached.channels.residuals.norm()
    return found


def by_dtype(model: Any, number: int) -> None:
    """Run a pass; return whether torch sends as this test expects."""
    model(data(number)).square().mean().backward()
    (group,) = model._get_fsdp_state()._fsdp_param_groups
    order = group._reduce_scatter_param_indices
    assert order == [0, 1, 3, 4, 5, 2], order


def test_gradients_of_two_dtypes_in_one_group() -> None:
    for found in run_ranks(2, of_mixed_dtypes):
        assert found["native"] == found["lossless"] != found["lossy"] and found["residuals"] > 0


def waiting(model: Any, number: int) -> None:
    """Reduce replicas after the second micro-batch, which skips a layer of the first."""
    for micro in range(2):
        model.set_requires_all_reduce(micro == 1)
        model(data(2 * number + micro), micro == 0).square().mean().backward()


def replicas() -> dict[str, str]:
    found = {}
    for name, block in (("native", None), ("lossless", {"dp": {"codec": "mpc"}}),
                        ("lossy", {"dp": B4, "hierarchy": "none"})):  # fmt: skip
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        found[name] = trained(sharded(mesh=mesh, one_group=True), block, waiting)[0]
    return found


def test_a_parameter_whose_gradient_waits_for_the_replicas_is_in_the_next_message() -> None:
    for found in run_ranks(4, replicas):
        assert found["native"] == found["lossless"] != found["lossy"]


# ---- DDP: lazy_bucket_allocation, require_manual_backward_finalization


def ddp(**given: Any) -> Any:
    torch.manual_seed(0)
    model: Any = DistributedDataParallel(Layers(), bucket_cap_mb=0.003, **given)
    return model


def finalized_ddp(model: Any, number: int) -> None:
    model.require_manual_backward_finalization = True
    plain(model, number)
    model.finalize_backward()


def of_ddp() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, block in (("native", None), ("lossless", {"dp": {"codec": "mpc"}}),
                        ("lossy", {"dp": B4})):  # fmt: skip
        found[name] = [
            trained(ddp(**given), block, passes)[0]
            for given in ({}, {"lazy_bucket_allocation": True}, {"batched_grad_copy": True})
            for passes in (plain, finalized_ddp)
        ]
    return found


def test_ddp_with_lazy_buckets_and_finalized_by_hand() -> None:
    for found in run_ranks(2, of_ddp):
        assert found["native"] == found["lossless"]
        assert len(set(found["lossy"])) == 1 and found["lossy"][0] != found["native"][0]
