"""scripts/benchmarks/peers: errors, bytes, error feedback and replicas of the peer methods."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.peers import gathers, hooks, onebit, reductions, torchft_fp8
from benchmarks.peers.blocks import SIDE, Blocks, pack_signs, turn, unpack_signs
from benchmarks.peers.flat import Flat
from benchmarks.peers.methods import PEERS, Method, Settings
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
    errors = [(b.decode(b.encode(values), 4096) - values).norm() for b in (plain, rotated)]
    small = values.abs() < 5
    lost = [
        ((b.decode(b.encode(values), 4096) - values)[small] ** 2).mean() for b in (plain, rotated)
    ]
    assert errors[1] < errors[0] and lost[1] < lost[0]


def test_signs_come_back() -> None:
    values = torch.tensor([[1.0, -2.0, 0.0, -0.5, 3.0, -1.0, -1.0, 2.0] * 2])
    assert pack_signs(values).shape == (1, 2)
    assert torch.equal(unpack_signs(pack_signs(values)), torch.where(values >= 0, 1.0, -1.0))


# ---- sums


def gradients(step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(COUNT, generator=generator)


def reduce_once(name: str, per_node: int) -> tuple[float, float, int]:
    """Return the relative error of this rank's shard of the average, bytes sent, length."""
    wire = Wire()
    values = gradients()
    makers: dict[str, Any] = {
        "qgz": reductions.qgz, "loco": reductions.LoCo, "sdp4bit": reductions.sdp4bit,
    }  # fmt: skip
    share = makers[name](wire, Nodes(per_node)).reduce(values)
    exact = values.clone()
    dist.all_reduce(exact)
    exact = exact.view(dist.get_world_size(), -1)[dist.get_rank()] / dist.get_world_size()
    return float((share - exact).norm() / exact.norm()), wire.sent, len(share)


@pytest.mark.parametrize("name", ["qgz", "loco", "sdp4bit"])
@pytest.mark.parametrize("per_node", by_day([1, 2, 4], [2]))
def test_sums_are_close_and_every_rank_has_its_own_share(
    four: RankPool, name: str, per_node: int
) -> None:
    low = {"qgz": 4, "loco": 4, "sdp4bit": 8}[name]
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


def loco_sums(steps: int) -> tuple[float, float]:
    """Return the relative error of a repeated gradient's sum over steps: with LoCo, with qgZ."""
    values = gradients() * torch.linspace(0.01, 1.0, COUNT)
    errors = []
    for make in (reductions.LoCo, reductions.qgz):
        method: reductions.TwoLevel = make(Wire(), Nodes(1))
        total = sum((method.reduce(values) for _ in range(steps)), torch.zeros(COUNT // 2))
        exact = values.clone()
        dist.all_reduce(exact)
        exact = exact.view(2, -1)[dist.get_rank()] / 2 * steps
        errors.append(float((total - exact).norm() / exact.norm()))
    return errors[0], errors[1]


def test_loco_feeds_back_what_it_left_out(two: RankPool) -> None:
    for loco, plain in two.run(loco_sums, 60):
        assert loco < plain / 3


def loco_resets() -> list[bool]:
    method = reductions.LoCo(Wire(), Nodes(1), reset=2)
    rows, zero = gradients().view(2, -1), []
    for step in range(3):
        if step and step % 2 == 0:
            # as reduce does first
            assert method.steps == 2
        method.reduce(rows.reshape(-1))
        zero.append(bool(method.error("inter", rows).any()))
    fresh = reductions.LoCo(Wire(), Nodes(1))
    fresh.reduce(rows.reshape(-1))
    return [*zero, torch.equal(fresh.error("inter", rows), method.error("inter", rows))]


def test_loco_forgets_after_so_many_steps(two: RankPool) -> None:
    assert two.run(loco_resets) == [[True, True, True, True]] * 2


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


# ---- 1-bit Adam


def one_bit(frozen: int) -> tuple[float, float, float, list[float]]:
    """Return the averages' relative error; largest identity violation; bytes; digests."""
    wire = Wire()
    weights = nn.Parameter(torch.zeros(COUNT))
    owners = torch.arange(COUNT) // 600
    adam = onebit.OneBitAdam(weights, owners, wire, freeze=1)
    total, exact, gap = torch.zeros(COUNT), torch.zeros(COUNT), 0.0
    for step in range(frozen):
        values = gradients(step % 3)
        before = adam.worker_error.clone()
        message, decoded = adam._compress((values + before).view(2, -1), adam._segments)
        total += adam.average(values)
        gap = max(gap, float((decoded.view(-1) + adam.worker_error - values - before).abs().max()))
        mean = values.clone()
        dist.all_reduce(mean)
        exact += mean / 2
    sums = torch.zeros(2)
    dist.all_gather_into_tensor(sums, total.double().sum().float().view(1))
    error = float((total - exact).norm() / exact.norm())
    return error, gap, wire.sent / frozen, sums.tolist()


def test_one_bit_sends_signs_and_feeds_back(two: RankPool) -> None:
    few, many = two.run(one_bit, 3), two.run(one_bit, 90)
    for (early, gap, sent, sums), (late, *_) in zip(few, many, strict=True):
        assert late < early / 4  # the error stays bounded while the sum grows
        assert gap < 1e-5  # original + error before == sent + error after
        pieces = 4  # 2048 values in parameters of 600
        assert sent == 2 * (COUNT // 2 // 8 + 4 * pieces) or sent == 2 * (COUNT // 16 + 4 * 5)
        assert len(set(sums)) == 1


def test_one_bit_scale_keeps_the_norm() -> None:
    numbers, lengths = onebit.segments(torch.tensor([[0, 0, 0, 1], [1, 1, 2, 2]]))
    assert numbers.tolist() == [[0, 0, 0, 1], [0, 0, 1, 1]]
    assert lengths.tolist() == [[3, 1], [2, 2]]


def test_one_bit_before_the_freeze_is_adam(two: RankPool) -> None:
    for ours, torchs in two.run(adam_twice):
        assert torch.allclose(torch.tensor(ours), torch.tensor(torchs), rtol=1e-4, atol=1e-6)


def adam_twice() -> tuple[list[float], list[float]]:
    a, b = (nn.Parameter(torch.linspace(-1, 1, 64)) for _ in range(2))
    ours = onebit.OneBitAdam(a, torch.zeros(64, dtype=torch.int64), Wire(), freeze=9, **ADAM)
    torchs = torch.optim.AdamW([b], **ADAM)
    for step in range(5):
        a.grad, b.grad = gradients(step)[:64], gradients(step)[:64]
        dist.all_reduce(b.grad)
        b.grad /= 2
        ours.step()
        torchs.step()
    return a.tolist(), b.tolist()


# ---- torchft's 8 bits


def eight_bits(shape: tuple[int, ...]) -> tuple[float, float, list[float]]:
    """Return the largest error over its row's largest value, bytes, and every rank's result."""
    wire = Wire()
    numel = int(torch.tensor(shape).prod())
    values = gradients().view(-1)[:numel].view(shape) * torch.linspace(1, 9, shape[-1])
    values[0] = 0.0
    found = torchft_fp8.mean_of(values, wire)
    exact = values.clone()
    dist.all_reduce(exact)
    rows = (exact / dist.get_world_size()).view(len(values), -1)
    tops = values.abs().view(len(values), -1).amax(dim=1).clamp(min=1e-30)
    dist.all_reduce(tops, op=dist.ReduceOp.MAX)
    error = (found.view(rows.shape) - rows).abs().amax(dim=1) / tops
    sums = torch.zeros(dist.get_world_size())
    dist.all_gather_into_tensor(sums, found.double().sum().float().view(1))
    return float(error.max()), wire.sent, sums.tolist()


@pytest.mark.parametrize("shape", [(30, 18), (7, 512), (21,)])
def test_two_hops_of_eight_bits(two: RankPool, four: RankPool, shape: tuple[int, ...]) -> None:
    """Each hop errs by at most a sixteenth of a value; a vector has a scale for each value."""
    columns = shape[1] if len(shape) > 1 else 1
    for ranks, pool in ((2, two), (4, four)):
        rows = -(-shape[0] // ranks)
        nbytes = rows * (4 + -(-columns // 4) * 4)
        for error, sent, sums in pool.run(eight_bits, shape):
            assert error < 2 / 16 and (columns == 1 or error > 1e-3)
            assert sent == 2 * (ranks - 1) * nbytes
            assert len(set(sums)) == 1


def test_eight_bits_have_three_of_mantissa() -> None:
    rows = torch.tensor([[448.0, 17.0, -18.0, 0.5], [0.0, 0.0, 0.0, 0.0]])
    found = torchft_fp8.decode(torchft_fp8.encode(rows), 4)
    assert found.tolist() == [[448.0, 16.0, -18.0, 0.5], [0.0, 0.0, 0.0, 0.0]]


def diloco_twice() -> float:
    """Return the weights' distance from DiLoCo by torch's optimizers, after two exact meetings."""
    torch.manual_seed(0)
    model, other = nn.Linear(8, 4), nn.Linear(8, 4)
    other.load_state_dict(model.state_dict())
    method = torchft_fp8.DiLoCoFp8(model, Wire(), ADAM, 0.0, every=3)
    inner = torch.optim.AdamW(other.parameters(), **ADAM)
    whole = [nn.Parameter(p.detach().clone()) for p in other.parameters()]
    outer = torch.optim.SGD(whole, lr=0.7, momentum=0.9, nesterov=True)
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    for step in range(1, 7):
        for one in (model, other):
            one(inputs).square().mean().backward()
        method.step()
        inner.step()
        inner.zero_grad()
        if step % 3 == 0:
            for parameter, own in zip(whole, other.parameters(), strict=True):
                parameter.grad = parameter.detach() - own.detach()
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            outer.step()
            for parameter, own in zip(whole, other.parameters(), strict=True):
                own.data.copy_(parameter)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def exact_diloco() -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchft_fp8, "mean_of", exact_mean)
        return diloco_twice()


def exact_mean(values: Tensor, wire: Wire) -> Tensor:
    return wire.all_reduce(values) / dist.get_world_size()


def test_it_is_diloco(two: RankPool) -> None:
    assert all(error < 1e-6 for error in two.run(exact_diloco))
    assert all(1e-6 < error < 0.01 for error in two.run(diloco_twice))


# ---- all methods on one small model


def fit(name: str, steps: int) -> tuple[list[float], float, float]:
    """Return losses of a regression, this rank's bytes, and the sum of the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32))
    wire = Wire()
    method: Method = PEERS[name].make(model, wire, Settings(steps, 1, 1.0, ADAM))
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(64, 64, generator=generator)
    targets = torch.tanh(inputs[:, :32] * 2)
    losses = []
    for _ in range(steps):
        with wire.watching():
            loss = nn.functional.mse_loss(method.model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
        method.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / 2)
    return losses, wire.sent, float(Flat(model.parameters(), 2).weights().double().sum())


def test_all_learn_alike_and_replicas_stay_equal(two: RankPool) -> None:
    steps = 40
    (baseline, native, _), _ = two.run(fit, "ddp", steps)
    assert baseline[-1] < baseline[0] / 4
    most = {
        "ddp-fp16": 0.51, "ddp-bf16": 0.51, "powersgd-4": 0.35, "powersgd-16": 0.65,
        "qgz": 0.57, "qgz-qwz": 0.21, "loco": 0.57, "onebit-adam": 0.26, "sdp4bit": 0.14,
        "onebit-adam-exact": 1.01, "torchft-fp8-10": 0.03,
    }  # fmt: skip
    for name, share in most.items():
        (losses, sent, weights), (_, _, others) = two.run(fit, name, steps)
        assert weights == others, name
        assert losses[0] == pytest.approx(baseline[0], rel=1e-5), name
        assert losses[-1] < baseline[0] / 3, name
        assert 0.01 * native < sent <= share * native, (name, sent / native)
        assert sent >= native or name != "onebit-adam-exact"  # it compresses nothing


def test_power_sgd_waits_for_a_tenth_of_the_run_and_more_than_one_step() -> None:
    assert [hooks.start_iteration(steps) for steps in (5, 100, 1000)] == [2, 10, 100]


def test_every_reimplementation_says_so_and_names_its_paper() -> None:
    clean = {name for name, peer in PEERS.items() if peer.clean_room}
    assert clean == {
        "qgz", "qgz-qwz", "loco", "onebit-adam", "onebit-adam-exact", "sdp4bit",
        *(f"torchft-fp8-{every}" for every in (1, 10, 30, 100)),
    }  # fmt: skip
    assert all("arXiv" in PEERS[name].source for name in clean)


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
