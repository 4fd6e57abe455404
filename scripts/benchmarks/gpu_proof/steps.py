"""List the steps of prove_on_gpu.py in order: short and informative ones first."""

from __future__ import annotations

import math
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from benchmarks.training_bench.gpu_cells import MEASURED

#: layouts measured first, with ``ARMS`` only
BRIEF = ("zero1", "zero2", "tp2", "pp2", "fsdp2", "ddp")
ARMS = ("recommended", "recommended when auto")
#: files and folders of GPU tests; each key is a step, and all run in parallel
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
#: the rest of tests/nccl
TESTS["nccl"] = (
    "tests/nccl",
    *(f"--ignore={file}" for places in TESTS.values() for file in places if "tests/nccl/" in file),
)
#: for each of these steps, tests that a CPU passes within a minute over gloo
ON_CPU = {
    "kernels": "tests/kernels/cuda/test_emulated.py",
    "devices": "tests/training/test_devices.py::test_offload_on_a_cpu",
    "zero": "tests/nccl/test_zero.py -k zero1",
    "mcore": "tests/nccl/test_mcore.py -k tp2",
    "pipe": "tests/nccl/test_pipe.py -k pp2",
    "example": "tests/nccl/test_example.py",
    "torch": "tests/nccl/test_torch.py -k ddp",
    "features": "tests/nccl/test_features.py -k auto",
    "nccl": "tests/nccl/test_split.py",
}
#: seconds: that a step needs to stop in time; of work that is worth a start; of a pair of losses
STOPPING_S, LEAST_S, PAIR_S = 45.0, 60.0, 200.0
#: share of its estimate that a step without a budget may take of a call with limited time
PATIENCE = 1.5
#: what compiles for a minute in the step ``codecs`` unless a test step beside others has done so
COMPILED = ("--sizes", "256M", "1M", "--repeats", "1", "--only", "compile", "Triton", "DeepSpeed")
BOUND = "of what its bytes allow at least 0.90, auto of the better at least 0.97"
#: model sizes of the speed benchmark: options, minutes of the first layouts and of each full layout
SIZES: dict[str, tuple[tuple[str, ...], float, float]] = {
    "85M": (("--together", "3"), 4.0, 15.0),
    "350M": (("--beside", "4"), 6.0, 20.0),
}


@dataclass(frozen=True)
class Step:
    """One command; ``shows``: the figures it yields; ``minutes``: its estimated duration.

    Attributes:
        budget: option that limits the command's seconds; "" if it cannot resume in another call.
            A call with limited time passes at most ``minutes``, and ends other steps after
            PATIENCE times as many.
        short: more options for a call with limited time.
        least: seconds of work for which a step with ``budget`` is worth a start.
        beside: name of a group of steps that run in parallel; "" if the step runs alone.
        env: variables of its environment.
        makes: the file that it writes last; if it exists, the step is done.
    """

    name: str
    shows: str
    minutes: float
    command: tuple[str, ...]
    budget: str = ""
    short: tuple[str, ...] = ()
    least: float = LEAST_S
    beside: str = ""
    env: dict[str, str] = field(default_factory=dict)
    makes: Path | None = None

    @property
    def has_data(self) -> bool:
        """True if the --data of the command exists, which an earlier step writes."""
        named = [Path(f"{b}_valid.idx") for a, b in pairwise(self.command) if a == "--data"]
        return all(path.exists() for path in named)

    def begins(self, left: float) -> bool:
        """Return whether the step may start with ``left`` seconds."""
        return left >= (self.least + STOPPING_S if self.budget else 60 * self.minutes)

    def most(self, left: float) -> float:
        """Return the seconds that the step may take of ``left``, so that a hang costs no other."""
        if self.budget or math.isinf(left):
            return left
        return min(left, max(LEAST_S, PATIENCE * 60 * self.minutes))

    def words(self, left: float) -> tuple[str, ...]:
        """Return the command line for ``left`` seconds."""
        if not self.budget or math.isinf(left):
            return self.command
        seconds = min(60 * self.minutes, max(left - STOPPING_S, left / 2))
        return (*self.command, *self.short, self.budget, f"{seconds:.0f}")


@dataclass(frozen=True)
class Lister:
    """Makes the steps. ``out``: output folder; ``cpu``: small scale, without a GPU."""

    out: Path
    cpu: bool = False

    def steps(self) -> Iterator[Step]:
        """Return all steps in their order."""
        yield Step("doctor", "driver, torch, CuPy and NVRTC fit together", 0.3,
                   (sys.executable, "-m", "hybridcomp.tools.commands.cli", "doctor"))  # fmt: skip
        yield from self._tests()
        yield self._codecs()
        most = ("--max-bytes", "200000") if self.cpu else ()
        yield self._data("text", "data of the speed", 0.3, *most)
        for size in SIZES:
            yield self._brief(size)
        yield from self._losses()
        yield self._waits()
        yield self._offload()
        for size in SIZES:
            yield from self._speeds(size)

    def _bench(self, name: str, *words: str | Path) -> tuple[str, ...]:
        return (sys.executable, f"scripts/benchmarks/{name}.py", *map(str, words))

    def _data(self, name: str, shows: str, minutes: float, *words: str) -> Step:
        place = self.out / "data" / name
        script = "scripts/examples/prepare_data.py"
        command = (sys.executable, script, *words, "--output", str(place))
        return Step(name, shows, minutes, command, makes=place.with_name(f"{name}_valid.idx"))

    def _tests(self) -> Iterator[Step]:
        for name, places in TESTS.items():
            words = ("-m", "gpu", *places)
            if self.cpu:
                words = tuple(ON_CPU[name].split())
            yield Step(
                f"tests-{name}", "pytest -m gpu is green, under 10 minutes in all", 3,
                (sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *words),
                beside="tests", env={"HYBRIDCOMP_NCCL_DEVICE": "cpu"} if self.cpu else {},
            )  # fmt: skip
        if not self.cpu:
            yield Step("peers", "peers compile", 3, self._kernels(self.out / "peers", *COMPILED),
                       beside="tests")  # fmt: skip

    def _codecs(self) -> Step:
        where = ("--cpu",) if self.cpu else ()
        command = self._kernels(self.out / "gpu_codecs", "--resume", *where)
        return Step("codecs", "shares of a copy, small messages, peers; the size exchange", 2.5,
                    command, budget="--seconds")  # fmt: skip

    def _kernels(self, name: Path, *words: str) -> tuple[str, ...]:
        """Return the kernels' benchmark, which writes NAME.md and NAME.json."""
        files = (word for kind in ("md", "json") for word in (f"--{kind}", f"{name}.{kind}"))
        return self._bench("bench_gpu", "--no-tests", *files, *words)

    def _speed(self, size: str, *words: str) -> tuple[str, ...]:
        """Return a training benchmark's command; all its records go to one file per model size."""
        small = ("--cpu", "--size", "tiny", "--rounds", "2", "--timed", "1", "--settling", "6")
        return self._bench(
            "bench_gpu_training", *(small if self.cpu else ("--size", size)), *SIZES[size][0],
            "--data", self.out / "data" / "text", "--out", self.out / f"{size}.jsonl", "--resume",
            *words,
        )  # fmt: skip

    def _brief(self, size: str) -> Step:
        words = ("--rounds", "4", "--layouts", *BRIEF, "--arms", *ARMS)
        minutes = SIZES[size][1]
        return Step(f"brief-{size}", BOUND, minutes, self._speed(size, *words), "--budget",
                    least=45 * minutes)  # fmt: skip

    def _speeds(self, size: str) -> Iterator[Step]:
        arms = ("--arms", *ARMS) if self.cpu else ()
        for layout in MEASURED:
            command = self._speed(size, "--layouts", layout, *arms)
            minutes = SIZES[size][2]
            yield Step(f"speed-{size}-{layout}", BOUND, minutes, command, "--budget",
                       least=15 * minutes)  # fmt: skip

    def _losses(self) -> Iterator[Step]:
        yield self._data("gpt2", "data of the losses", 3,
                         *(("--max-bytes", "200000") if self.cpu else loss_data()))  # fmt: skip
        small = (
            "--cpu", "--tiny", "--steps", "20", "--seeds", "0", "1", "--evaluations", "2",
            "--eval-tokens", "2048",
        )  # fmt: skip
        losses = self._bench(
            "gpu_losses", "--data", self.out / "data" / "gpt2", "--out", self.out / "losses",
            *(small if self.cpu else ()),
        )  # fmt: skip
        yield Step("losses", "gap at most 0.1 % for recommended", 6, losses, "--budget",
                   least=PAIR_S)  # fmt: skip

    def _waits(self) -> Step:
        """Return the step that profiles waits of the first layouts, a minute each."""
        small = ("--cpu", "--size", "tiny", "--steps", "1", "--warm", "1") if self.cpu else ()
        command = self._bench(
            "bench_gpu_waits", "--layouts", *BRIEF, "--data", self.out / "data" / "text", "--out",
            self.out / "waits", *small,
        )  # fmt: skip
        minutes = 2 if self.cpu else 5
        return Step("waits", "to which cause each percent is due that is missing", minutes, command)

    def _offload(self) -> Step:
        words = ("--device", "cpu") if self.cpu else ()
        command = self._bench("bench_offload", "--json", self.out / "offload.json", *words)
        return Step("offload", "offload at least 1.15, or native by auto", 3, command)


def loss_data() -> tuple[str, ...]:
    """Return options for the loss study's data: Python source, byte-level BPE trained on it.

    The sources are the standard library's, torch's and DeepSpeed's.
    """
    found = [sysconfig.get_paths()["stdlib"]]
    for package in ("torch", "deepspeed"):
        spec = find_spec(package)
        if spec is not None and spec.origin:
            found.append(str(Path(spec.origin).parent))
    return (*found, "--suffix", ".py", "--vocabulary", "50257", "--max-bytes", "90000000",
            "--valid-fraction", "0.04")  # fmt: skip
