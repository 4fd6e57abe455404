"""Timing a call: number of repetitions, and concurrent work."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from hybridcomp.tools.measure.clock import (
    LEAST,
    MOST,
    MOST_INNER,
    DeviceCallClock,
    HostCallClock,
    samples,
)


class Told(HostCallClock):
    """A clock on which every call takes a given time."""

    def __init__(self, each_s: float) -> None:
        self.each_s, self.calls = each_s, 0

    def seconds(self, run: Callable[[], object], times: int = 1) -> float:
        self.calls += times
        return self.each_s


@pytest.mark.parametrize(("each_s", "allowance_s", "count", "calls"), [
    (1.0, 10.0, 10, 12),
    (1.0, 0.0, LEAST, 2 + LEAST),
    (1e-6, 1.0, MOST, 2 + MOST * MOST_INNER),
    (2.5e-4, 0.01, 20, 42),
])  # fmt: skip
def test_as_many_timings_as_there_is_time_for(
    each_s: float, allowance_s: float, count: int, calls: int
) -> None:
    clock = Told(each_s)
    assert len(samples(clock, lambda: None, allowance_s)) == count
    assert clock.calls == calls


def test_a_call_beside_products() -> None:
    done: list[None] = []

    def product() -> None:
        time.sleep(0.002)
        done.append(None)

    seconds, left = HostCallClock().beside(lambda: time.sleep(0.05), product, 0.002, 0.05)
    assert seconds >= 0.05
    assert len(done) >= 2
    assert 0 < left <= 1
    # products ten times slower than alone leave a tenth of the compute
    _, left = HostCallClock().beside(lambda: time.sleep(0.05), product, 0.0002, 0.05)
    assert left <= 0.11


@pytest.mark.gpu
def test_events_time_what_the_device_does() -> None:
    device = torch.device("cuda", 0)
    values = torch.randn(4096, 4096, device=device)
    clock = DeviceCallClock(device)
    clock.seconds(lambda: values @ values)  # loads cuBLAS, which takes longer than a product
    one, ten = clock.seconds(lambda: values @ values), clock.seconds(lambda: values @ values, 10)
    assert 0.2 < one / ten < 5
    seconds, left = clock.beside(lambda: values @ values, lambda: values @ values, ten, ten)
    assert seconds > 0.5 * ten
    assert 0 <= left <= 1
