"""ElasticSampler: each sample once, whatever the numbers of ranks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR
from torch.utils.data import DataLoader, Dataset

from hybridcomp.elastic import batches
from hybridcomp.elastic.sampler import ElasticSampler
from hybridcomp.errors import CheckpointError, ConfigError
from hybridcomp.job import agreement
from hybridcomp.patches.common import resumed_parts

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


class Plateau(schedules.ReduceLROnPlateau):
    """A scheduler whose loss never falls."""

    def step(self, *_: Any) -> None:
        super().step(1.0)


#: schedulers that do not compute from ``base_lrs`` alone
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda one: schedules.LambdaLR(one, lambda step: 1 / (1 + step)),
    "warm-up": lambda one: schedules.SequentialLR(
        one, [schedules.LinearLR(one, 0.1, 1.0, 5), schedules.CosineAnnealingLR(one, 20)], [5]
    ),
    "chained": lambda one: schedules.ChainedScheduler([schedules.LambdaLR(one, lambda _: 0.5)]),
    "one cycle": lambda one: schedules.OneCycleLR(one, 0.1, total_steps=20),
    "cyclic": lambda one: schedules.CyclicLR(one, 0.01, 0.1, step_size_up=4),
    "cosine": lambda one: schedules.CosineAnnealingLR(one, 20, eta_min=0.04),
    "restarts": lambda one: schedules.CosineAnnealingWarmRestarts(one, 4, eta_min=0.04),
    "plateau": lambda one: Plateau(one, factor=0.8, patience=0, min_lr=0.02),
    "swa": lambda one: SWALR(one, 0.03, anneal_epochs=6),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_later_rates_of_a_scheduler_follow_too(name: str) -> None:
    def rates(factor: float) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
        scheduler, found = SCHEDULERS[name](optimizer), []
        for step in range(12):
            if step == 3:
                resumed_parts.scale(optimizer, scheduler, factor)
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found[3:]

    assert rates(0.5) == pytest.approx([0.5 * rate for rate in rates(1.0)])


def test_a_scheduler_with_rates_of_its_own_is_refused() -> None:
    class Mine:
        rates = (0.1, 0.2)

    resumed_parts.check_scheduler(Mine(), 1.0, None)
    with pytest.raises(ConfigError, match=r'lr: found linear with Mine; make it .* lr="keep"'):
        resumed_parts.check_scheduler(Mine(), 2.0, "linear")
    megatrons = SimpleNamespace(init_lr=0.0, max_lr=1.0, min_lr=0.5)
    resumed_parts.check_scheduler(megatrons, 2.0, "linear")
    group = {"lr": 0.75, "max_lr": 1.0, "min_lr": None}
    resumed_parts.scale(SimpleNamespace(param_groups=[group]), megatrons, 2.0)
    assert vars(megatrons) == {"init_lr": 0.0, "max_lr": 2.0, "min_lr": 1.0}
    assert group == {"lr": 1.5, "max_lr": 2.0, "min_lr": None}


def test_starts_with_a_store_of_their_own_need_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert agreement.start() == "3"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert agreement.start() == "0"
