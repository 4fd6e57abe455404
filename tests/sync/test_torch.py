"""Islands under DDP and FSDP2: exact if lossless, bit-identical, resumable, bad input."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hybridcomp
from hybridcomp.errors import AgreementError, CheckpointError, ConfigError, PeerError
from hybridcomp.job import processes
from hybridcomp.job.devices import default_device
from hybridcomp.patches.torch import island_masters
from hybridcomp.sync.outliers import far_off as far_off_of
from tests.ranks import RunRanks, run_ranks
from tests.sync.jobs import FED_BACK, gathered
from tests.sync.jobs import inside as block
from tests.sync.torch_job import Job

LOCAL: dict[str, Any] = {"preset": "local-sgd", "every": 1}


def every_step(engine: str) -> None:
    """Islands that meet every step, with SGD inside and outside, equal a single job."""
    native = Job(None, engine).build().train(4).weights()
    for codec in ("none", "expcode"):
        # islands begin with other weights: all take the first one's
        seed = 0 if dist.get_rank() < 2 else 5
        job = Job(block(**LOCAL, codec=codec), engine, seed=seed).build().train(4)
        torch.testing.assert_close(job.weights(), native, rtol=0, atol=1e-6)
        assert job.attached is not None
        hybridcomp.detach(job.model)
    accumulated = Job(None, engine).build().train(3, micro_batches=2).weights()
    job = Job(block(**LOCAL), engine).build().train(3, micro_batches=2)
    torch.testing.assert_close(job.weights(), accumulated, rtol=0, atol=1e-6)
    assert job.meetings.clock == 3


def averaged_in_turn(engine: str) -> None:
    """Average a tied weight that is in several fragments: once per meeting.

    Weights change by hand only, so after a turn of all fragments every weight is the start minus
    half of the mean change; averaged twice it would be a quarter.
    """
    rule = {"every": 4, "fragments": 4, "outer": {"lr": 0.5, "momentum": 0.0, "nesterov": False}}
    job = Job(block(**rule, islands=2), engine).build()
    # an error of a meeting names ranks of other islands
    assert [peer.rank for peer in processes.Known.peers] == [0, 1, 2, 3]
    job.optimizer.param_groups[0]["lr"] = 0.0
    job.train(3)  # to the end of a turn
    assert len({part.low for part in job.meetings.parts}) == 4
    start = job.weights()
    island = dist.get_rank() // 2
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.add_(1.0 + 2.0 * island)
    job.train(4)
    model: Any = job.model.module if engine == "ddp" else job.model
    assert model.head.weight is model.embedding.weight
    torch.testing.assert_close(job.weights(), start + 1.0, rtol=0, atol=1e-6)
    row = job.meetings.row()
    assert row is not None and row["meetings"] == 7


def averaged(engine: str) -> None:
    averaged_in_turn(engine)
    every_step(engine)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_tied_weight_is_averaged_once_and_every_step_is_the_native_job(
    module_ranks: RunRanks, engine: str
) -> None:
    module_ranks(4, averaged, engine)


class Odd(nn.Module):
    """Weights with other memory orders or gaps, and complex weights."""

    def __init__(self) -> None:
        super().__init__()
        image: Any = nn.Conv2d(3, 3, 3)
        self.image = image.to(memory_format=torch.channels_last)
        self.phases = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64).t())
        self.part = nn.Parameter(torch.randn(4, 6)[:, 1:4])

    def forward(self, values: Tensor) -> Tensor:
        total: Tensor = self.image(values).sum() + self.phases.abs().sum() + self.part.sum()
        return total


def odd_weights() -> None:
    """Islands take the first one's weights, and then the mean of all changes."""
    told = block(**LOCAL, islands=1)
    torch.manual_seed(0)
    one = Odd().state_dict()
    first = {name: value.clone() for name, value in one.items()}
    torch.manual_seed(dist.get_rank())
    model: Any = DistributedDataParallel(Odd(), process_group=hybridcomp.island_group(told))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hybridcomp.attach(model, told)
    move = {True: 1 + 2j, False: 1}
    for step in (1, 2):
        model(torch.ones(1, 3, 4, 4)).backward()
        for parameter in model.parameters():
            by = (dist.get_rank() + 1) * move[parameter.is_complex()]
            parameter.grad = torch.full_like(parameter, by)
        optimizer.step()
        for name, value in model.module.state_dict().items():
            mean = 1.5 * step * move[value.is_complex()]
            torch.testing.assert_close(value, first[name] - mean, rtol=0, atol=1e-5)
            assert value.stride() == one[name].stride()
    named = island_masters.masters_of(model).pieces
    assert [name for name, _ in named] == [
        "phases by dimensions [1, 0, 2]", "part",
        "image.weight by dimensions [0, 2, 3, 1]", "image.bias",
    ]  # fmt: skip
    hybridcomp.detach(model)


def test_weights_in_another_order_and_complex_ones(on_ranks: RunRanks) -> None:
    on_ranks(2, odd_weights)


def bounded() -> None:
    """Compare the means of error-bounded messages with exact means."""
    rule = {"preset": "local-sgd", "every": 2, "islands": 1}
    first = Job(block(**rule)).build().weights()
    alone = Job(block(**{**rule, "every": 9})).build().train(2).weights()
    moved = (first - alone).abs().max()
    dist.all_reduce(moved, op=dist.ReduceOp.MAX)
    exact = Job(block(**rule)).build().train(2).weights()
    for mode, most in (("rel", 1e-3 * float(moved)), ("abs", 1e-3)):
        told = {**rule, "error_bound": 1e-3, "error_bound_mode": mode}
        found = Job(block(**told)).build().train(2).weights()
        assert 0 < float((found - exact).abs().max()) <= most + 1e-6


def diverging() -> None:
    """Send NaN: all islands skip the meeting, and the sender is reset."""
    rule = {"preset": "diloco", "every": 2, "codec": "blockint", "bits": 8}
    job = Job(block(**rule, islands=1)).build().train(3)
    rank, last = dist.get_rank(), job.meetings.parts[0].fragment.start.clone()
    if rank == 1:
        with torch.no_grad():
            next(iter(job.model.parameters())).fill_(torch.nan)
    before = job.weights()
    job.optimizer.param_groups[0]["lr"] = 0.0
    job.train(1)
    assert torch.equal(job.meetings.parts[0].fragment.start, last)
    assert torch.equal(job.weights(), last if rank == 1 else before)
    row = job.meetings.row()
    assert row is not None and (row["meetings"], row["skipped"]) == (1.0, 1.0)
    job.optimizer.param_groups[0]["lr"] = 0.1
    job.train(2)
    mine = job.weights()
    assert torch.equal(*gathered(mine)) and bool(mine.isfinite().all())
    job.meetings.close()
    assert not job.meetings.parts and not job.meetings.under_way


def diverging_in_turn(skipped: int, **late: int) -> None:
    """Give an island NaN weights: it gets all fragments at once, and stays in the run."""
    rule = {"preset": "diloco", "every": 4, "codec": "blockint", "bits": 8, "fragments": 2}
    job = Job(block(**rule, **late, islands=1)).build().train(4)
    if dist.get_rank() == 1:
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.fill_(torch.nan)
    job.train(18)
    assert bool(job.weights().isfinite().all())
    row = job.meetings.row()
    assert row is not None and row["skipped"] == skipped


def failing_to_send(**late: int) -> None:
    """Fail to encode a message with late means, which blocks no rank.

    All skip that meeting, log the failing rank, and meet again.
    """
    rule = {"preset": "local-sgd", "every": 4, "codec": "blockint", "bits": 8}
    job = Job(block(**rule, **late, islands=1)).build().train(7)
    meetings, said = job.meetings, io.StringIO()
    meetings.row()
    fragment, fails = meetings.parts[0].fragment, dist.get_rank() == 1
    kept = fragment.residual

    def full(now: Tensor) -> Tensor:
        fragment.residual, fragment.base = None, None
        raise RuntimeError("no memory is left")

    with contextlib.redirect_stdout(said):
        if fails:
            fragment.send = full  # type: ignore[method-assign]
            with pytest.raises(PeerError, match=r"sends after step 8: rank 1: .*no memory is left"):
                job.train(1)
            assert meetings.parts[0].fragment.residual is kept
            job.optimizer.zero_grad()
            job.step += 1
        else:
            job.train(1)
        job.train(8)
    assert fails or "island 1 sent nothing, as rank 1 failed; all skip" in said.getvalue()
    figures = meetings.row()
    assert figures is not None and figures["skipped"] == 1 and figures["meetings"] > 0
    assert torch.equal(*gathered(meetings.parts[0].fragment.start))


def overflowing() -> None:
    """Let an island's loss scaler skip a step: it reports this and meets with the others."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        skipping()
    told = "sync: step 2: island 0 skips its step for an overflow, and meets the others as ever"
    assert (told in said.getvalue()) == (dist.get_rank() == 0)


def skipping() -> None:
    """Skip a step of two optimizers in one island only; the islands' reports still match."""
    job = Job({**block(**LOCAL, islands=1), "ledger": {"every": 3}}).build()
    device = default_device()
    weights = list(job.model.parameters())
    halves = [torch.optim.SGD(half, lr=0.1) for half in (weights[:1], weights[1:])]
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0)
    for step in range(4):
        logits = job.model(torch.arange(4, device=device)[None])
        loss = logits.square().mean()
        if step == 1 and dist.get_rank() == 0:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        for half in halves:
            scaler.step(half)
        scaler.update()
        job.model.zero_grad()
        assert job.attached is not None
        assert job.meetings.clock == job.attached.channels.step == step + 1
    row = job.meetings.row()
    assert row is not None and (row["meetings"], row["skipped"]) == (1.0, 0.0)  # since the report


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "one node": (
        {"islands": "node"},
        r'sync.islands: found .node.; all ranks .* write "islands": 1, the',
    ),
    "none to meet": ({"islands": 2}, r"sync.islands: found one island of 2 rank"),
    "no median": (
        {"islands": 1, "outlier": 4.0},
        r"sync.outlier: found 4.0; of 2 islands either could be",
    ),
    "no divisor": ({"islands": 3}, r"sync.islands: found 3; the job has 2 ranks, no multiple"),
}


def refused() -> None:
    for sync, words in BAD.values():
        with pytest.raises(ConfigError, match=words):
            Job(block(**sync)).build()
    device = default_device()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2).to(device))
    with pytest.raises(ConfigError, match=r"sync.islands: found ranks \[0, 1\]; the island of"):
        hybridcomp.attach(model, block(islands=1))
    rank = dist.get_rank()
    with pytest.raises(AgreementError, match=r"sync.every.*rank"):
        Job(block(islands=1, every=1 + rank)).build().train(1)
    job = Job(block(islands=1)).build()
    with pytest.raises(AgreementError, match=r"elements.*rank"):
        wider = torch.nn.Linear(2 + rank, 2).to(device)
        group = hybridcomp.island_group(block(islands=1))
        other = torch.nn.parallel.DistributedDataParallel(wider, process_group=group)
        assert hybridcomp.attach(other, block(islands=1)) is not None
        other(torch.ones(1, 2 + rank, device=device))
    job.train(1)


def several() -> None:
    bounded()
    diverging()
    diverging_in_turn(1)
    diverging_in_turn(2, delay=3)
    failing_to_send(delay=2)
    failing_to_send(staleness=1)
    diverging_in_turn(4, staleness=2)
    overflowing()
    refused()


def test_nan_overflow_and_bad_input() -> None:
    run_ranks(2, several)


def far_off() -> None:
    """Move one of four islands far off: all skip the meeting, and it is reset."""
    rule = {"preset": "diloco", "every": 2, "codec": "blockint", "bits": 8, "outlier": 10.0}
    job = Job(block(**rule, islands=1)).build().train(3)
    rank, last = dist.get_rank(), job.meetings.parts[0].fragment.start.clone()
    if rank == 2:
        with torch.no_grad():
            next(iter(job.model.parameters())).mul_(1e4)
    job.optimizer.param_groups[0]["lr"] = 0.0
    job.train(1)
    assert all(torch.equal(one, last) for one in gathered(job.meetings.parts[0].fragment.start))
    assert (rank == 2) == torch.equal(job.weights(), last)
    job.optimizer.param_groups[0]["lr"] = 0.1
    job.train(2)
    row = job.meetings.row()
    assert row is not None and (row["meetings"], row["skipped"]) == (2.0, 1.0)


def far_off_in_parts() -> None:
    """Compute norms of islands whose weights are sharded differently."""
    group = dist.group.WORLD
    held = torch.tensor([[1.0, 4.0, 100.0, 0.0], [4.0, 1.0, 100.0, 5.0]], dtype=torch.float64)
    mine = held[dist.get_rank() % 2] * (dist.get_rank() < 2)
    assert far_off_of(mine, [True] * 4, 3.0, group) == [False, False, True, False]
    assert far_off_of(mine, [True, False, True, True], 7.0, group) == [False] * 4
    assert far_off_of(mine, [True, False, True, False], 1.5, group) == [False] * 4  # two islands


def both_far_off() -> None:
    far_off()
    far_off_in_parts()


def test_an_outlier_is_skipped(module_ranks: RunRanks) -> None:
    module_ranks(4, both_far_off)


RESUMED = {**FED_BACK, "preset": "wsp", "every": 2}


def resumed(engine: str, rule: dict[str, Any]) -> None:
    """Save a run with messages in flight; it resumes bit-identically."""
    job = Job(block(**rule), engine).build().train(5)
    assert job.attached is not None
    state = job.attached.state_dict()
    weights = [parameter.detach().clone() for parameter in job.model.parameters()]
    job.train(4)
    again = Job(block(**rule), engine, seed=3).build()
    with torch.no_grad():
        for parameter, kept in zip(again.model.parameters(), weights, strict=True):
            parameter.copy_(kept)
    assert again.attached is not None
    again.attached.load_state_dict(state)
    again.step = 5
    again.train(4)
    assert torch.equal(again.weights(), job.weights())


def both_resumed() -> None:
    resumed("ddp", RESUMED)
    resumed("fsdp2", {"preset": "sparseloco", "every": 2, "fragments": 2, "delay": 1})


def test_a_resumed_run_is_the_uninterrupted_one(module_ranks: RunRanks) -> None:
    module_ranks(4, both_resumed)


def of_part(key: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    """Return a change of ``key`` in the first part of the meetings' state."""

    def changed(state: dict[str, Any]) -> None:
        state["parts"][0][key] = change(state["parts"][0][key])

    return changed


def with_nan(values: Tensor) -> Tensor:
    return values.index_fill(0, torch.tensor([3]), float("nan"))


#: damages of a rank's saved island state
DAMAGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "a start copy of the weights is not finite": of_part("start", with_nan),
    "outer momentum is not finite": of_part("momentum", with_nan),
    "what error feedback kept is not finite": of_part("residual", with_nan),
    "momentum is not of the length": of_part("momentum", lambda values: values[:-1]),
    "base is not of the length": of_part("base", lambda _: torch.zeros(2)),
    "a part is cut by": of_part("cut", lambda _: [0, -1, 3]),
    "what it holds of messages": of_part("under_way", lambda _: [[None]]),
    "of fragment 0 belong to 0": of_part("under_way", lambda _: [[None, None, None]]),
    "what it holds of meetings": lambda state: state["meetings"].append([7, 1, torch.zeros(1)]),
    "'clock' cannot be": lambda state: state.update(clock=-1),
}


def damaged() -> None:
    """Damage the state of a rank: no rank changes."""
    job = Job(block(1, every=2, **FED_BACK)).build().train(3)
    assert job.attached is not None
    state = job.attached.state_dict()
    for told, damage in DAMAGES.items():
        mine = dict(state)
        if dist.get_rank() == 1:
            (name,) = state
            held = torch.load(io.BytesIO(state[name]), weights_only=True)
            damage(held["followers"]["sync"])
            file = io.BytesIO()
            torch.save(held, file)
            mine[name] = file.getvalue()
        with pytest.raises(CheckpointError) as caught:
            job.attached.load_state_dict(mine)
        assert "rank 1: " in str(caught.value) and told in str(caught.value), caught.value
        assert (job.meetings.clock, len(job.meetings.parts)) == (3, 1)
    job.train(2)


def test_state_that_one_rank_cannot_take_over_changes_no_rank() -> None:
    run_ranks(2, damaged)


def changing(is_frozen_first: bool) -> None:
    """Freeze or unfreeze a layer after islands have met; then follow the error's advice."""
    told = block(preset="diloco", every=1)
    job = Job(told, "fsdp2").build()
    job.model.up.requires_grad_(not is_frozen_first)
    job.train(2)
    job.model.up.requires_grad_(is_frozen_first)
    what = "trained" if is_frozen_first else "frozen"
    with pytest.raises(ConfigError, match=rf"^compression.sync: found up.weight, {what} only"):
        job.train(1)
    hybridcomp.detach(job.model)
    hybridcomp.attach(job.model, told)
    weights = job.train(2).weights()
    assert all(torch.equal(weights, one) for one in gathered(weights))
    hybridcomp.detach(job.model)


def unfrozen_under_ddp() -> None:
    told = block(preset="diloco", every=1)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain[0].requires_grad_(False)
    model = DistributedDataParallel(plain, process_group=hybridcomp.island_group(told))
    hybridcomp.attach(model, told)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    plain[0].requires_grad_(True)
    with pytest.raises(ConfigError, match=r"^compression.sync: found 0.weight, trained only"):
        step()


def all_changing() -> None:
    unfrozen_under_ddp()
    for is_frozen_first in (False, True):
        changing(is_frozen_first)


def test_parameters_that_are_frozen_or_unfrozen_later_are_an_error(module_ranks: RunRanks) -> None:
    """Islands would not share a newly trained layer, and would still average a frozen one."""
    module_ranks(4, all_changing)


def on_one_node() -> str:
    """Return the message for islands that are nodes, on a single node."""
    with pytest.raises(ConfigError) as raised:
        Job(block(**LOCAL, islands="node")).build()
    return str(raised.value)


def test_ranks_of_one_node_are_told_how_to_try_islands(on_ranks: RunRanks) -> None:
    for told in on_ranks(4, on_one_node):
        assert "all ranks are on one node" in told
        assert 'to try islands here write "islands": 2' in told
