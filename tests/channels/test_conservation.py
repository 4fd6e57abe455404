"""Conservation of gradients: applied sums plus residuals equal the true gradients.

``sum(applied) + sum(residuals) == sum(true gradients)``, by element and over all ranks (up to the
rounding of low-bit residuals), for random jobs: each engine's kind of reduction, one level or
nodes, unused parameters, overflowing steps, consecutive saves, other numbers of ranks. Ranks are
threads.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridcomp.channels import Channels
from hybridcomp.channels.checkpoint import resharing
from hybridcomp.channels.residuals.pieces import Piece, cut
from hybridcomp.channels.residuals.saved_residuals import held_in
from hybridcomp.codecs import LOSSLESS
from hybridcomp.collectives import OwnedRange, chunk_ranges
from hybridcomp.config import CompressionConfig
from hybridcomp.job import small_messages
from tests.channels import sent
from tests.collectives.calls import group_of
from tests.collectives.hierarchical.in_threads import deep_groups, units_of
from tests.selection import by_day
from tests.stand_ins import thread_groups
from tests.stand_ins.thread_groups import Member

#: DDP, ZeRO 0 and Megatron; FSDP2, ZeRO 3 and Megatron's distributed optimizer; ZeRO 1 and 2
KINDS = ("all_reduce", "reduce_scatter", "owners")
JOBS, SHARES = 520, 13
COLUMNS = 7
GROUP: Any = "the group of the test"


class Ranks:
    """torch.distributed and store calls of ``resharing``, among threads."""

    def __init__(self, size: int) -> None:
        self.size, self._local = size, threading.local()
        self._barrier, self._slots = threading.Barrier(size, timeout=60), [None] * size

    def enter(self, rank: int) -> None:
        self._local.rank = rank

    def get_rank(self) -> int:
        return int(self._local.rank)

    def get_world_size(self) -> int:
        return self.size

    def tell(self, statement: Any, *, what: str) -> list[Any]:
        self._slots[self.get_rank()] = statement
        self._barrier.wait()
        said = list(self._slots)
        self._barrier.wait()
        return said

    def all_reduce(self, tensor: Tensor) -> None:
        parts: list[Any] = self.tell(tensor.clone(), what="")
        tensor.copy_(torch.stack(parts).sum(0))


class Nodes:
    """Two nodes of two ranks."""

    def rows(self, group: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [(0, 1), (2, 3)]


class Drawn:
    """A job with its ranks and parameters, and the history of its gradients and sums."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.kind = self.draw.choice(KINDS)
        bits = self.draw.choice((2, 3, 8))
        kept = self.draw.choice((32, 32, 16, 8, 4))
        #: rounding allowance of residuals, relative to the sum of the largest gradients
        self.rounding = {32: 1e-5, 16: 2.0**-8, 8: 2.0**-7, 4: 2.0**-3}[kept]
        feedback = {"error_feedback": {"bits": kept} if kept != 32 else True}
        dp: dict[str, Any] = {"codec": "blockint", "bits": bits, **feedback}
        self.is_low_rank = self.draw.random() < 0.2
        if self.is_low_rank:
            dp = {"codec": "powersgd", "rank": 1, **feedback}
        self.config = CompressionConfig.parse({"dp": dp, "min_bytes": 0})
        count = self.draw.randint(1, 3)
        self.numels = {f"p{i}": self.draw.randint(1, 150) for i in range(count)}
        self.pieces = [Piece(name, 0, numel) for name, numel in self.numels.items()]
        self.whole = sum(self.numels.values())
        self.owed = torch.zeros(self.whole)
        self.scale = 1.0
        self.begin()

    def begin(self) -> None:
        """Create new ranks, one level or two, with zero residuals."""
        self.size = self.draw.randint(1, 4)
        self.deep = self.size == 4 and self.draw.random() < 0.5 and not self.is_low_rank
        self.every = [Channels(self.config) for _ in range(self.size)]
        for channels in self.every:
            channels.step = 1  # no sampling
            for name, numel in self.numels.items():
                channels.factors.learn(name, (numel // COLUMNS, COLUMNS))

    def step(self) -> None:
        """Reduce gradients once; a parameter may be unused on all ranks, a step may overflow."""
        gradients = torch.randn(self.size, self.whole)
        unused = set()
        if self.kind == "all_reduce" and self.draw.random() < 0.3:
            unused = {self.draw.choice(list(self.numels))}
        counts = torch.cat(
            [torch.full((n,), float(m not in unused)) for m, n in self.numels.items()]
        )
        gradients *= counts
        applied = self.reduce(gradients, frozenset(unused)) * counts  # DDP discards unused ones
        self.owed += gradients.sum(0) - applied
        self.scale += float(gradients.abs().max()) * self.size
        if self.draw.random() < 0.15:  # on overflow the error belongs to no step
            for channels in self.every:
                channels.residuals.drop()
            self.owed.zero_()

    def reduce(self, gradients: Tensor, unused: frozenset[str]) -> Tensor:
        """Reduce over the ranks as the engine does."""
        _, levels_of, boards = deep_groups(units_of([2], 4)) if self.deep else (None, None, [])
        ranges = chunk_ranges(self.whole, self.size)
        lossless = self.draw.random() < 0.2

        def one(member: Member, rank: int) -> Tensor:
            channel = self.every[rank]["dp"]
            group = group_of(levels_of(rank) if levels_of else member)
            channel.groups[GROUP, channel.state.nodes] = group
            codec = LOSSLESS
            if not lossless:
                chosen = channel.state.policy.codecs["dp", "forward"]
                assert chosen is not None
                codec = chosen
            values = gradients[rank].clone()
            # a rank that used a parameter knows that its sum is applied
            asked = [name for i, name in enumerate(self.numels) if name in unused or i % 2 == rank]
            if self.kind == "all_reduce":
                sent.all_reduce(
                    channel, values, codec, GROUP, pieces=self.pieces,
                    taken={name: torch.tensor(name not in unused) for name in asked},
                ).wait()  # fmt: skip
                return values
            if self.kind == "reduce_scatter":
                shards = [values[low:high] for low, high in ranges]
                of_shards = [cut(self.pieces, low, high) for low, high in ranges]
                return sent.reduce_scatter(channel, shards, codec, GROUP, pieces=of_shards).wait()
            owned = [OwnedRange(low, high, (i,)) for i, (low, high) in enumerate(ranges)]
            sums = sent.reduce_to_owners(channel, values, owned, codec, GROUP, pieces=self.pieces)
            return torch.cat(sums) if sums else values[:0]

        found = thread_groups.run(self.size, one, boards)
        return found[0] if self.kind == "all_reduce" else torch.cat(found)

    def save_and_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Save and resume, once or twice, on as many ranks or on others."""
        for _ in range(self.draw.randint(1, 2)):
            states = [channels.residuals.state_dict() for channels in self.every]
            if self.draw.random() < 0.3:
                for channels, state in zip(self.every, states, strict=True):
                    channels.residuals.load(state)
                continue
            self.begin()
            self.take_over(states, monkeypatch)

    def take_over(self, states: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """Load ``states`` of the saving ranks on the current ranks."""
        ranks = Ranks(self.size)
        monkeypatch.setattr(resharing, "dist", ranks)
        monkeypatch.setattr(small_messages, "total", ranks.all_reduce)
        monkeypatch.setattr(resharing, "tell", ranks.tell)
        nodes: Any = Nodes() if self.deep else None
        sends = {name: resharing.Sends(((0, numel),)) for name, numel in self.numels.items()}

        def one(_: Any, rank: int) -> None:
            ranks.enter(rank)
            part = resharing.ReadResiduals()
            for old in resharing.share(len(states)):
                for name, stretch in held_in(states[old]):
                    part.add(name, stretch)
            plan = resharing.plan(part, sends, nodes, padding=0)
            plan.move(part, self.every[rank].residuals, torch.device("cpu"))

        thread_groups.run(self.size, one)

    def held(self) -> Tensor:
        """Return the sum of all ranks' residuals."""
        found = {name: torch.zeros(numel) for name, numel in self.numels.items()}
        for channels in self.every:
            for name, (offset, values) in held_in(channels.residuals.state_dict()):
                found[name][offset : offset + values.numel()] += values
        return torch.cat(list(found.values()))


@pytest.mark.parametrize("share", by_day(range(SHARES), (0,)))
def test_applied_and_held_are_what_was_given(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = 0
    for seed in range(share, JOBS, SHARES):
        job = Drawn(seed)
        for _ in range(2):
            for _ in range(job.draw.randint(1, 2)):
                job.step()
            before = job.size
            job.save_and_load(monkeypatch)
            changed += job.size != before
            off = float((job.held() - job.owed).abs().max())
            assert off <= job.rounding * job.scale, (seed, job.kind, job.size, job.deep, off)
        job.step()
        off = float((job.held() - job.owed).abs().max())
        assert off <= job.rounding * job.scale, (seed, job.kind, job.size, job.deep, off)
    assert changed > JOBS // SHARES // 2
