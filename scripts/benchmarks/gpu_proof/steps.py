"""List the steps of prove_on_gpu.py, in their order: what is short and tells most comes first."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

#: files and folders with tests for a GPU: a step for each, and those for all run side by side
TESTS: dict[str, tuple[str, ...]] = {
    "kernels": (
        "tests/kernels/cuda", "tests/tools/measure", "tests/nn",
        "tests/tools/commands/test_doctor.py",
    ),
    "devices": ("tests/training/test_devices.py",),
    "zero": ("tests/nccl/test_zero.py",),
    "mcore": ("tests/nccl/test_mcore.py",),
    "pipe": ("tests/nccl/test_pipe.py",),
    "example": ("tests/nccl/test_example.py",),
    "torch": ("tests/nccl/test_torch.py",),
    "features": ("tests/nccl/test_features.py",),
}  # fmt: skip
#: all that tests/nccl has beside these
TESTS["nccl"] = (
    "tests/nccl",
    *(f"--ignore={file}" for places in TESTS.values() for file in places if "tests/nccl/" in file),
)
#: of each of these steps, tests that a CPU passes within a minute, over gloo
ON_CPU = {
    "kernels": "tests/kernels/cuda/test_emulated.py",
    "devices": "tests/training/test_devices.py",
    "zero": "tests/nccl/test_zero.py -k zero1",
    "mcore": "tests/nccl/test_mcore.py -k tp2",
    "pipe": "tests/nccl/test_pipe.py -k pp2",
    "example": "tests/nccl/test_example.py",
    "torch": "tests/nccl/test_torch.py -k ddp",
    "features": "tests/nccl/test_features.py -k auto",
    "nccl": "tests/nccl/test_split.py",
}
#: seconds that a step that stops in time may need to do so; fewest that are worth a start
STOPPING_S, LEAST_S = 45.0, 60.0


@dataclass(frozen=True)
class Step:
    """One command; ``shows``: which figures come from it; ``minutes``: about how long it takes.

    Attributes:
        budget: its option for the seconds after which it stops, where it goes on in another call;
            it gets ``minutes`` of a call whose time is limited.
        beside: steps of the same name run at the same time.
        env: variables of its environment.
    """

    name: str
    shows: str
    minutes: float
    command: tuple[str, ...]
    budget: str = ""
    beside: str = ""
    env: dict[str, str] = field(default_factory=dict)

    def begins(self, left: float) -> bool:
        """Return whether ``left`` seconds are enough to begin the step."""
        return left >= (LEAST_S + STOPPING_S if self.budget else 60 * self.minutes)

    def words(self, left: float) -> tuple[str, ...]:
        """Return the command, for ``left`` seconds."""
        if not self.budget or math.isinf(left):
            return self.command
        seconds = min(60 * self.minutes, max(left - STOPPING_S, left / 2))
        return (*self.command, self.budget, f"{seconds:.0f}")


@dataclass(frozen=True)
class Lister:
    """Makes the steps. ``out``: their folder; ``cpu``: on a small scale, without a GPU."""

    out: Path
    cpu: bool = False

    def steps(self) -> Iterator[Step]:
        """Return all steps in their order."""
        yield Step("doctor", "driver, torch, CuPy and NVRTC fit together", 0.3,
                   (sys.executable, "-m", "hybridcomp.tools.commands.cli", "doctor"))  # fmt: skip
        yield from self._tests()
        yield self._codecs()

    def _tests(self) -> Iterator[Step]:
        for name, places in TESTS.items():
            words = ("-m", "gpu", *places)
            if self.cpu:
                words = tuple(ON_CPU[name].split())
            yield Step(
                f"tests-{name}", "pytest -m gpu is green, under 10 minutes in all", 3,
                (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words),
                beside="tests", env={"HYBRIDCOMP_NCCL_DEVICE": "cpu"} if self.cpu else {},
            )  # fmt: skip

    def _codecs(self) -> Step:
        files = [
            word
            for kind in ("md", "json", "png")
            for word in (f"--{kind}", str(self.out / f"gpu_codecs.{kind}"))
        ]
        where = ("--cpu",) if self.cpu else ()
        command = ("scripts/benchmarks/bench_gpu.py", "--no-tests", "--resume", *files, *where)
        return Step("codecs", "shares of a copy, small messages, peers; the size exchange", 2.5,
                    (sys.executable, *command), budget="--seconds")  # fmt: skip
