#!/usr/bin/env python3
"""Time the host's work per GPU message, without a GPU.

    python scripts/benchmarks/bench_host.py
    python scripts/benchmarks/bench_host.py --ranks 8 64 256 1024 4096

Messages of tensor parallelism are so short that training waits for the host's work: choose the
codec, check, plan, allocate, launch, post, record. All of that runs here as on a GPU, in a group
whose messages arrive at once and with kernel launches that do nothing. The driver's time per
launch, torch's allocation of GPU memory and NCCL's time per message are not included; the rows
`path` of `bench_gpu.py` include the first two.

For each kind of message, such as gradient buckets with owners (ZeRO 1 and 2), unequal shards,
coalesced parameter gathers, two-level messages, low rank and the guard's sums, it prints
microseconds, multiples of a `Tensor.copy_` of four values, and launches, by `--ranks` of the group.
Microseconds are CPU time, which other load hardly affects, as medians over rounds. A round of the
copy precedes each round; to compare runs, use the multiples of the copy.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

from benchmarks.gpu_bench.group_messages import GroupMessages
from benchmarks.gpu_bench.messages import RANKS, Messages, group_without_wire
from benchmarks.shared import parser_of
from hybridcomp.channels import channel
from hybridcomp.codecs import Codec, make_codec
from hybridcomp.codecs.words import DTYPES
from hybridcomp.collectives.wire.device_clock import SILENT
from hybridcomp.kernels.cuda import CudaKernels
from hybridcomp.kernels.cuda.launcher import Words

ROUNDS, CALLS = 200, 20
MOST_S = 1.5  # per kind of message: slow kinds get fewer rounds, at least three
#: default megabytes: of a message, and with --ranks of a bucket with owners
MEGABYTES, OF_MANY_RANKS = 0.5, 25.0
#: elements of messages other than buckets: here the CPU copies the parts that stay on a rank
SHORT = 1 << 19


class Nowhere:
    """Kernel launcher that counts launches and runs nothing."""

    launches = 0

    def launch(self, *_: object, **__: object) -> None:
        """Launch nothing."""
        Nowhere.launches += 1

    def zeros(self, words: int) -> torch.Tensor:
        """Return zeros in the host's memory."""
        return torch.zeros(words, dtype=torch.int64)

    def empty(self, words: int) -> torch.Tensor:
        """Return words of the host's memory."""
        return torch.empty(words, dtype=torch.int64)

    def words(self, values: Words) -> torch.Tensor:
        """Return a copy in the host's memory."""
        return torch.from_numpy(values.copy())


@contextmanager
def as_on_a_gpu(ranks: int = RANKS) -> Iterator[None]:
    """Make codecs launch as on a GPU in a group of ``ranks``, and disable the timing of steps."""
    kernels = CudaKernels(Nowhere())
    with (
        mock.patch("hybridcomp.kernels.kernels_of", lambda device: kernels),
        mock.patch.object(channel, "HOST", SILENT),
        group_without_wire(ranks),
    ):
        yield


def measure(run: Callable[[], object], reference: Callable[[], object]) -> tuple[float, float]:
    """Return the median microseconds of a call, and the median ratio to the reference copy."""
    run()
    found, ratios = [], []
    end = time.perf_counter() + MOST_S
    for number in range(ROUNDS):
        if number > 2 and time.perf_counter() > end:
            break
        times = []
        for call in (reference, run):
            start = time.thread_time()
            for _ in range(CALLS):
                call()
            times.append((time.thread_time() - start) / CALLS)
        found.append(times[1] * 1e6)
        ratios.append(times[1] / times[0])
    return statistics.median(found), statistics.median(ratios)


def kinds_of(codec: Codec, values: torch.Tensor, ranks: int) -> dict[str, Callable[[], None]]:
    """Return every kind of message in a group of ``ranks``; call inside ``as_on_a_gpu``."""
    short, bucket = Messages(codec, values[:SHORT], ranks), Messages(codec, values, ranks)
    others = GroupMessages(codec, values.dtype, ranks)
    return {**short.kinds(), **others.kinds(), **bucket.buckets()}


def figures(codec: Codec, values: torch.Tensor, ranks: int) -> dict[str, tuple[float, float, int]]:
    """Return microseconds, multiples of a copy and launches, by kind, in a group of ``ranks``.

    ``values``: the bucket with owners; other messages send at most its first SHORT values.
    """
    target, source = torch.empty(4), torch.empty(4)
    found = {}
    with as_on_a_gpu(ranks):
        for name, run in kinds_of(codec, values, ranks).items():
            run()
            before = Nowhere.launches
            run()
            launches = Nowhere.launches - before
            found[name] = (*measure(run, lambda: target.copy_(source)), launches)
    return found


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--megabytes",
        type=float,
        help=f"of a message ({MEGABYTES:g}; {OF_MANY_RANKS:g} with --ranks)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--bits", type=int, default=4, help="of blockint (default 4)")
    parser.add_argument("--ranks", type=int, nargs="+", help="of the groups, at least 8 in each")
    asked = parser.parse_args(argv)
    if asked.ranks and min(asked.ranks) < RANKS:
        parser.error(f"--ranks: expected {RANKS} or more, found {min(asked.ranks)}")
    megabytes = asked.megabytes or (OF_MANY_RANKS if asked.ranks else MEGABYTES)
    dtype, codec = DTYPES[asked.dtype], make_codec("blockint", bits=asked.bits)
    numel = int(megabytes * (1 << 20)) // dtype.itemsize // 256 * 256
    torch.set_num_threads(1)
    values = torch.randn(numel).to(dtype)
    found = {ranks: figures(codec, values, ranks) for ranks in asked.ranks or [RANKS]}
    print(f"{codec}, {megabytes:g} MB of {asked.dtype}: us (times a copy, launches) by ranks")
    print(" " * 22 + "".join(f"{ranks:>24,}" for ranks in found))
    for name in next(iter(found.values())):
        cells = (kinds[name] for kinds in found.values())
        print(f"{name:22}" + "".join(f"{us:10,.1f} ({x:7,.1f},{n:3})" for us, x, n in cells))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
