"""Whether compressing pays on the link of this job: measured before the first step.

With ``"when": "auto"`` the real collectives run on the real group, native and encoded in turns. The
seconds of the slowest rank count, taken over the whole job, so every rank decides on the same
figures. A dimension whose encoded messages are not faster stays native: for the rest of the run,
and of those that continue it from a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from hybridcomp import collectives
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Levels, Meter, chunk_ranges, hierarchy
from hybridcomp.policy import Dimension

#: values of a message of a trial, one after the other
SIZES = (1 << 19, 1 << 21, 1 << 23)
#: timings of either kind at a size, in turns after one of each that counts for nothing; the
#: shortest counts, as whatever disturbs a timing makes it longer
REPEATS = 5
#: no larger trial after this many seconds: on a slow link they take long, and a small one tells
BUDGET_S = 2.0
#: encoded messages must be this much faster: the codec takes cores that the model wants as well
MARGIN = 1.1

#: runs one collective to its end
Run = Callable[[], None]


@dataclass(frozen=True)
class Verdict:
    """What the largest trial of a dimension found; equal on all ranks."""

    pays: bool
    nbytes: int  # of the message on one rank
    native_s: float  # seconds of the slowest rank
    coded_s: float

    def told(self, dimension: Dimension) -> str:
        """One sentence."""
        figures = (
            f"{self.nbytes / 1e6:.0f} MB take {self.native_s * 1e3:.1f} ms natively and "
            f"{self.coded_s * 1e3:.1f} ms encoded"
        )
        todo = "compressed" if self.pays else 'native for this run; "when": "always" compresses'
        return f"{dimension}: {figures} (compression.{dimension}.when: auto): {todo}"


class Link:
    """The verdicts of one engine."""

    def __init__(self) -> None:
        self.verdicts: dict[Dimension, Verdict] = {}

    def native(self, dimension: Dimension) -> bool:
        """Whether ``dimension`` was found to be faster without its codec."""
        verdict = self.verdicts.get(dimension)
        return verdict is not None and not verdict.pays

    def state(self) -> dict[str, dict[str, Any]]:
        """What a resumed run has to know."""
        return {name: asdict(verdict) for name, verdict in self.verdicts.items()}

    def restore(self, state: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Go on as the run that is continued did; what to tell the user where that is a change."""
        told = []
        for name, verdict in self.verdicts.items():
            stored = Verdict(**state[name]) if name in state else verdict
            if stored.pays != verdict.pays:
                was = "compressed" if stored.pays else "native"
                change = '"codec": "none"' if stored.pays else '"when": "always"'
                told.append(
                    f"{name}: stays {was}, as in the run that is continued, although encoding "
                    f"{verdict.nbytes / 1e6:.0f} MB now takes {verdict.coded_s * 1e3:.1f} ms and "
                    f"native {verdict.native_s * 1e3:.1f} ms; {change} changes that"
                )
            self.verdicts[name] = stored
        return told


def judge(trials: Callable[[int], tuple[Run, Run]], itemsize: int, device: torch.device) -> Verdict:
    """Time trials of growing size; a collective over the whole job.

    ``trials``: for a number of values, what runs the native and the encoded message.

    1 run both in turns, 2 take the slowest rank's best, 3 go on while there is time.
    """
    spent = 0.0
    for numel in SIZES:
        # 1
        runs = trials(numel)
        rows = [[seconds(run, device) for run in runs] for _ in range(REPEATS + 1)]
        # 2
        timed = torch.tensor(rows[1:], dtype=torch.float64, device=device)
        found = torch.cat([timed.amin(dim=0), timed.sum().reshape(1)])
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        native_s, coded_s, total = found.tolist()
        verdict = Verdict(coded_s * MARGIN <= native_s, numel * itemsize, native_s, coded_s)
        # 3
        spent += total
        if spent > BUDGET_S:
            break
    return verdict


def seconds(run: Run, device: torch.device) -> float:
    """Seconds that ``run`` takes, on a GPU until the work is done there."""
    _finish(device)
    start = time.perf_counter()
    run()
    _finish(device)
    return time.perf_counter() - start


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reductions(
    codec: Codec,
    feedback: bool,
    group: dist.ProcessGroup | None,
    levels: Levels | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[[int], tuple[Run, Run]]:
    """Trials of all-reduces of gradients; with ``feedback`` residuals are kept, too."""

    def trial(numel: int) -> tuple[Run, Run]:
        values = _values(numel, dtype, device)
        chosen = codec.for_message(numel, dtype, dist.get_world_size(group))
        residual, owner = _residuals(numel, group, levels, device) if feedback else (None, None)

        def coded() -> None:
            if levels is not None:
                hierarchy.all_reduce(
                    values, chosen, levels, meter=Meter(), residual=residual, owner_residual=owner
                )
            else:
                collectives.all_reduce(
                    values, chosen, group, meter=Meter(), residual=residual, owner_residual=owner
                )
            values.mul_(0.5)  # sums of sums must not overflow

        def native() -> None:
            dist.all_reduce(values, group=group)
            values.mul_(0.5)

        return native, coded

    return trial


def _residuals(
    numel: int, group: dist.ProcessGroup | None, levels: Levels | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros as long as what this rank encodes, and as its chunk of it."""
    low, high = (0, numel) if levels is None else hierarchy.stretch(numel, levels)
    encoders = dist.get_world_size(group) if levels is None else levels.nodes
    index = dist.get_rank(group) if levels is None else levels.node
    start, stop = chunk_ranges(high - low, encoders)[index]
    return torch.zeros(high - low, device=device), torch.zeros(stop - start, device=device)


def gathers(
    codec: Codec,
    group: dist.ProcessGroup | None,
    levels: Levels | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[[int], tuple[Run, Run]]:
    """Trials of all-gathers of parameters; sizes are those of what is gathered."""

    def trial(numel: int) -> tuple[Run, Run]:
        world_size = dist.get_world_size(group)
        shard = _values(-(-numel // world_size), dtype, device)
        out = shard.new_empty(world_size * shard.numel())
        chosen = codec.for_message(shard.numel(), dtype, world_size)
        rows: Sequence[torch.Tensor] = torch.split(out, shard.numel())

        def coded() -> None:
            if levels is not None:
                hierarchy.all_gather(shard, out, chosen, levels, meter=Meter())
            else:
                collectives.all_gather(shard, out, chosen, group, meter=Meter())

        def native() -> None:
            dist.all_gather(list(rows), shard, group=group)

        return native, coded

    return trial


def _values(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(numel, generator=generator).to(device, dtype)
