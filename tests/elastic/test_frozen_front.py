"""Outputs of a frozen front are kept exactly, within their memory, and go when weights change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hybridcomp
from hybridcomp.channels.messages.kept_weights import SMALL, hashes_together
from hybridcomp.errors import ConfigError
from tests.elastic.jobs import Case, engine_of, loss_of, pipeline_of, settings
from tests.patches.torch.trainer import forget
from tests.ranks import run_ranks
from tests.selection import by_day
from tests.training.in_turn import start_deepspeed

WIDTH, SAMPLES, BATCH = 32, 24, 6
LEDGER = {"every": 10**6}


class Counted(nn.Module):
    """A block that counts the samples that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.seen = 0

    def forward(self, values: Tensor) -> Tensor:
        self.seen += len(values)
        changed: Tensor = self.down(torch.tanh(self.up(values)))
        return values + changed


def blocks_of(dtype: torch.dtype = torch.float32) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Counted() for _ in range(4)).to(dtype)


def data(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def order(epoch: int) -> Any:
    numbers = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
    return torch.split(numbers, BATCH)


def losses(kept: bool, dtype: torch.dtype, **settings: Any) -> tuple[list[float], list[int]]:
    """Train the back half of a model for three epochs; how often its front has run."""
    blocks, values = blocks_of(dtype), data(dtype)
    blocks[:2].requires_grad_(False)
    front = hybridcomp.FrozenFront(list(blocks), **settings) if kept else None
    optimizer = torch.optim.SGD(blocks[2:].parameters(), lr=0.1)
    first: Any = blocks[0]
    found: list[float] = []
    runs: list[int] = []
    for epoch in range(3):
        for at in order(epoch):
            if front is not None:
                hidden, depth = front(at, values[at])
                assert depth == 2 and not hidden.requires_grad
            else:
                with torch.no_grad():
                    hidden = torch.cat([blocks[1](blocks[0](one[None])) for one in values[at]])
            for block in blocks[2:]:
                hidden = block(hidden)
            loss = (hidden.float() - values[at].float().roll(1, 1)).square().mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            found.append(loss.item())
        runs.append(first.seen)
    return found, runs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", ["expcode", "none"])
def test_kept_outputs_are_those_that_were_computed(codec: str, dtype: torch.dtype) -> None:
    blocks, values = blocks_of(dtype), data(dtype)
    blocks.requires_grad_(False)
    front = hybridcomp.FrozenFront(list(blocks), codec)
    for at in order(0):
        computed, _ = front(at, values[at])
        again, _ = front(at.flip(0), values[at.flip(0)])
        assert torch.equal(again.flip(0), computed) and again.dtype == dtype
    assert (front.hits, front.misses) == (SAMPLES, SAMPLES)
    assert [block.seen for block in blocks] == [SAMPLES] * 4


def test_later_epochs_run_no_block_of_the_front() -> None:
    exact, runs = losses(True, torch.float32)
    assert runs == [SAMPLES] * 3
    plain, _ = losses(True, torch.float32, codec="none")
    assert exact == plain  # to the last bit
    again, _ = losses(False, torch.float32)  # sample by sample: another order of sums
    assert max(abs(a - b) for a, b in zip(exact, again, strict=True)) < 1e-5
    eight, _ = losses(True, torch.float32, codec="blockint", bits=8)
    assert 0 < max(abs(a - b) for a, b in zip(exact, eight, strict=True)) < 1e-2


def test_bytes_of_eight_bits() -> None:
    blocks, values = blocks_of(), data()
    blocks.requires_grad_(False)
    front = hybridcomp.FrozenFront(list(blocks), "blockint", bits=8)
    front(list(range(SAMPLES)), values)
    assert front.nbytes <= 0.5 * values.nbytes  # of 32 values a sample, padded to 16 bytes


def test_where_more_is_frozen_only_the_blocks_between_run() -> None:
    blocks, values = blocks_of(), data()
    blocks[:1].requires_grad_(False)
    front = hybridcomp.FrozenFront(list(blocks))
    front(range(SAMPLES), values)
    blocks[:3].requires_grad_(False)
    deep, depth = front(range(SAMPLES), values)
    assert depth == 3 and [block.seen for block in blocks] == [SAMPLES] * 3 + [0]
    assert torch.equal(front(range(SAMPLES), values)[0], deep)
    assert blocks[2].seen == SAMPLES
    assert front.nbytes == sum(kept.payload.nbytes for kept in front._kept.values())


def test_weights_that_change_or_train_again_free_what_is_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocks, values = blocks_of(), data()
    blocks[:2].requires_grad_(False)
    front = hybridcomp.FrozenFront(list(blocks))
    old, _ = front(range(SAMPLES), values)
    blocks[1].get_parameter("up.weight").data[0, 0] += 1.0  # which torch does not note
    new, _ = front(range(SAMPLES), values)
    assert not torch.equal(old, new) and blocks[0].seen == 2 * SAMPLES
    assert "weights of it have changed" in capsys.readouterr().out
    blocks[1].register_buffer("shift", torch.ones(1))
    front(range(SAMPLES), values)
    blocks[1].get_buffer("shift").add_(1.0)
    front(range(SAMPLES), values)
    assert blocks[0].seen == 4 * SAMPLES  # for the new buffer, and for its new value
    blocks[1].requires_grad_(True)
    assert front(range(BATCH), values[:BATCH])[1] == 1 and front.nbytes > 0
    blocks.requires_grad_(True)
    passed, depth = front(range(BATCH), values[:BATCH])
    assert depth == 0 and torch.equal(passed, values[:BATCH]) and front.nbytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_change_of_any_weight_shows_in_the_hashes_of_all(dtype: torch.dtype) -> None:
    shares = [torch.ones(size, dtype=dtype) for size in (1, 7, SMALL, SMALL + 5)]
    shares.append(torch.ones(3, dtype=torch.float16))
    found = [hashes_together(shares)]
    for share in shares:
        share[-1] = 2.0
        found.append(hashes_together(shares))
    assert len(set(map(tuple, found))) == len(found) == len(shares) + 1
    assert [len(one) for one in found] == [3] * len(found)  # the small ones of a dtype are one
    assert hashes_together(shares) == found[-1]


def test_the_least_recently_used_go_where_the_host_is_full(
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocks, values = blocks_of(), data()
    blocks.requires_grad_(False)
    room = 4 * WIDTH * 4
    front = hybridcomp.FrozenFront(list(blocks), "none", host_bytes=room)
    for first in (0, 2, 0, 4):
        front([first, first + 1], values[first : first + 2])
    assert front.nbytes == room and (front.hits, front.misses) == (2, 6)
    said = capsys.readouterr().out
    assert "room for about 4 samples" in said and said.count("are full") == 1
    front([0, 1, 4, 5], values[[0, 1, 4, 5]])
    assert front.hits == 6  # 2 and 3 have gone
    kept, _ = front([0], values[:1])
    front([1, 4, 5], values[[1, 4, 5]])
    found, _ = front([2, 0], values[[2, 0]])  # 2 takes the place of 0, which this batch needs too
    assert torch.equal(found[1:], kept) and front.hits == 11


def test_a_sample_that_is_padded_otherwise_is_computed_anew() -> None:
    blocks = nn.Sequential(nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH)).requires_grad_(False)
    front = hybridcomp.FrozenFront([*blocks, nn.Linear(WIDTH, WIDTH)])
    for samples, length in (([0, 1], 4), ([2], 3), ([1, 2], 4), ([0, 1], 4), ([2], 3)):
        inputs = torch.arange(9).expand(3, 9)[samples, :length]
        found, _ = front(samples, inputs)
        assert torch.equal(found, blocks(inputs))
    assert (front.hits, front.misses) == (3, 5)


def test_ranks_of_a_host_share_half_of_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {"SC_AVPHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr("os.sysconf", pages.__getitem__)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert hybridcomp.FrozenFront([])._most == 1000 * 4096 // 2 // 4


def test_what_does_not_fit_is_refused() -> None:
    values = data()
    drops = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)).requires_grad_(False)
    front = hybridcomp.FrozenFront([drops])
    with pytest.raises(ConfigError, match=r"Dropout in training; .*call eval\(\)"):
        front(range(SAMPLES), values)
    drops.eval()
    front(range(SAMPLES), values)
    with pytest.raises(ConfigError, match="found 2 numbers; expected the numbers of the 24"):
        front([0, 1], values)
    pair = nn.LSTM(WIDTH, WIDTH, batch_first=True).requires_grad_(False)
    with pytest.raises(ConfigError, match="found LSTM; expected blocks that return a tensor"):
        hybridcomp.FrozenFront([pair])(range(SAMPLES), values[:, None])


class Cut(nn.Module):
    """Blocks of which a pass may begin at any."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks_of()

    def forward(self, values: Tensor, first: int = 0) -> Tensor:
        for block in self.blocks[first:]:
            values = block(values)
        return values


def sharded(engine: str, room: int | None) -> tuple[list[float], list[float], list[int], list[str]]:
    """Train the back half for three epochs: losses, bytes of gathers and passes of the front."""
    from hybridcomp.channels import channels_of
    from hybridcomp.patches.torch.attach import channels_of_model

    torch.manual_seed(0)
    case = Case("zero3" if engine == "zero3" else "fsdp2")
    model: Any = Cut()
    blocks = list(model.blocks)
    refused: list[str] = []
    if engine == "zero3":
        root = deepspeed_of(case, model)
        channels, optimizer = channels_of(root), None
    else:
        from torch.distributed.fsdp import fully_shard

        for block in blocks[1:] if engine == "together" else blocks:
            fully_shard(block)
        root = fully_shard(model)
        hybridcomp.attach(root, {**case.block, "ledger": LEDGER})
        channels = channels_of_model(root)
        optimizer = torch.optim.AdamW(root.parameters(), lr=1e-2)
    assert channels is not None
    hybridcomp.freeze(root, ["blocks.0", "blocks.1"])
    front = hybridcomp.FrozenFront(blocks, host_bytes=room if dist.get_rank() else None)
    values = data() + dist.get_rank()
    found, sent, runs = [], [], []
    for epoch in range(3):
        before, ran = gathered_bytes(channels), blocks[0].seen
        for at in torch.split(torch.arange(SAMPLES), BATCH):
            hidden, first = values[at], 0
            if epoch:  # the first epoch begins at the model's inputs
                try:
                    hidden, first = front(at, values[at])
                except ConfigError as error:
                    return [], [], [], [str(error)]
            elif not refused and engine != "zero3":
                with pytest.raises(ConfigError) as told:
                    front(at, values[at])
                refused.append(str(told.value))
            loss = loss_of(root(hidden, first=first), values[at].roll(1, 1))
            if optimizer is None:
                root.backward(loss)
                root.step()
            else:
                torch.autograd.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
        sent.append(gathered_bytes(channels) - before)
        runs.append(blocks[0].seen - ran)
    forget()
    return found, sent, runs, refused


def gathered_bytes(channels: Any) -> float:
    entries = channels.ledger.interval.items()
    return sum(float(one.raw_nbytes) for (name, _), one in entries if name == "zero")


def deepspeed_of(case: Case, model: nn.Module) -> Any:
    start_deepspeed()
    hybridcomp.install()
    return engine_of(model, settings(
        case, compression={**case.block, "ledger": LEDGER}, train_batch_size=2 * BATCH,
        train_micro_batch_size_per_gpu=BATCH,
        zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0},
    ))  # fmt: skip


def fronts(engine: str, rooms: list[int | None]) -> list[Any]:
    return [sharded(engine, room) for room in rooms]


@pytest.mark.parametrize("engine", by_day(["fsdp2", "zero3"], ["zero3"]))
def test_fronts_that_ranks_gather_together(engine: str) -> None:
    pytest.importorskip("deepspeed")
    ranks = run_ranks(2, fronts, engine, [None, 4 * WIDTH * 4, 0])
    for rank, (whole, some, none) in enumerate(ranks):
        assert {len(losses) for losses, *_ in (whole, some, none)} == {3 * SAMPLES // BATCH}
        assert whole[0] == none[0]  # to the last bit
        apart = (abs(a - b) for a, b in zip(whole[0], some[0], strict=True))
        assert max(apart) < 1e-5  # passes of other numbers of samples
        _, kept, third = whole[1]
        assert whole[2] == [SAMPLES, SAMPLES, 0]
        assert third < kept  # the front is not gathered
        assert none[2][1:] == ([SAMPLES] * 2 if rank else [SAMPLES, 4])


def test_a_block_that_is_gathered_with_others_is_refused() -> None:
    for *_, said in run_ranks(2, sharded, "together", None):
        assert said == [
            "hybridcomp.FrozenFront: found a block that FSDP2 gathers with others; call "
            "fully_shard on it, so that it can run without the others"
        ]


@dataclass(frozen=True)
class Piped:
    """A pipeline whose first stage is frozen, wholly or in half."""

    stage: int
    whole: bool
    dtype: str = "fp32"
    recomputes: bool = False

    def train(self, codec: str | None) -> tuple[list[float], list[list[int]], int]:
        """Train three epochs: losses, samples that blocks have seen by epoch, samples not kept."""
        case = Case("pipe" if self.stage else "pipe0", stages=2, dtype=self.dtype)
        start_deepspeed()
        hybridcomp.install()
        torch.manual_seed(dist.get_rank())
        recomputes = int(self.recomputes)
        model = pipeline_of(Counted, [()] * 4, 2, activation_checkpoint_interval=recomputes)
        sizes = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3}
        engine = engine_of(model, settings(case, **sizes))
        hybridcomp.freeze(engine, ["0", "1"] if self.whole else ["0"])
        blocks, front = engine.module.forward_funcs, None
        if codec is not None and engine.is_first_stage():
            front = hybridcomp.FrozenFront(blocks, codec, in_place=True)
        values, losses, seen = case.cast(data()), [], []
        for _ in range(3):
            for at in torch.split(torch.arange(SAMPLES), 12):
                inputs = [values[one] if codec is None else (one, values[one])
                          for one in torch.split(at, 3)]  # fmt: skip
                wanted = [values[one].roll(1, 1) for one in torch.split(at, 3)]
                losses.append(float(engine.train_batch(zip(inputs, wanted, strict=True))))
            seen.append([block.seen for block in blocks])
        misses = 0 if front is None else front.misses
        alone = torch.split(values, 3)[:4]
        engine.eval_batch(zip(alone, alone, strict=True))
        assert front is None or (front.misses == misses and blocks[1].seen > seen[-1][1])
        engine.destroy()
        return losses, seen, misses


def both_ways(case: Piped) -> list[Any]:
    """Train without a front, then with a front."""
    return [case.train(codec) for codec in (None, "expcode")]


PIPES = [Piped(0, True), Piped(1, True, "bf16"), Piped(1, False), Piped(0, False, "fp16", True)]


@pytest.mark.parametrize("case", by_day(PIPES, PIPES[:1]), ids=str)
def test_a_pipeline_passes_over_its_front(case: Piped) -> None:
    pytest.importorskip("deepspeed")
    ((losses, every, _), (kept, seen, misses)), behind = run_ranks(2, both_ways, case)
    assert losses == kept and losses[-1] < losses[0]  # to the last bit
    assert behind[0] == behind[1] and misses == SAMPLES
    assert [epoch[0] for epoch in seen] == [SAMPLES] * 3 < [epoch[0] for epoch in every]
    assert [epoch[1] for epoch in seen] == (
        [SAMPLES] * 3 if case.whole else [epoch[1] for epoch in every]
    )
