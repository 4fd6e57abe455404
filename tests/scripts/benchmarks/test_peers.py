"""scripts/benchmarks/peers: errors, bytes, error feedback and replicas of the peer methods."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.peers import gathers, hooks, reductions
from benchmarks.peers.blocks import SIDE, Blocks, turn
from benchmarks.peers.flat import Flat
from benchmarks.peers.methods import PEERS, Settings
from benchmarks.peers.wire import Nodes, Wire
from tests.paths import SCRIPTS
from tests.ranks import RankPool
from tests.selection import by_day

ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
COUNT = 1 << 12


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


# ---- blocks


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rotate", [False, True])
def test_blocks_are_off_by_half_a_level_at_most(bits: int, rotate: bool) -> None:
    blocks = Blocks(bits, 128, rotate)
    values = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    values[1, 128:256] = 0.0
    message = blocks.encode(values)
    assert message.shape == (3, blocks.row_nbytes(1000)) == (3, 1024 * bits // 8 + 4 * 8)
    error = blocks.decode(message, 1000) - values
    padded = torch.nn.functional.pad(values, (0, 24))
    seen = turn(padded) if rotate else padded
    limit = seen.view(3, -1, 128).abs().amax(2) / blocks.top / 2
    squared = torch.nn.functional.pad(error, (0, 24)).view(3, -1, 128).square().sum(2)
    assert (squared <= 128 * limit.square() * 1.0001).all()
    if not rotate:
        assert (error.abs() <= limit.repeat_interleave(128, 1)[:, :1000] * 1.0001).all()
        assert not error[1, 128:256].any()


def test_rotation_is_orthogonal_and_helps_with_outliers() -> None:
    values = torch.randn(1, 32 * 128, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(turn(turn(values)), values, atol=1e-5)
    assert torch.allclose(turn(values).norm(), values.norm())
    values[0, ::SIDE] *= 30
    plain, rotated = (Blocks(4, 128, rotate) for rotate in (False, True))
    errors = [b.decode(b.encode(values), 4096) - values for b in (plain, rotated)]
    small = values.abs() < 5
    assert errors[1].norm() < errors[0].norm()
    assert errors[1][small].norm() < errors[0][small].norm()


# ---- sums


def reduce_once(name: str, per_node: int) -> tuple[float, float, int]:
    """Return the relative error of this rank's shard of the average, bytes sent, length."""
    wire = Wire()
    generator = torch.Generator().manual_seed(dist.get_rank())
    values = torch.randn(COUNT, generator=generator)
    share = getattr(reductions, name)(wire, Nodes(per_node)).reduce(values)
    exact = values.clone()
    dist.all_reduce(exact)
    exact = exact.view(dist.get_world_size(), -1)[dist.get_rank()] / dist.get_world_size()
    return float((share - exact).norm() / exact.norm()), wire.sent, len(share)


@pytest.mark.parametrize("name", ["qgz", "sdp4bit"])
@pytest.mark.parametrize("per_node", by_day([1, 2, 4], [2]))
def test_sums_are_close_and_every_rank_has_its_own_share(
    four: RankPool, name: str, per_node: int
) -> None:
    low = {"qgz": 4, "sdp4bit": 8}[name]
    share = COUNT // 4
    expected = 0
    if per_node > 1:
        expected += (per_node - 1) * Blocks(low, 128).row_nbytes(share * 4 // per_node)
    if per_node < 4:
        expected += (4 // per_node - 1) * Blocks(4, 128).row_nbytes(share)
    for error, sent, length in four.run(reduce_once, name, per_node):
        assert length == share and sent == expected
        levels = 0.12 if name == "sdp4bit" and per_node == 4 else 0.3
        assert 1e-4 < error < levels


# ---- weights


def gather_all() -> list[tuple[float, float, list[float]]]:
    """Return for each gather: error after 8 steps, bytes per step, sum of the weights."""
    found = []
    start = torch.linspace(-1, 1, COUNT)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    makers: list[Any] = [
        lambda wire: gathers.Native(wire, torch.float32),
        lambda wire: gathers.Native(wire, torch.bfloat16),
        gathers.QwZ,
        lambda wire: gathers.Differences(wire, start),
    ]
    for make in makers:
        wire, weights = Wire(), start.clone()
        gather = make(wire)
        for step in range(8):
            moved = torch.randn(COUNT, generator=torch.Generator().manual_seed(step))
            weights = weights + 1e-3 * moved
            got = gather.gather(weights.view(ranks, -1)[rank])
        sums = torch.zeros(ranks)
        dist.all_gather_into_tensor(sums, got.double().sum().float().view(1))
        found.append((float((got - weights).norm() / weights.norm()), wire.sent / 8, sums.tolist()))
    return found


def test_gathers(two: RankPool) -> None:
    for found in two.run(gather_all):
        errors, sent, sums = zip(*found, strict=True)
        assert errors[0] == 0 and errors[1] < 3e-3 and errors[2] < 6e-3
        # differences are small, so 4 bits of them beat 8 bits of the weights, without drift
        assert errors[3] < 3e-4
        half, groups = COUNT // 2, COUNT // 2 // 128
        assert sent == (4 * half, 2 * half, half + 4 * groups, half // 2 + 4 * groups)
        assert all(len(set(values)) == 1 for values in sums)


# ---- all methods on one small model


def fit(name: str, steps: int) -> tuple[list[float], float, float]:
    """Return losses of a regression, this rank's bytes, and the sum of the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32))
    wire = Wire()
    method = PEERS[name].make(model, wire, Settings(1, 1.0, ADAM))
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(64, 64, generator=generator)
    targets = torch.tanh(inputs[:, :32] * 2)
    losses = []
    for _ in range(steps):
        loss = nn.functional.mse_loss(method.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        method.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / 2)
    return losses, wire.sent, float(Flat(model.parameters(), 2).weights().double().sum())


def test_all_learn_alike_and_replicas_stay_equal(two: RankPool) -> None:
    steps = 40
    native = steps * 4 * (64 * 128 + 128 + 128 * 32 + 32)  # an all-reduce in fp32
    for name, share in {"qgz": 0.57, "qgz-qwz": 0.21, "sdp4bit": 0.14}.items():
        (losses, sent, weights), (_, _, others) = two.run(fit, name, steps)
        assert weights == others, name
        assert losses[-1] < losses[0] / 3, name
        assert 0.01 * native < sent <= share * native, (name, sent / native)


def test_power_sgd_waits_for_a_tenth_of_the_run_and_more_than_one_step() -> None:
    assert [hooks.start_iteration(steps) for steps in (5, 100, 1000)] == [2, 10, 100]


def test_nodes_must_be_whole(two: RankPool) -> None:
    with pytest.raises(AssertionError, match="--per-node 3: expected a divisor of the 2 ranks"):
        two.run(Nodes, 3)


def test_files_that_the_trainer_does_not_follow() -> None:
    from gpt import ds_file

    with pytest.raises(ds_file.SettingsError, match="expected AdamW, found 'Lamb'"):
        ds_file.adam_of({"optimizer": {"type": "Lamb"}})
    with pytest.raises(ds_file.SettingsError, match="optimizer.params.freeze_step"):
        ds_file.adam_of({"optimizer": {"type": "AdamW", "params": {"freeze_step": 1}}})
    config = json.loads((SCRIPTS.parent / "configs/ds_zero1_baseline.json").read_text())
    assert ds_file.adam_of(config)["betas"] == (0.9, 0.95)
