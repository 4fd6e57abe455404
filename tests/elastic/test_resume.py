"""4 -> 2 -> 4 ranks under every engine: each sample once, the losses, the sum of residuals."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

import hybridcomp
from tests.elastic.jobs import (
    LENGTH,
    SAMPLES,
    Case,
    Layer,
    Segment,
    build_torch,
    engine_of,
    run,
    settings,
)
from tests.ranks import RankPool, run_ranks
from tests.selection import by_day
from tests.training.in_turn import start_deepspeed
from tests.training.test_checkpoint import add

pytest.importorskip("deepspeed")

TORCH = [Case(engine, lossy) for engine in ("ddp", "fsdp2") for lossy in (False, True)]
ZERO = [Case("zero0", True), Case("zero1"), Case("zero2", True), Case("zero3")]
DAY = [Case("fsdp2", True), Case("zero3", True)]
REST = [Case("zero0"), Case("zero1", True), Case("zero2"), Case("zero3", True)]

#: engines of the sweep, by numeric type; a step of 12 samples divides by 1, 2, 3 and 4 replicas
ENGINES = {
    "fp32": ("ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3", "pipe"),
    "bf16": ("fsdp2", "zero0", "zero1", "zero2", "zero3", "pipe"),
    "fp16": ("zero0", "zero1", "zero2", "zero3", "pipe"),
}
SWEEP = {
    dtype: [Case(engine, lossy, 0, dtype, 12) for engine in engines for lossy in (False, True)]
    for dtype, engines in ENGINES.items()
}
#: pipelines without ZeRO keep their stages: two, of one replica to three
SWEEP["stages"] = [
    Case("pipe0", lossy, 2, dtype, 12)
    for dtype in ("fp32", "fp16") for lossy in (False, True)
]  # fmt: skip
SWEEP["freezes"] = [replace(case, freezes=0) for case in SWEEP["fp32"] if not case.lossy]
SWEEP["freezes"] += [replace(case, freezes=2) for case in SWEEP["fp32"]]
#: DeepSpeed keeps the layout of a pipeline, and builds no other engine in that process
SWEEP["freezes"].sort(key=lambda case: case.is_pipeline)
SWEEP["megatron"] = [
    Case(engine, lossy, 1, dtype, 12)
    for engine, dtypes in (("megatron", ("fp32", "bf16", "fp16")), ("megatron-buckets", ("fp32",)),
                           ("megatron-sharded", ("fp32", "bf16", "fp16")))
    for dtype in dtypes for lossy in (False, True)
]  # fmt: skip


def sequences(widest: int) -> list[tuple[int, ...]]:
    """Return 4, 2 and 4 replicas, and five random sequences of up to ``widest``."""
    draw = random.Random(51)
    found: list[tuple[int, ...]] = [(widest, max(1, widest // 2), widest)]
    while len(found) < 6:
        one = tuple(draw.randint(1, widest) for _ in range(4))
        if all(a != b for a, b in pairwise(one)) and one not in found:
            found.append(one)
    return found


def total(ranks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for name, values in rank.items():
            found[name] = add(found[name], values) if name in found else values
    return found


def hold_sums(case: Case, saved: list[Segment], loaded: list[Segment]) -> float:
    """Check that the sum of residuals over the ranks is kept; return the largest rounding error."""
    if case.is_summed:
        before, after = saved[0].after, loaded[0].before
    else:
        before = total([one.after for one in saved])
        after = total([one.before for one in loaded])
    held = {name for name, values in before.items() if values.abs().max() > 0}
    assert held == {name for name, values in after.items() if values.abs().max() > 0}
    assert bool(held) == case.lossy or len(by_replica(saved)) == 1  # which sends nothing
    apart = 0.0
    for name in held:
        numel = min(before[name].numel(), after[name].numel())  # padding may be others'
        torch.testing.assert_close(after[name][:numel], before[name][:numel], rtol=1e-5, atol=1e-7)
        apart = max(apart, float((after[name][:numel] - before[name][:numel]).abs().max()))
    return apart


def samples_of(ranks: list[Segment]) -> list[list[int]]:
    """Return the samples of all ranks, by step."""
    return [sorted(sum(step, [])) for step in zip(*(one.samples for one in ranks), strict=True)]


@pytest.mark.parametrize("cases", by_day([DAY, TORCH, ZERO, REST], [DAY]), ids=str)
def test_four_ranks_two_and_four_again(cases: list[Case], tmp_path: Path) -> None:
    """By day checkpoints are converted in a rank; elsewhere in a process, as jobs do."""
    lossy = [case for case in cases if case.lossy]
    with RankPool(4) as four, RankPool(2) as two:

        def trained(pool: RankPool, cases: list[Case], folder: str, steps: int) -> list[Any]:
            every = pool.run(run, cases, str(tmp_path / folder), steps, cases is DAY)
            return list(zip(*every, strict=True))

        unbroken = trained(four, cases, "whole", 12)
        on_two = trained(two, lossy, "two", 12)
        parts = [trained(*part) for part in (
            (four, cases, "parts", 4), (two, cases, "parts", 8), (four, cases, "parts", 12)
        )]  # fmt: skip
    for number, case in enumerate(cases):
        first, second, third = (list(part[number]) for part in parts)
        whole = list(unbroken[number])
        steps = samples_of(first) + samples_of(second) + samples_of(third)
        assert steps == samples_of(whole)
        read = [index for step in steps for index in step]
        assert len(steps) == 12 and {len(step) for step in steps} == {SAMPLES}
        assert sorted(read[:96] + read[96:LENGTH]) != read[:LENGTH]  # shuffled
        losses = [one.losses for one in (first[0], second[0], third[0])]
        apart = distance(sum(losses, []), whole[0].losses)
        if case.lossy:
            natural = distance(list(on_two[lossy.index(case)])[0].losses, whole[0].losses)
            assert apart <= 2 * natural, case.name
        else:
            assert apart <= 1e-6, case.name
        hold_sums(case, first, second)
        hold_sums(case, second, third)
        for ranks, at, segment in ((4, 4, second), (2, 8, third)):
            assert {one.resumed for one in segment} == {(at, at * SAMPLES, ranks)}, case.name
            assert f"{len(segment)} go on from step {at}, after {at * SAMPLES} samples" in (
                segment[0].said
            )
            assert "lacks files" not in segment[0].said
            assert not segment[1].said  # one line, on one rank


def distance(ones: list[float], others: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(ones, others, strict=True))


def of_cases(ranks: int, cases: list[Case], *args: Any) -> dict[Case, list[Segment]]:
    found = run_ranks(ranks, run, cases, *args, timeout=1800.0)
    return dict(zip(cases, map(list, zip(*found, strict=True)), strict=True))


def unchanged(cases: list[Case], ranks: Iterable[int], each: int, folder: Path, steps: int) -> Any:
    """Train jobs that keep their replicas of ``each`` ranks; return all segments."""
    return {
        count: of_cases(each * count, cases, str(folder), steps, True, False)
        for count in dict.fromkeys(ranks)
    }


def hold_sequence(
    cases: list[Case], counts: tuple[int, ...], each: int, kept: Any, folder: Path, steps: int
) -> None:
    """Train on so many replicas one after the other; each sample once, losses and residuals hold.

    Prints of each case the largest distance to the job that keeps the most replicas; that of two
    jobs which change nothing; the largest error of a sum of residuals.
    """
    per = steps // len(counts)
    ends = [*range(per, per * len(counts), per), steps]
    parts = [of_cases(each * count, cases, str(folder), end, True)
             for count, end in zip(counts, ends, strict=True)]  # fmt: skip
    wrong = []
    for case in cases:
        whole = {count: ranks[case] for count, ranks in kept.items()}
        try:
            figures = held(case, [part[case] for part in parts], ends, whole)
            print(f"{case.name} {counts}: {figures[0]:.1e} of {figures[1]:.1e}, sums "
                  f"{figures[2]:.1e}", flush=True)  # fmt: skip
        except AssertionError as error:
            wrong.append(f"{case.name} {counts}: {error}")
    assert not wrong, "\n".join(wrong)


def held(
    case: Case, segments: list[list[Segment]], ends: list[int], kept: dict[int, list[Segment]]
) -> tuple[float, float, float]:
    """Return the figures of a case. Raises AssertionError if the segments are not one job's."""
    refused = {one.refused for ranks in (*segments, *kept.values()) for one in ranks}
    assert refused == {""}, refused
    whole = kept[max(kept)]
    read = [step for ranks in segments for step in samples_of(by_replica(ranks))]
    assert read == samples_of(by_replica(whole)), "other samples"
    assert {len(step) for step in read} == {case.samples}
    counts = Counter(index for step in read for index in step)
    epochs, rest = divmod(len(read) * case.samples, LENGTH)
    wanted = Counter({epochs + 1: rest}) + Counter({epochs: LENGTH - rest} if epochs else {})
    assert Counter(counts.values()) == wanted, counts
    losses = sum((ranks[0].losses for ranks in segments), [])
    apart = distance(losses, whole[0].losses)
    natural = max(distance(ranks[0].losses, whole[0].losses) for ranks in kept.values())
    most = 2 * natural if case.lossy or case.dtype != "fp32" else 1e-6
    assert apart <= most, f"losses are {apart} apart, of {most}"
    sums = [hold_sums(case, one, other) for one, other in pairwise(segments)]
    for at, ranks in zip(ends, segments[1:], strict=False):
        assert {one.resumed[:2] for one in ranks} == {(at, at * case.samples)}
        assert "lacks files" not in ranks[0].said
    if case.freezes is not None:
        frozen = {one.frozen for ranks, end in zip(segments, ends, strict=True)
                  for one in ranks if end > case.freezes}  # fmt: skip
        assert frozen == {("0.down", "0.up")}, frozen
    return apart, natural, max(sums)


def by_replica(ranks: list[Segment]) -> list[Segment]:
    """Return a rank of each replica: ranks that have drawn different samples."""
    return list({repr(one.samples): one for one in ranks}.values())


def test_ranks_change_at_random_by_day(tmp_path: Path) -> None:
    cases = [Case("ddp", samples=12), Case("ddp", samples=12, freezes=0)]
    kept = unchanged(cases, (3, 1), 1, tmp_path / "kept", 6)
    hold_sequence(cases, (3, 1, 2), 1, kept, tmp_path / "parts", 6)


@pytest.mark.nightly
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("group", SWEEP)
def test_ranks_change_at_random(group: str, tmp_path: Path) -> None:
    """4, 2, 4 and five random sequences; the figures are those of docs/elastic.md."""
    cases, each = SWEEP[group], 2 if group == "stages" else 1
    orders = sequences(3 if group == "stages" else 4)
    steps = 12
    kept = unchanged(cases, (4, 3, 2, 1)[each - 1 :], each, tmp_path / "kept", steps)
    wrong = []
    for number, counts in enumerate(orders):
        try:
            hold_sequence(cases, counts, each, kept, tmp_path / f"parts{number}", steps)
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)


def test_two_stages_become_two_replicas(tmp_path: Path) -> None:
    cut, whole = Case("pipe", stages=2), Case("pipe")
    with RankPool(2) as pool:
        kept = pool.run(run, [cut], str(tmp_path / "whole"), 8)
        first = pool.run(run, [cut], str(tmp_path / "parts"), 4)
    second = run_ranks(2, run, [whole], str(tmp_path / "parts"), 8, True)
    losses = first[0][0].losses + second[0][0].losses
    assert distance(losses, kept[0][0].losses) <= 1e-6
    read = samples_of([ranks[0] for ranks in second])
    assert read == [sorted(step) for step in kept[0][0].samples[4:]]
    assert second[0][0].resumed == (4, 4 * SAMPLES, 2)


def turned_on(folder: str) -> int:
    """Save a native job, and resume it with a block; return the step."""
    for is_first in (True, False):
        model, optimizer = build_torch(Case("ddp"))
        if is_first:
            hybridcomp.detach(model)
            weights, states = get_state_dict(model, optimizer)
            save({"model": weights, "optimizer": states}, checkpoint_id=f"{folder}/step7")
    return hybridcomp.resume(model, folder, optimizer=optimizer).step


def test_a_job_that_was_native_goes_on_from_its_step(tmp_path: Path) -> None:
    assert run_ranks(2, turned_on, str(tmp_path)) == [7, 7]


def adapted(folder: str) -> list[bool]:
    """Save a ZeRO 1 job whose first layer is never trained; resume it from other weights.

    Returns whether each parameter is then the saved one.
    """
    start_deepspeed()
    hybridcomp.install()
    engines = []
    for seed in (0, 2):
        model = nn.Sequential(Layer(seed), Layer(seed + 1))
        model[0].requires_grad_(False)
        engines.append(engine_of(model, settings(Case("zero1"))))
    first, second = engines
    first.save_checkpoint(folder)
    hybridcomp.resume(second, folder)
    every = zip(first.module.parameters(), second.module.parameters(), strict=True)
    return [torch.equal(saved, here) for saved, here in every]


def test_adapters_beside_frozen_weights_resume(tmp_path: Path) -> None:
    """At ZeRO 1 DeepSpeed's files have shapes of trained parameters only."""
    assert run_ranks(2, adapted, str(tmp_path)) == [[True] * 4] * 2
