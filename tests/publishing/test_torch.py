"""FSDP2, HSDP and DDP: exact versions of the shards, rounded if a policy rounds them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import hybridcomp
from hybridcomp.publishing import Publisher
from tests.patches.torch.trainer import Job, build, optimizer_of, train
from tests.publishing.made import NIGHTLY, error_of, launch, received, same
from tests.ranks import RunRanks

STEPS = 1000 if NIGHTLY else 6


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return whole parameters, rounded to bf16."""
    found = {}
    for name, parameter in model.named_parameters():
        local: Any = parameter.detach()
        value = local.full_tensor() if isinstance(local, DTensor) else local
        found[name.removeprefix("module.")] = value.to(torch.bfloat16).clone()
    return found


def published(job: Job, folder: Path) -> list[str]:
    """Train with and without a publisher; return the differences."""
    native = build(job)
    expected = train(job, native, optimizer_of(job, native), 0, STEPS)
    model = build(job)
    optimizer = optimizer_of(job, model)
    publisher = hybridcomp.publish(model, folder)
    receiver = hybridcomp.WeightReceiver(folder)
    wrong, losses = [], []
    for step in range(STEPS):
        if step == STEPS // 2:
            publisher.close()
            publisher = hybridcomp.publish(model, folder)
        losses += train(job, model, optimizer, step, step + 1)
        summary = publisher.publish()
        receiver.update()
        if not same(receiver, whole(model)) or summary.full != (step % 100 == 0):
            wrong.append(f"step {step}: {summary}")
        dist.barrier()
    publisher.close()
    return wrong if losses == expected else [*wrong, f"{losses} {expected}"]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("world_size", "job"),
    [
        (2, Job("ddp", bf16=True)),
        (2, Job("fsdp2", bf16=True)),
        pytest.param(2, Job("fsdp2", bf16=True, reshard=False), marks=pytest.mark.nightly),
        pytest.param(4, Job("fsdp2", bf16=True, replicas=2), marks=pytest.mark.nightly),
        pytest.param(4, Job("fsdp2", bf16=True), marks=pytest.mark.nightly),
    ],
    ids=["ddp", "fsdp2", "unsharded", "hsdp", "four"],
)
def test_versions_are_what_the_model_computes_with(
    on_ranks: RunRanks, tmp_path: Path, world_size: int, job: Job
) -> None:
    assert launch(on_ranks, world_size, published, job, tmp_path) == [[]] * world_size


class Tied(nn.Module):
    """An embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 7, bias=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight


def tied(folder: Path) -> list[Any]:
    """Publish a bf16 model with tied weights, sharded along dimension 1, wrapped or not."""
    torch.manual_seed(3)
    model = Tied().to(torch.bfloat16)
    fully_shard(model, shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))
    publisher = hybridcomp.publish(model, folder)
    publisher.publish()
    for parameter in model.parameters():
        with torch.no_grad():
            local: Any = parameter
            local.to_local().view(torch.int16).add_(1)
    summary = publisher.publish()
    receiver = received(folder)
    dist.barrier()
    return [summary.full, dict(receiver.aliases), same(receiver, whole(model))]


def test_tied_weights_come_once_and_columns_are_rows_of_a_stretch(
    on_ranks: RunRanks, tmp_path: Path
) -> None:
    expected = [False, {"head.weight": "embedding.weight"}, True]
    assert on_ranks(2, tied, tmp_path) == [expected] * 2


class One(nn.Module):
    """A model with one parameter."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())


def odd_layouts(folder: Path) -> None:
    """Publish parameters with noncontiguous values, of which a rank may hold one."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(64, generator=generator).to(torch.bfloat16)
    layouts = {
        "empty": values[:0].view(0, 4), "one": values[:1], "strided": values[:9:2],
        "one strided": values[:1].as_strided((1,), (7,)), "transposed": values[:42].view(6, 7).t(),
        "channels last": values[:48].view(2, 3, 2, 4).to(memory_format=torch.channels_last),
        "two of a storage": values[10:20],
    }  # fmt: skip
    for name, layout in layouts.items():
        model = nn.parallel.DistributedDataParallel(nn.ModuleList([One(layout), One(values[:3])]))
        publisher = hybridcomp.publish(model, folder / name)
        for factor in (1.0, 2.0):
            with torch.no_grad():
                layout.mul_(factor)
            publisher.publish()
            dist.barrier()
            assert same(received(folder / name), whole(model)), name
            dist.barrier()


def test_odd_layouts_are_published_as_they_are(on_ranks: RunRanks, tmp_path: Path) -> None:
    on_ranks(2, odd_layouts, tmp_path)


def no_numbers(folder: Path) -> list[str]:
    """Publish parameters that bf16 cannot hold: complex, integers, bools, packed bits."""
    told = []
    for dtype in (torch.complex64, torch.int64, torch.bool, torch.uint8):
        model = DistributedDataParallel(
            nn.ModuleList([One(torch.ones(5).to(dtype)), One(torch.ones(5))])
        )
        told.append(error_of(partial(hybridcomp.publish, model, folder, dtype="bf16")))
    return told


def test_values_that_are_no_floating_point_numbers_are_refused(
    on_ranks: RunRanks, tmp_path: Path
) -> None:
    for told in on_ranks(2, no_numbers, tmp_path):
        for text, kind in zip(told, ("complex64", "int64", "bool", "uint8"), strict=True):
            assert text.startswith(f"publish: found 0.weight of {kind}; 16-bit floating")


def refused(publisher: Publisher, text: str) -> bool:
    told = error_of(publisher.publish)
    return text in told and "make a new publisher" in told


def other_parameters(folder: Path) -> list[bool]:
    """Change a weight's dtype, object, shape or name after the first version."""
    found = []

    def check(number: int, change: Callable[[Any], object], text: str) -> None:
        net: Any = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))).to(torch.bfloat16)
        net[2].bias = net[0].bias
        model = DistributedDataParallel(net)
        publisher = hybridcomp.publish(model, folder / str(number))
        publisher.publish()
        change(net)
        found.append(refused(publisher, f"rank 0: {text}"))

    def swapped(net: Any) -> None:
        net[1].weight = nn.Parameter(net[1].weight.detach().clone())

    def assigned(net: Any) -> None:
        net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)

    def reshaped(net: Any) -> None:
        net[0].weight.data = net[0].weight.data.reshape(12, 3)

    check(0, lambda net: net.half(), "0.bias: expected (6,) of bfloat16, found (6,) of float16")
    check(1, swapped, "1.weight: it is another Parameter than when this publisher was made")
    check(2, assigned, "0.bias: it is another Parameter")
    check(3, reshaped, "0.weight: expected (6, 6) of bfloat16, found (12, 3) of bfloat16")
    check(4, lambda net: net.append(nn.Linear(2, 2)), "3.bias: it is new")
    check(5, lambda net: setattr(net[1], "bias", net[0].bias), "1.bias: it is gone, or tied")
    tied = "2.bias: it is tied to another parameter than it was"
    check(6, lambda net: setattr(net[2], "bias", net[1].bias), tied)
    return found


def other_shards(folder: Path) -> list[bool]:
    """Do the same under FSDP2, whose modules hold a parameter sharded or gathered."""
    found = []
    for number in range(3):
        net: Any = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(torch.bfloat16)
        fully_shard(net, reshard_after_forward=number != 1)
        publisher = hybridcomp.publish(net, folder / f"sharded{number}")
        net(torch.ones(2, 6, dtype=torch.bfloat16)).sum().backward()
        publisher.publish()
        if number == 0:
            net.half()
            text = "of torch.float16 by now"
        else:
            net[1].weight = nn.Parameter(torch.ones(6, 6, dtype=torch.bfloat16))
            text = "1.weight: it is another Parameter than when fully_shard was called"
        found.append(refused(publisher, text))
    return found


def test_other_parameters_are_refused_by_name(on_ranks: RunRanks, tmp_path: Path) -> None:
    assert on_ranks(2, other_parameters, tmp_path) == [[True] * 7] * 2
    assert on_ranks(2, other_shards, tmp_path) == [[True] * 3] * 2
