"""Weigh the cost of a size exchange against the bytes that a variable-size codec saves.

``auto`` takes blockint for fp16 messages of fewer than SMALL_NUMEL values and radix for longer ones
(codecs/cheapest.py). Radix has to recover the size exchange and its slower kernels:

    n * saved bytes / link = cost of an exchange + n * (seconds of radix - seconds of blockint)

n: values that a rank sends per exchange; an all_reduce has two exchanges.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu_bench.measure import Bench, cuda
from hybridcomp.codecs import Bounded, Codec
from hybridcomp.codecs.cheapest import SMALL_NUMEL
from hybridcomp.collectives.wire import payload_sizes, transport
from hybridcomp.collectives.wire.group import Group
from hybridcomp.collectives.wire.handle import Meter

#: ranks' entries in the size exchange
RANKS = 8
BOUNDS = (0.2, 0.1, 0.05, 0.02, 0.01)
#: GB/s: NDR InfiniBand, 100 and 10 Gbit/s
LINKS = (50.0, 12.5, 1.25)
#: values, enough to make launch overhead negligible
NUMEL = 1 << 26


@dataclass(frozen=True)
class Cost:
    """Host seconds of one size exchange, during which the device is idle."""

    wait_s: float  # copy of the device's words to pinned memory, and the wait for its event
    exchange_s: float | None  # behind the message, in a group of this process alone
    left_out: str = ""  # reason for a missing ``exchange_s``

    @property
    def seconds(self) -> float:
        """Return the best known figure."""
        return self.wait_s if self.exchange_s is None else self.exchange_s


@dataclass(frozen=True)
class Choice:
    """Both codecs of ``auto`` for a bound; bits saved and seconds added by radix are per value."""

    bound: float
    fixed: str
    variable: str
    saved_bits: float
    slower_s: float

    def break_even(self, cost_s: float, gbps: float) -> float | None:
        """Return the number of values above which variable size wins at ``gbps`` GB/s, or None."""
        gain = self.saved_bits / 8 / (gbps * 1e9) - self.slower_s
        return cost_s / gain if gain > 0 else None


def cost(device: torch.device, repeats: int = 50) -> Cost:
    """Measure on ``device``; destroys the process group that it creates."""
    words = torch.zeros(2 * RANKS, dtype=torch.int64, device=device)
    wait_s = _median(lambda: payload_sizes.SIZES.copied(words).wait(), repeats)
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        with _alone(backend):
            return Cost(wait_s, _median(lambda: _exchange(words), repeats))
    except Exception as error:  # a failing backend may raise anything
        reason = " ".join(str(error).split())[:200]
        return Cost(wait_s, None, f"{backend}: {type(error).__name__}: {reason}")


def _exchange(words: Tensor) -> None:
    theirs, mine = words[RANKS:], words[:RANKS]
    group = Group.of(None)
    message = transport.all_to_all(theirs, mine, [RANKS], [RANKS], group, Meter())
    for work in payload_sizes.SIZES.fetch(words, message, group):
        work.wait()


@contextmanager
def _alone(backend: str) -> Iterator[None]:
    """Yield a default group of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        method = f"file://{folder}/store"
        dist.init_process_group(backend, init_method=method, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _median(run: Callable[[], object], repeats: int) -> float:
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def candidates() -> Iterator[tuple[float, Codec, Codec]]:
    """Return ``(bound, fixed size, variable size)`` where ``auto`` has both for fp16."""
    for bound in BOUNDS:
        codec = Bounded(bound)
        small, large = (
            codec.for_message(numel, torch.float16, 2).split_error_budget(
                1, 1, result=torch.float16
            )[0]
            for numel in (SMALL_NUMEL - 1, SMALL_NUMEL)
        )
        if small.fixed_size and not large.fixed_size:
            yield bound, small, large


def choices(bench: Bench, device: torch.device, numel: int = NUMEL) -> list[Choice]:
    """Measure every candidate on Gaussian fp16 values."""
    generator = torch.Generator(device).manual_seed(0)
    values = torch.randn(numel, generator=generator, device=device).half()
    found = []
    for bound, fixed, variable in candidates():
        fixed_s, fixed_nbytes = _times(bench, fixed, values)
        variable_s, nbytes = _times(bench, variable, values)
        variable_s += bench.copy_seconds(2 * nbytes)  # payloads are compacted
        found.append(
            Choice(
                bound, fixed.spec, variable.spec, 8 * (fixed_nbytes - nbytes) / numel,
                (variable_s - fixed_s) / numel,
            )
        )  # fmt: skip
    return found


def _times(bench: Bench, codec: Codec, values: Tensor) -> tuple[float, int]:
    """Return ``(seconds to encode and decode, bytes)``."""
    room = values.new_empty(codec.wire_nbytes(values.numel(), values.dtype), dtype=torch.uint8)
    size = torch.zeros(1, dtype=torch.int64, device=values.device)
    out = torch.empty_like(values)
    encode_s = bench.seconds(lambda: codec.encode_into(values, room, size))
    return encode_s + bench.seconds(lambda: codec.decode(room, out)), int(size)


def lines(known: Cost, found: Sequence[Choice]) -> list[str]:
    """Yield lines of text."""
    said = [
        f"sizes on their way to the host take {known.wait_s * 1e6:.0f} us, "
        + (
            f"with their exchange in a group of one rank (no link) {known.exchange_s * 1e6:.0f} us"
            if known.exchange_s is not None
            else f"their exchange was not measured ({known.left_out})"
        )
    ]
    for choice in found:
        ends = (f"at {gbps:g} GB/s {_from(choice, known, gbps)}" for gbps in LINKS)
        said.append(
            f"fp16 within {choice.bound:g}: {choice.variable} saves {choice.saved_bits:.2f} bits "
            f"of a value over {choice.fixed} and takes {choice.slower_s * 1e12:+.2f} ps more; "
            f"worth it {', '.join(ends)}"
        )
    said.append(f"auto takes it from {SMALL_NUMEL} values on (codecs/cheapest.py, SMALL_NUMEL)")
    return said


def _from(choice: Choice, known: Cost, gbps: float) -> str:
    numel = choice.break_even(known.seconds, gbps)
    return "never" if numel is None else f"from {numel:.3g} values"


Measured = tuple[Cost, list[Choice]]


def facts(known: Cost, found: Sequence[Choice]) -> dict[str, Any]:
    """Return the facts for the JSON."""
    rows = [
        {
            **asdict(choice),
            "break_even": {f"{gbps:g}": choice.break_even(known.seconds, gbps) for gbps in LINKS},
        }
        for choice in found
    ]
    return {"cost": asdict(known), "choices": rows, "threshold_numel": SMALL_NUMEL}


def measured(bench: Bench) -> Measured:
    """Measure both on the current GPU."""
    device = torch.device("cuda", cuda.current_device())
    return cost(device), choices(bench, device)
