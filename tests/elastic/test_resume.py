"""4 -> 2 -> 4 ranks under every engine: each sample once, the losses, the sum of residuals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.elastic.jobs import LENGTH, SAMPLES, Case, Segment, run
from tests.ranks import run_ranks
from tests.selection import by_day
from tests.training.test_checkpoint import add

pytest.importorskip("deepspeed")

TORCH = [Case(engine, lossy) for engine in ("ddp", "fsdp2") for lossy in (False, True)]
ZERO = [Case("zero0", True), Case("zero1"), Case("zero2", True), Case("zero3")]
REST = [Case("zero0"), Case("zero1", True), Case("zero2"), Case("zero3", True)]


def total(ranks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for name, values in rank.items():
            found[name] = add(found[name], values) if name in found else values
    return found


def hold_sums(case: Case, saved: list[Segment], loaded: list[Segment]) -> None:
    """The sum of residuals over the ranks is as it was, to rounding."""
    if case.engine in ("ddp", "fsdp2"):  # summed over the ranks already
        before, after = saved[0].after, loaded[0].before
    else:
        before = total([one.after for one in saved])
        after = total([one.before for one in loaded])
    assert before.keys() == after.keys()
    assert bool(before) == case.lossy
    for name, values in before.items():
        numel = min(values.numel(), after[name].numel())  # padding may be others'
        torch.testing.assert_close(after[name][:numel], values[:numel], rtol=1e-5, atol=1e-7)
        assert values.abs().max() > 0


def samples_of(ranks: list[Segment]) -> list[list[int]]:
    """Samples of each step, of all ranks."""
    return [sorted(sum(step, [])) for step in zip(*(one.samples for one in ranks), strict=True)]


@pytest.mark.parametrize("cases", by_day([TORCH, ZERO, REST], [TORCH, ZERO]), ids=str)
def test_four_ranks_two_and_four_again(cases: list[Case], tmp_path: Path) -> None:
    lossy = [case for case in cases if case.lossy]
    unbroken = list(zip(*run_ranks(4, run, cases, str(tmp_path / "whole"), 12), strict=True))
    on_two = list(zip(*run_ranks(2, run, lossy, str(tmp_path / "two"), 12), strict=True))
    parts = [
        list(zip(*run_ranks(ranks, run, cases, str(tmp_path / "parts"), steps), strict=True))
        for ranks, steps in ((4, 4), (2, 8), (4, 12))
    ]
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


def test_two_stages_become_two_replicas(tmp_path: Path) -> None:
    cut, whole = Case("pipe", stages=2), Case("pipe")
    kept = run_ranks(2, run, [cut], str(tmp_path / "whole"), 8)
    first = run_ranks(2, run, [cut], str(tmp_path / "parts"), 4)
    second = run_ranks(2, run, [whole], str(tmp_path / "parts"), 8)
    losses = first[0][0].losses + second[0][0].losses
    assert distance(losses, kept[0][0].losses) <= 1e-6
    read = samples_of([ranks[0] for ranks in second])
    assert read == [sorted(step) for step in kept[0][0].samples[4:]]
    assert second[0][0].resumed == (4, 4 * SAMPLES, 2)
