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
from collections.abc import Iterator, Sequence
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
class Choice:
    """The two codecs of ``auto`` for a bound; radix' saved bits and added seconds, per value."""

    bound: float
    fixed: str
    variable: str
    saved_bits: float
    slower_s: float

    def break_even(self, cost_s: float, gbps: float) -> float | None:
        """Return the values per exchange above which radix wins at ``gbps`` GB/s; None if never."""
        gain = self.saved_bits / 8 / (gbps * 1e9) - self.slower_s
        return cost_s / gain if gain > 0 else None


def cost(device: torch.device, repeats: int = 50) -> float:
    """Return the host's seconds of one size exchange, in a group of this process alone.

    Creates and destroys the default process group.
    """
    words = torch.zeros(2 * RANKS, dtype=torch.int64, device=device)
    with tempfile.TemporaryDirectory() as folder:
        backend, method = "nccl" if device.type == "cuda" else "gloo", f"file://{folder}/store"
        dist.init_process_group(backend, init_method=method, rank=0, world_size=1)
        try:
            return statistics.median(_exchange(words) for _ in range(repeats))
        finally:
            dist.destroy_process_group()


def _exchange(words: Tensor) -> float:
    start, group = time.perf_counter(), Group.of(None)
    theirs, mine = words[RANKS:], words[:RANKS]
    message = transport.all_to_all(theirs, mine, [RANKS], [RANKS], group, Meter())
    for work in payload_sizes.SIZES.fetch(words, message, group):
        work.wait()
    return time.perf_counter() - start


def candidates() -> Iterator[tuple[float, Codec, Codec]]:
    """Yield ``(bound, fixed size, variable size)`` of bounds whose ``auto`` has two fp16 codecs."""
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
        saved, slower = 8 * (fixed_nbytes - nbytes) / numel, (variable_s - fixed_s) / numel
        found.append(Choice(bound, fixed.spec, variable.spec, saved, slower))
    return found


def _times(bench: Bench, codec: Codec, values: Tensor) -> tuple[float, int]:
    """Return ``(seconds to encode and decode, bytes)``."""
    room = values.new_empty(codec.wire_nbytes(values.numel(), values.dtype), dtype=torch.uint8)
    size = torch.zeros(1, dtype=torch.int64, device=values.device)
    out = torch.empty_like(values)
    encode_s = bench.seconds(lambda: codec.encode_into(values, room, size))
    return encode_s + bench.seconds(lambda: codec.decode(room, out)), int(size)


def lines(cost_s: float, found: Sequence[Choice]) -> list[str]:
    """Describe the cost, and for each choice the message length from which radix pays off."""
    said = [f"an exchange of sizes in a group of one rank (no link) takes {cost_s * 1e6:.0f} us"]
    for choice in found:
        ends = []
        for gbps in LINKS:
            numel = choice.break_even(cost_s, gbps)
            where = "never" if numel is None else f"from {numel:.3g} values"
            ends.append(f"at {gbps:g} GB/s {where}")
        said.append(
            f"fp16 within {choice.bound:g}: {choice.variable} saves {choice.saved_bits:.2f} bits "
            f"of a value over {choice.fixed} and takes {choice.slower_s * 1e12:+.2f} ps more; "
            f"worth it {', '.join(ends)}"
        )
    return [*said, f"auto takes it from {SMALL_NUMEL} values on (codecs/cheapest.py, SMALL_NUMEL)"]


Measured = tuple[float, list[Choice]]


def facts(cost_s: float, found: Sequence[Choice]) -> dict[str, Any]:
    """Return the facts for the JSON."""
    return {
        "seconds": cost_s, "choices": [asdict(choice) for choice in found],
        "threshold_numel": SMALL_NUMEL,
    }  # fmt: skip


def measured(bench: Bench) -> Measured:
    """Measure the size exchange and every candidate on the current GPU."""
    device = torch.device("cuda", cuda.current_device())
    return cost(device), choices(bench, device)
