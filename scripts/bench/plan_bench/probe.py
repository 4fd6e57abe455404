"""A rank that times the block of ``hybridcomp measure`` whenever it has a turn, as that does.

    probe.py 2x128x256x4

A machine's speed is another one a minute later: what the block takes between the steps of the
trainings says at which of its speeds they ran.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # scripts/, as all imports here

import torch

from bench.training_bench import turns
from hybridcomp.measure.block import BlockSize
from hybridcomp.measure.clock import HostCallClock
from hybridcomp.measure.trainings import Alone


def main() -> int:
    """Time until the bench ends, which ends this program."""
    torch.set_num_threads(1)
    block = Alone(BlockSize.parse(sys.argv[1]), torch.device("cpu"), torch.float32)
    seat, clock = turns.own_seat(), None
    assert seat is not None, f"nobody gives turns: {turns.VARIABLE} is not set"
    step: dict[str, float] = {}
    while True:
        seat.wait(step)
        clock = clock or HostCallClock()
        block.time(clock)  # a rank that others have run beside finds its memory cold
        step = {"seconds": block.time(clock)}


if __name__ == "__main__":
    sys.exit(main())
