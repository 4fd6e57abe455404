"""Rare cases: expert meshes, parameters on the host, ``replicate``, ``join``, damage."""

from __future__ import annotations

import copy
import io
import pickle
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.nn.parallel import DistributedDataParallel

import hybridcomp
from hybridcomp.errors import CheckpointError, ConfigError
from hybridcomp.patches.torch import auto_attach
from hybridcomp.session import process
from tests.patches.torch.trainer import digest, square_step, squares
from tests.ranks import RunRanks

WIDTH = 64
B4: dict[str, Any] = {"codec": "blockint", "bits": 4, "error_feedback": True}
LOSSLESS = {"codec": "mpc"}
QUIET: dict[str, Any] = {"min_bytes": 0, "ledger": {"every": 1_000_000}}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def trained(model: Any, block: dict[str, Any] | None) -> tuple[list[float], str, Any]:
    return squares(model, block, WIDTH)


def wire_of(attached: Any, name: str) -> float:
    return float(attached.channels.ledger.interval[name, "forward"].wire_nbytes)


# ---- expert meshes


def with_experts(replicas: int = 1) -> Any:
    """Make the middle layer an expert: one on ranks 0, 2 and another on 1, 3, sharded over two."""
    model: Any = layers()
    whole = init_device_mesh("cpu", (4,))
    if replicas > 1:
        whole = init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("r", "s"))
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "expert"))
    torch.manual_seed(1 + experts["expert"].get_local_rank())
    nn.init.normal_(model[1].weight, std=0.1)
    expert: Any = fully_shard(model[1], mesh=experts["shard"])
    expert.set_gradient_divide_factor(4.0)
    expert.set_force_sum_reduction_for_comms(True)  # gloo cannot scale before a sum
    return fully_shard(model, mesh=whole)


def experts(folder: Path) -> dict[str, Any]:
    native = trained(with_experts(), None)[:2]
    lossless = trained(with_experts(), {"zero": LOSSLESS})[:2]
    model = with_experts()
    losses, _, attached = trained(model, {"dp": B4, "zero": {"codec": "blockint", "bits": 8}})
    hybridcomp.save_state(folder)
    names = set(attached.channels.residuals.state_dict()["sender"])
    before = attached.channels.residuals.norm()
    attached.channels.residuals.drop()
    hybridcomp.load_state(folder)
    return {
        "identity": native == lossless, "losses": (native[0], losses),
        "wire": wire_of(attached, "dp"), "names": names, "layout": attached.layout,
        "norms": (before, attached.channels.residuals.norm()),
        "hsdp": wire_of(trained(with_experts(2), {"dp": B4})[2], "dp"),
    }  # fmt: skip


def test_meshes_of_experts(module_ranks: RunRanks, tmp_path: Path) -> None:
    """Each mesh has separate bytes, and residuals of different experts are separate."""
    found = module_ranks(4, experts, tmp_path)
    whole, part = 2 * (WIDTH * WIDTH + WIDTH), WIDTH * WIDTH + WIDTH
    numel = whole * 3 / 4 + part / 2
    for rank, one in enumerate(found):
        assert one["identity"] and one["norms"][0] > 0
        assert one["norms"][1] == pytest.approx(one["norms"][0])
        native, lossy = one["losses"]
        assert lossy == pytest.approx(native, rel=0.05) and lossy != native
        assert one["wire"] == pytest.approx(3 * numel * 4.25 / 8, rel=0.05)
        # native inside a shard group, encoded between replicas; the expert has no replicas and
        # stays as it was
        encoded = whole / 2 + part / 2
        assert one["hsdp"] == pytest.approx(3 * (whole / 2 * 4 + encoded * 4.25 / 8), rel=0.01)
        ranks = f"{rank % 2}, {rank % 2 + 2}"
        assert {"0.weight", f"1.weight on ranks {ranks}"} <= one["names"]
        assert one["layout"]["meshes"] == [[2, 1], [4, 1]]


# ---- a shared object for the meshes of many layers


def shared_mesh(shared: bool) -> Any:
    """Train two shards of two replicas; layers share torch's mesh object, or have separate ones.

    Torch accepts a layer's parameters on different meshes only from ``shard_placement_fn``, and
    then requires the same object in all groups of a mesh.
    """
    from torch.distributed.tensor import Shard

    model: Any = layers()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    given: dict[str, Any] = {"mesh": mesh}
    if shared:
        info = _fsdp_common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        result = _fsdp_common.ShardPlacementResult(Shard(0), info)
        given["shard_placement_fn"] = lambda parameter: result
    for layer in model:
        fully_shard(layer, **given)
    return fully_shard(model, mesh=mesh)


def on_shared_mesh() -> dict[str, Any]:
    found: dict[str, Any] = {"native": trained(shared_mesh(True), None)[:2]}
    blocks: dict[str, dict[str, Any]] = {"lossless": {"dp": LOSSLESS}, "lossy": {"dp": B4}}
    for name, block in blocks.items():
        block["hierarchy"] = "none"
        both = [trained(shared_mesh(shared), block) for shared in (False, True)]
        found[name] = [(*one[:2], wire_of(one[2], "dp")) for one in both]
    return found


def test_layers_that_share_the_object_of_their_mesh(module_ranks: RunRanks) -> None:
    """Each group has separate residuals and bytes, whoever else holds the object."""
    if not hasattr(_fsdp_common, "ShardPlacementResult"):
        pytest.skip("this torch has one mesh for all parameters of a layer")
    for found in module_ranks(4, on_shared_mesh):
        assert found["lossless"][1][:2] == found["native"]
        assert found["lossy"][0] == found["lossy"][1] and found["lossy"][1][:2] != found["native"]


# ---- one rank


def alone() -> tuple[int, int]:
    """Count steps without any messages, with two micro-batches each."""
    model: Any = fully_shard(layers())
    block = {"dp": B4, "zero": LOSSLESS, "on_unsupported": "native", **QUIET}
    attached = hybridcomp.attach(model, block)
    assert attached is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        model(torch.ones(2, WIDTH)).square().mean().backward()
        square_step(model, optimizer, number, WIDTH)
    counted = attached.step
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    optimizer.step()
    return counted, attached.step


def test_steps_of_one_rank_are_counted(module_ranks: RunRanks) -> None:
    assert module_ranks(1, alone) == [(3, 3)]


# ---- parameters on the host


def offloaded(is_offloaded: bool) -> Any:
    model = layers()
    given: Any = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if is_offloaded else {}
    for layer in model:
        fully_shard(layer, **given)
    return fully_shard(model, **given)


def on_host() -> dict[str, Any]:
    native = trained(offloaded(False), None)[:2]
    lossless = trained(offloaded(True), {"zero": LOSSLESS})[:2]
    lossy = [
        trained(offloaded(on), {"dp": B4, "zero": {"codec": "blockint"}}) for on in (False, True)
    ]
    return {
        "identity": native == lossless,
        "as without": lossy[0][:2] == lossy[1][:2],
        "wire": wire_of(lossy[1][2], "zero"),
    }


def test_parameters_on_the_host(module_ranks: RunRanks) -> None:
    """CPUOffloadPolicy does not change messages."""
    for found in module_ranks(2, on_host):
        assert found["identity"] and found["as without"] and found["wire"] > 0


# ---- replicate


def replicas() -> dict[str, Any]:
    """Use FSDP's ``replicate``, a mesh of replicas; the ``replicate`` around DDP is refused."""
    native = trained(replicate_with_fsdp(layers()), None)[:2]
    lossless = trained(replicate_with_fsdp(layers()), {"dp": {"codec": "mpc"}})
    lossy = trained(replicate_with_fsdp(layers()), {"dp": B4})[2]
    found: dict[str, Any] = {
        "identity": native == lossless[:2],
        "wire": (wire_of(lossy, "dp"), lossy.step),
    }
    with pytest.raises(ConfigError) as caught:
        hybridcomp.attach(replicate(layers()), {"dp": B4})
    found["composable"] = str(caught.value)
    process.configure({"dp": B4, **QUIET})
    auto_attach.arm()
    with pytest.raises(ConfigError) as caught:
        replicate(layers())(torch.ones(2, WIDTH))
    process.configure({"dp": B4, **QUIET, "on_unsupported": "native"})
    replicate(layers())(torch.ones(2, WIDTH))
    process.configure(None)
    replicate(layers())(torch.ones(2, WIDTH))
    auto_attach.disarm()
    return {**found, "unasked": str(caught.value)}


def test_replicate(module_ranks: RunRanks) -> None:
    numel = 3 * (WIDTH * WIDTH + WIDTH)
    for found in module_ranks(2, replicas):
        assert found["identity"]
        assert found["wire"] == (pytest.approx(3 * numel * 4.25 / 8, rel=0.05), 3)
        assert "replicate" in found["composable"] and "replicate" in found["unasked"]


# ---- join


def joined() -> dict[str, Any]:
    """Give rank 0 three batches and rank 1 five; then two more to both.

    Torch does not announce that these follow the context.
    """
    found: dict[str, Any] = {}
    for name, codec in (("native", None), ("lossless", LOSSLESS), ("lossy", B4)):
        model = DistributedDataParallel(layers())
        attached = None
        if codec is not None:
            block = {"dp": codec, **QUIET, "ledger": {"every": 2, "sample_every": 1}}
            attached = hybridcomp.attach(model, block)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for number in range(3 + 2 * dist.get_rank()):
                square_step(model, optimizer, number, WIDTH)
        for number in range(2):
            square_step(model, optimizer, number, WIDTH)
        found[name] = (digest(model), 0 if attached is None else attached.step)
    return found


def test_ranks_that_join_early(module_ranks: RunRanks) -> None:
    """Shadow passes are encoded like others; steps of only some ranks are not counted."""
    one, other = module_ranks(2, joined)
    assert one == other
    assert one["native"] == one["lossless"] == (one["native"][0], 0)
    assert one["lossy"][0] != one["native"][0] and one["lossy"][1] == 0


# ---- files


def damaged(folder: Path) -> list[str]:
    """Return every rank's error about a damaged file, and about a missing one."""
    model = DistributedDataParallel(layers())
    trained(model, {"dp": B4})
    hybridcomp.save_state(folder)
    said = []
    for harm in (_flip, Path.unlink):
        if dist.get_rank() == 0:
            harm(next(folder.glob("hybridcomp_model_*_rank_00001.pt")))
        dist.barrier()
        with pytest.raises(CheckpointError) as caught:
            hybridcomp.load_state(folder)
        said.append(str(caught.value))
    return said


def _flip(path: Path) -> None:
    found = bytearray(path.read_bytes())
    found[len(found) // 2] ^= 1
    path.write_bytes(found)


def test_damaged_files_are_an_error_on_every_rank(module_ranks: RunRanks, tmp_path: Path) -> None:
    for first, second in module_ranks(2, damaged, tmp_path):
        assert "rank 1" in first and "is damaged" in first
        assert "rank 1" in second and "found no hybridcomp_model_" in second


def copied(is_pickled: bool) -> tuple[str, bool, float, list[str]]:
    torch.manual_seed(0)
    block = {"dp": {"codec": "blockint", "bits": 4}, "min_bytes": 0}
    model = DistributedDataParallel(nn.Linear(64, 64))
    first = hybridcomp.attach(model, block)
    assert first is not None
    said = io.StringIO()
    with redirect_stdout(said):
        clone = pickle.loads(pickle.dumps(model)) if is_pickled else copy.deepcopy(model)
    values = torch.randn(8, 64) * (1 + dist.get_rank())

    def gradient() -> Tensor:
        clone.zero_grad()
        clone(values).square().sum().backward()
        found: Tensor = clone.module.weight.grad
        return found.clone()

    native = gradient()
    assert not first.is_open, "a pass of the copy counts for the model"
    mean = torch.empty_like(native)
    dist.all_reduce(mean.copy_(native))
    attached = hybridcomp.attach(clone, block)
    assert attached is not None
    error = float((gradient() - native).abs().max() / native.abs().max())
    entries = attached.channels.ledger.interval.items()
    sent = [str(name) for (name, _), entry in entries if entry.messages]
    return said.getvalue(), torch.equal(mean, 2 * native), error, sent


@pytest.mark.parametrize("is_pickled", [False, True], ids=["deepcopy", "pickle"])
def test_a_copy_of_an_attached_model_is_native_and_says_so(
    module_ranks: RunRanks, is_pickled: bool
) -> None:
    """Torch copies DDP's list of hooks, but not the hook: an attached copy gets its own."""
    first, _ = module_ranks(2, copied, is_pickled)
    said, same, error, sent = first
    assert ("unpickled model" if is_pickled else "the copy") + " sends natively" in said and same
    assert 0 < error < 0.2 and sent == ["dp"]
