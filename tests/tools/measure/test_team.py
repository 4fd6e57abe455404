"""Shapes of groups, and a time budget that all ranks agree on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hybridcomp.collectives.topology import Nodes
from hybridcomp.tools.measure import team as team_of_ranks
from hybridcomp.tools.measure.team import TELL_S, Team, TimeBudget, connected, shapes_of
from tests.ranks import RunRanks


@pytest.mark.parametrize(("nodes", "expected"), [
    ([0, 0], [(2, 1)]),
    ([0, 1], [(2, 2)]),
    ([0, 0, 0], [(2, 1), (3, 1)]),
    ([0, 0, 1, 1], [(2, 1), (2, 2), (4, 2)]),
    ([0, 0, 0, 0, 1, 1, 1, 1], [(2, 1), (2, 2), (8, 2), (4, 1), (4, 2)]),
    ([0, 1, 0, 1], [(2, 1), (2, 2), (4, 2)]),
])  # fmt: skip
def test_shapes_that_occur(nodes: list[int], expected: list[tuple[int, int]]) -> None:
    shapes = shapes_of(nodes)
    assert [(shape.ranks, shape.nodes) for shape in shapes] == expected
    for shape in shapes:
        members = [rank for group in shape.groups for rank in group]
        assert len(members) == len(set(members))
        for group in shape.groups:
            assert len({nodes[rank] for rank in group}) == shape.nodes


def test_large_jobs_have_few_shapes() -> None:
    shapes = shapes_of([rank // 8 for rank in range(192)])
    assert len([shape for shape in shapes if shape.ranks > 2]) == 6
    assert (192, 24) in [(shape.ranks, shape.nodes) for shape in shapes]


def agree() -> tuple[list[tuple[tuple[int, ...], bool]], list[float], list[int]]:
    team = Team(torch.device("cpu"), Nodes([0, 0, 1, 1], "the test"))
    groups = []
    for shape in connected(shapes_of(team.nodes.of_rank), team):
        total = torch.tensor([float(team.rank)])
        dist.all_reduce(total, group=shape.group)
        assert total.item() == sum(shape.own)
        groups.append((shape.own, shape.first))
    part = TimeBudget(60.0, team).part(0.5, "a part")
    return groups, list(part.allowances(3)), team.gather(team.rank)


def test_ranks_agree(on_ranks: RunRanks) -> None:
    found = on_ranks(4, agree)
    groups = [of_rank for of_rank, _, _ in found]
    assert groups[3] == [((2, 3), False), ((1, 3), False), ((0, 1, 2, 3), True)]
    allowances = [each for _, each, _ in found]
    assert all(each == allowances[0] for each in allowances)
    assert 0 < allowances[0][0] < allowances[0][1] < allowances[0][2] <= 30
    assert all(gathered == [0, 1, 2, 3] for _, _, gathered in found)


def test_a_long_part_says_how_many_cases_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    now = [0.0]
    monkeypatch.setattr(team_of_ranks, "say", said.append)
    monkeypatch.setattr(team_of_ranks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Team, "world_size", 1)
    part = TimeBudget(60.0, Team(torch.device("cpu"), Nodes([0], "the test"))).part(0.5, "links")
    for allowance in part.allowances(4):
        assert allowance == pytest.approx(max(0.0, 30.0 - now[0]) / (4 - now[0] / (0.6 * TELL_S)))
        now[0] += 0.6 * TELL_S
    assert said == [
        "  0.0 s of 60, about 60 s left: links", " 18.0 s of 60, about 42 s left: links: 2 to do",
    ]  # fmt: skip
