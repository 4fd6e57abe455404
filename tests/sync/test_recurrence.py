"""The arithmetic of meetings against simulations of the published recurrences, in fp64."""

from __future__ import annotations

import math
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hybridcomp.errors import CodecError
from hybridcomp.job.parameter_names import named_once
from hybridcomp.sync import Fragment, Masters, OuterRule, island_payloads
from hybridcomp.sync.given_state import arrived, state_for_others, take_state
from hybridcomp.sync.master_weights import cut
from hybridcomp.sync.progress import Meeting, Part, Progress
from tests.sync import simulated
from tests.sync.simulated import Quadratic, first

ISLANDS, STEPS, EVERY = 3, 20, 4


def keep_largest(values: Tensor) -> Tensor:
    kept = values.abs().topk(5).indices
    return torch.zeros_like(values).index_copy_(0, kept, values[kept] * 0.75)


def test_sparseloco() -> None:
    """``test_meetings`` holds the other recurrences, whose messages are exact."""
    rule = OuterRule(1.0, 0.0, False, error_feedback=True, decay=0.95)
    losses = [Quadratic.of(island) for island in range(ISLANDS)]
    islands, weights = [Fragment(rule, first()) for _ in losses], [first() for _ in losses]
    for step in range(1, STEPS + 1):
        weights = [loss.step(now) for loss, now in zip(losses, weights, strict=True)]
        if step % EVERY == 0:
            pairs = list(zip(islands, weights, strict=True))
            sent = [keep_largest(island.send(now)) for island, now in pairs]
            weights = [one.arrive(sent, index, now) for index, (one, now) in enumerate(pairs)]
    expected = simulated.sparseloco(ISLANDS, STEPS, EVERY, 0.95, keep_largest)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("keeps_progress", [False, True])
def test_a_skipped_meeting_is_made_up_for(keeps_progress: bool) -> None:
    start = torch.zeros(4)
    rule = OuterRule(1.0, 0.0, False, error_feedback=True, keeps_progress=keeps_progress)
    fragment = Fragment(rule, start, base=start.clone() if keeps_progress else None)
    fragment.residual = torch.ones(4)
    first_message = fragment.send(torch.full((4,), -2.0)).clone()
    fragment.skip()
    again = fragment.send(torch.full((4,), -2.0))
    torch.testing.assert_close(again, first_message)
    torch.testing.assert_close(again, torch.full((4,), 3.0))


@given(st.integers(0, 2000), st.integers(1, 40), st.integers(1, 9))
def test_every_element_is_sent_once(numel: int, fragments: int, ranks: int) -> None:
    taken = torch.zeros(numel, dtype=torch.int64)
    for rank in range(ranks):
        for low, high, padded in cut(numel, fragments, ranks, rank):
            assert high - low <= padded
            taken[low:high] += 1
    assert bool((taken == 1).all())


class Tied(nn.Module):
    """Parameters, some of which have several names."""

    def __init__(self, tensors: list[Tensor], order: list[int]) -> None:
        super().__init__()
        held = [nn.Parameter(tensor) for tensor in tensors]
        for number, index in enumerate(order):
            self.register_parameter(f"name{number}", held[index])


@given(
    st.lists(st.integers(0, 13), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_every_tensor_is_averaged_once(
    sizes: list[int], islands: int, fragments: int, ranks: int, random: Random
) -> None:
    """Half of the mean change is applied: averaging twice would apply a quarter, never all."""
    order = [*range(len(sizes)), *random.choices(range(len(sizes)), k=3)]
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    rows = [
        [torch.randn(size, dtype=torch.float64, generator=generator) for size in sizes]
        for _ in range(islands)
    ]
    expected = [torch.stack(copies).mean(dim=0) / 2 for copies in zip(*rows, strict=True)]
    found = [named_once(Tied(row, order))[0] for row in rows]
    masters = [
        Masters([(n, p.numel()) for n, p in one.items()], partial(data_of, one), lambda: None, True)
        for one in found
    ]
    for rank in range(ranks):
        for low, high, padded in cut(masters[0].numel, fragments, ranks, rank):
            start = torch.zeros(padded, dtype=torch.float64)
            rule = OuterRule(0.5, 0.0, False)
            parts = [Fragment(rule, start.clone()) for _ in masters]
            now = [one.read(low, high, padded) for one in masters]
            sent = [part.send(own) for part, own in zip(parts, now, strict=True)]
            for index, (one, part) in enumerate(zip(masters, parts, strict=True)):
                new = part.arrive([row.clone() for row in sent], index, now[index])
                one.exchange(low, high, new.clone(), [])
    for row in rows:
        for tensor, wanted in zip(row, expected, strict=True):
            torch.testing.assert_close(tensor, wanted, rtol=0, atol=1e-12)


def data_of(parameters: dict[str, nn.Parameter]) -> list[Tensor]:
    return [parameter.data for parameter in parameters.values()]


def state_of_a_peer() -> tuple[Progress, dict[str, Any]]:
    """Return the state that an island gives to others: two fragments, the first in flight."""
    progress = Progress(clock=3)
    for low in (0, 4):
        fragment = Fragment(OuterRule(), torch.full((4,), float(low)))
        progress.parts.append(Part(low, low + 4, 4, fragment))
    progress.parts[0].fragment.send(torch.ones(4))
    progress.under_way.append(Meeting(0, 5, torch.ones(4), arrived))
    packed = bytes(island_payloads.pack_state(state_for_others(progress)))
    return progress, island_payloads.unpack_state(packed)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("start", [torch.zeros(4)]),
        ("start", [torch.zeros(4), torch.zeros(3)]),
        ("start", [torch.zeros(4), torch.full((4,), math.nan)]),
        ("start", [torch.zeros(4), "zeros"]),
        ("momentum", [None, torch.zeros(4, dtype=torch.float64)]),
        ("clock", -1),
        ("unsent", 2),
        ("meetings", [[2, 5]]),
        ("meetings", [[0]]),
        ("meetings", None),
    ],
)  # fmt: skip
def test_a_peers_state_that_does_not_fit_changes_nothing(key: str, value: Any) -> None:
    progress, state = state_of_a_peer()
    written: list[int] = []
    with pytest.raises(CodecError, match="state that does not fit"):
        take_state({**state, key: value}, progress, lambda index, _: written.append(index))
    assert not written and progress.clock == 3 and len(progress.under_way) == 1
    assert torch.equal(progress.parts[1].fragment.start, torch.full((4,), 4.0))
    take_state({**state, "clock": 9}, progress, lambda index, _: written.append(index))
    assert written == [0, 1] and progress.clock == 9


def test_a_peers_state_that_is_damaged_is_refused() -> None:
    whole = bytes(island_payloads.pack_state({"clock": 1}))
    for damaged in (b"", whole[:40], whole[:-30], b"not a file" * 20):
        with pytest.raises(CodecError, match="is damaged"):
            island_payloads.unpack_state(damaged)
