"""Picking tokens from logits: shares, limits, seeds, stops."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from hybridcomp.errors import ConfigError
from hybridcomp.generation import Picked, Sampling
from hybridcomp.generation.requests import Requests

LOGITS = torch.tensor([1.0, 3.0, 2.0, 0.0, -1.0])


def shares(sampling: Sampling, count: int = 500) -> list[float]:
    counts = Counter(sampling.pick(LOGITS, 0, place) for place in range(count))
    return [counts[token] / count for token in range(5)]


def test_greedy_takes_the_first_of_the_largest() -> None:
    assert Sampling().pick(LOGITS, 0, 0) == 1
    assert Sampling().pick(torch.tensor([0.0, 2.0, 2.0]), 0, 0) == 1


def test_tokens_are_drawn_by_their_probability() -> None:
    for temperature in (0.5, 2.0):
        want = (LOGITS / temperature).softmax(0).tolist()
        assert shares(Sampling(temperature)) == pytest.approx(want, abs=0.06)


def test_top_k_and_top_p_leave_the_most_likely() -> None:
    want = LOGITS.softmax(0)
    two = torch.tensor([0.0, want[1], want[2], 0.0, 0.0])
    assert shares(Sampling(1.0, top_k=2)) == pytest.approx((two / two.sum()).tolist(), abs=0.06)
    # 0.636 and 0.234: the first alone is below 0.7
    assert shares(Sampling(1.0, top_p=0.7)) == pytest.approx((two / two.sum()).tolist(), abs=0.06)
    assert shares(Sampling(1.0, top_p=0.5)) == [0, 1, 0, 0, 0]
    # the first of the two remaining tokens has 0.73
    assert shares(Sampling(1.0, top_k=2, top_p=0.7)) == [0, 1, 0, 0, 0]
    assert shares(Sampling(1.0, top_k=5)) == shares(Sampling(1.0))


def test_each_token_has_its_random_number() -> None:
    def text(**given: Any) -> list[int]:
        sampling = Sampling(1.5, **given)
        return [sampling.pick(LOGITS, n, place) for n in range(4) for place in range(16)]

    assert text(seed=1) == text(seed=1) != text(seed=2)
    tokens = text()
    assert len({tuple(tokens[at : at + 16]) for at in range(0, 64, 16)}) == 4
    torch.manual_seed(5)
    before = torch.get_rng_state()
    text()
    assert torch.equal(before, torch.get_rng_state())


def test_rounding_does_not_change_what_is_drawn() -> None:
    """Differences of 1e-6 reorder equal logits, but a seed's answers stay."""
    flat = torch.zeros(50)
    other = flat + 1e-6 * torch.randn(50, generator=torch.Generator().manual_seed(0))
    for sampling in (Sampling(1.0), Sampling(0.7, seed=3)):
        pairs = [[sampling.pick(logits, 0, at) for at in range(300)] for logits in (flat, other)]
        assert pairs[0] == pairs[1]


def test_tokens_beyond_a_vocabulary_are_never_drawn() -> None:
    assert Sampling(vocabulary=1).pick(LOGITS, 0, 0) == 0
    assert {Sampling(5.0, vocabulary=3).pick(LOGITS, 0, at) for at in range(99)} == {0, 1, 2}


def test_wrong_settings_are_told() -> None:
    for given, match in (
        ({"temperature": -1.0}, "temperature: found -1.0"),
        ({"temperature": float("nan")}, "temperature: found nan"),
        ({"top_k": -1}, "top_k: found -1"),
        ({"top_p": 0.0}, "top_p: found 0.0"),
        ({"stop": ((3,), ())}, "stop: found nothing"),
    ):
        with pytest.raises(ConfigError, match=match):
            Sampling(**given)


def test_answers_end_behind_a_stop() -> None:
    sampling = Sampling(stop=((7,), (1, 2)))
    assert sampling.stops([3, 1, 2, 4], 0) == 3
    assert sampling.stops([3, 1, 4, 2], 0) is None
    assert sampling.stops([3, 7, 1], 0) == 2
    assert sampling.stops([1, 2], 1) == 2  # a run that began earlier


def test_slots_let_waiting_prompts_in() -> None:
    asked = [[1] * length for length in (3, 1, 2, 5, 1)]
    requests = Requests(asked, 2, Sampling(stop=((9,),)).stops, batch=2, slots=4)
    assert requests.slots == 3
    first = requests.next(0)
    assert first is not None and [part.sequence for part in first.parts] == [0, 1]
    second = requests.next(1)
    assert second is not None and [part.sequence for part in second.parts] == [2, 3]
    requests.take(0, [Picked((9,), (9,)), Picked((4,), (4,))])  # the first one stops
    then = requests.next(0)
    assert then is not None and then.ended == (0,)
    assert [(p.sequence, p.tokens, p.place) for p in then.parts] == [(1, (4,), 1), (4, (1,), 0)]
    requests.take(0, [Picked((5,), (5,)), Picked((6, 9, 8), (8,))])  # both end, one inside a run
    requests.take(1, [Picked((1, 2, 3), (3,)), Picked((7,), (7,))])  # no more than requested
    assert requests.next(0) is None
    last = requests.next(1)
    assert last is not None and last.ended == (1, 4, 2)
    assert requests.answers == [[9], [4, 5], [1, 2], [7], [6, 9]]


def test_a_pass_has_a_limit_of_tokens() -> None:
    requests = Requests([[1] * 1500] * 3, 1, Sampling().stops, batch=3, slots=1)
    assert requests.most == 2048
    assert [len(p.parts) for p in [requests.next(0)] if p is not None] == [1]
    requests = Requests([[1] * 3000] * 3, 1, Sampling().stops, batch=3, slots=1)
    assert requests.most == 3000
