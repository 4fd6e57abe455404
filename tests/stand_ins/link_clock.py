"""Fake clock of trials: makes a link as fast as a test needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from hybridcomp.autotune import timing
from hybridcomp.autotune.trials import StepTraffic


@contextmanager
def clock(native_s: float, coded_s: float) -> Iterator[list[int]]:
    """Run the collectives with these times; yields the sizes of the trials."""
    sizes: list[int] = []

    def seconds(run: Callable[[], None], device: torch.device) -> float:
        run()
        return {"native": native_s, "coded": coded_s}[run.__name__]

    def sized(trial: Callable[[StepTraffic], Any]) -> Callable[[StepTraffic], Any]:
        def of(sent: StepTraffic) -> Any:
            sizes.append(sent.numel)
            return trial(sent)

        return of

    real, real_confirm = timing.judge, timing.confirm
    with (
        patch.object(timing, "SIZES", (1 << 10, 1 << 11, 1 << 12)),
        patch.object(timing, "REPEATS", (2, 3)),
        patch.object(timing, "REPEATS_SEEN", (2, 3)),
        patch.object(timing, "WORK_NUMEL", 1 << 10),
        patch.object(timing, "seconds", seconds),
        patch(
            "hybridcomp.channels.online_tuner.judge",
            lambda trial, *rest: real(sized(trial), *rest),
        ),
        patch(
            "hybridcomp.channels.online_tuner.confirm",
            lambda trial, *rest: real_confirm(sized(trial), *rest),
        ),
    ):
        yield sizes
