"""ElasticSampler: each sample once, whatever the numbers of ranks."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, Literal

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from hybridcomp.elastic import batches
from hybridcomp.elastic.sampler import ElasticSampler
from hybridcomp.errors import CheckpointError, ConfigError
from hybridcomp.job import agreement
from hybridcomp.patches.common.resumed_parts import scale

Tail = Literal["drop", "keep"]
RANKS = (1, 2, 3, 4, 6, 12)


class Numbers(Dataset[int]):
    """Samples that are their own numbers."""

    def __getitem__(self, index: int) -> int:
        return index


def samplers(ranks: int, state: dict[str, Any] | None, **given: Any) -> list[ElasticSampler]:
    every = [ElasticSampler(**given, rank=rank, ranks=ranks) for rank in range(ranks)]
    for one in every:
        if state is not None:
            one.load_state_dict(state)
    return every


def segment(every: list[ElasticSampler], steps: int, ahead: int, most: int) -> list[list[int]]:
    """Return the samples of all ranks by step; loaders read ``ahead`` more micro-batches."""
    micro, accumulation = every[0].micro_batches(most)
    found: list[list[int]] = []
    while len(found) < steps:
        loaders = [iter(DataLoader(Numbers(), batch_size=micro, sampler=one)) for one in every]
        inside = min(steps - len(found), len(every[0]) // every[0].share)
        for _ in range(inside):
            step = []
            for loader in loaders:
                for _ in range(accumulation):
                    step += next(loader).tolist()
            for one in every:
                one.stepped()
            found.append(step)
        for loader in loaders:  # as workers do, before the job is stopped
            for _ in range(ahead):
                next(loader, None)
    assert len({(one.epoch, one.seen) for one in every}) == 1
    return found


@pytest.mark.parametrize("tail", ["drop", "keep"])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_each_sample_once_over_any_ranks(tail: Tail, shuffle: bool, seed: int) -> None:
    draw = random.Random(seed)
    length, samples = draw.randrange(100, 200), 12 * draw.randrange(1, 4)
    given = {
        "length": length, "samples": samples, "seed": seed, "shuffle": shuffle, "tail": tail,
    }  # fmt: skip
    unbroken = segment(samplers(1, None, **given), 60, 0, samples)
    steps: list[list[int]] = []
    state = None
    while len(steps) < 60:
        every = samplers(draw.choice(RANKS), state, **given)
        steps += segment(every, min(draw.randrange(1, 9), 60 - len(steps)), draw.randrange(4), 5)
        state = every[-1].state_dict()
    assert [sorted(step) for step in steps] == [sorted(step) for step in unbroken]
    assert all(len(step) == samples for step in steps)
    read = [index for step in steps for index in step]
    whole = length if tail == "keep" else length // samples * samples
    for first in range(0, len(read) - whole + 1, whole):  # epoch after epoch
        counts = Counter(read[first : first + whole])
        assert set(counts.values()) == {1}
        assert len(counts) == whole
    if shuffle:
        assert read[:whole] != read[whole : 2 * whole]


def test_the_batch_may_change_on_the_way() -> None:
    given = {"length": 100, "seed": 3, "tail": "keep"}
    first = samplers(2, None, samples=8, **given)
    read = [index for step in segment(first, 5, 0, 4) for index in step]
    second = samplers(3, first[0].state_dict(), samples=12, **given)
    read += [index for step in segment(second, 5, 0, 4) for index in step]
    assert sorted(read) == list(range(100))


def test_a_rest_that_is_too_small_for_the_new_batch_is_dropped() -> None:
    first = samplers(1, None, length=100, samples=8)
    segment(first, 11, 0, 8)
    second = samplers(1, first[0].state_dict(), length=100, samples=16)[0]
    assert (second.epoch, second.seen, len(second)) == (1, 0, 96)


@pytest.mark.parametrize("most", [1, 3, 4, 7, 100])
@pytest.mark.parametrize("replicas", RANKS)
def test_the_global_batch_stays(replicas: int, most: int) -> None:
    micro, accumulation = batches.micro_batches(48, replicas, most)
    assert micro * accumulation * replicas == 48
    own = 48 // replicas
    assert micro == max(size for size in range(1, most + 1) if own % size == 0)


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"16; does not divide by 3 .* take 15 or 18 samples, or "
                       r"1, 2, 4 ranks"):  # fmt: skip
        ElasticSampler(100, 16, rank=0, ranks=3)
    with pytest.raises(ConfigError, match=r"take 5 samples, or 1, 3 ranks"):
        batches.share(3, 5)
    with pytest.raises(ConfigError, match="take 45 or 50 samples, or 3, 4, 6, 8 ranks"):
        batches.share(48, 5)
    with pytest.raises(ConfigError, match="expected 1 sample or more"):
        batches.micro_batches(4, 2, 0)
    with pytest.raises(ConfigError, match="expected 1 or more"):
        batches.share(0, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"samples": 101}, "at most the 100 samples"),
        ({"samples": 0}, "expected a number of samples"),
        ({"length": True}, "expected a number of samples"),
        ({"rank": 2}, "expected 0 to 1"),
        ({"tail": "pad"}, 'expected "drop" or "keep"'),
    ],
)
def test_numbers_that_do_not_fit_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ElasticSampler(**{"length": 100, "samples": 8, "rank": 0, "ranks": 2, **given})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"length": 99}, ConfigError, r"length: found 100; the checkpoint's is 99"),
        ({"seed": 1}, ConfigError, "lost or read twice"),
        ({"shuffle": False}, ConfigError, "lost or read twice"),
        ({"tail": "keep"}, ConfigError, "lost or read twice"),
        ({"order": 1}, ConfigError, "shuffles otherwise"),
        ({"seen": -1}, CheckpointError, "'seen' of the saved state is -1"),
        ({"seen": 100}, CheckpointError, "'seen' of the saved state is 100"),
        ({"epoch": None}, CheckpointError, "'epoch' of the saved state is None"),
    ],
)
def test_another_state_is_refused_and_nothing_changes(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    (sampler,) = samplers(1, None, length=100, samples=8)
    segment([sampler], 3, 0, 8)
    before = sampler.state_dict()
    with pytest.raises(error, match=message):
        sampler.load_state_dict({**before, "epoch": 2, **change})
    assert sampler.state_dict() == before


def test_an_order_that_differs_behind_its_first_sample_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (sampler,) = samplers(1, None, length=100, samples=8)
    state, shuffle = sampler.state_dict(), torch.randperm

    def other(*given: Any, **named: Any) -> torch.Tensor:
        order = shuffle(*given, **named)
        return torch.cat([order[:1], order[1:].flip(0)])

    monkeypatch.setattr(torch, "randperm", other)
    with pytest.raises(ConfigError, match="shuffles otherwise"):
        sampler.load_state_dict(state)


def test_steps_that_nobody_counts_are_told() -> None:
    (sampler,) = samplers(1, None, length=32, samples=8)
    next(iter(sampler))
    list(sampler)
    with pytest.raises(ConfigError, match=r"call sampler.stepped\(\) after each"):
        sampler.state_dict()
    with pytest.raises(ConfigError, match=r"call sampler.stepped\(\) after each"):
        iter(sampler)
    with pytest.raises(ConfigError, match="2 calls of stepped"):
        one = ElasticSampler(32, 8)
        indices = iter(one)
        for _ in range(8):
            next(indices)
            one.state_dict()  # the first step may be under way
        one.stepped()
        one.stepped()


@pytest.mark.parametrize(("scaling", "factor"), [("linear", 2.0), ("sqrt", 2**0.5), ("keep", 1.0)])
def test_the_learning_rate_follows_as_the_user_says(scaling: str, factor: float) -> None:
    assert batches.lr_factor(16, 32, scaling) == factor
    assert batches.lr_factor(16, 16, None) == batches.lr_factor(None, 16, None) == 1.0
    with pytest.raises(ConfigError, match=r'had 16: .*lr="linear" \(times 2\)'):
        batches.lr_factor(16, 32, None)
    with pytest.raises(ConfigError, match="expected one of linear, sqrt, keep"):
        batches.lr_factor(16, 16, "cubic")


def test_rates_of_optimizer_and_scheduler_are_scaled() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    scale(optimizer, scheduler, 3.0)
    rates = [optimizer.param_groups[0]["lr"]]
    optimizer.step()
    scheduler.step()
    assert [*rates, optimizer.param_groups[0]["lr"]] == [3.0, 1.5]


def test_starts_with_a_store_of_their_own_need_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert agreement.start() == "3"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert agreement.start() == "0"
