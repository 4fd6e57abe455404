"""What is timed where the link decides: one message, natively and encoded, to its end.

Nothing in here is traffic of the model: no ledger, no residual of it is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hybridcomp import collectives
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Levels, Meter, chunk_ranges, hierarchy

#: runs one collective to its end
Run = Callable[[], None]


@dataclass(frozen=True)
class Planned:
    """A message of a layer or between stages; gathers and scatters are timed as reductions."""

    codec: Codec
    group: dist.ProcessGroup | None
    hop: tuple[int, int] | None  # global ranks of sender and receiver of a send
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True)
class Place:
    """Whose messages are timed, over which of the two levels, and of what they are made."""

    group: dist.ProcessGroup | None
    levels: Levels | None
    dtype: torch.dtype
    device: torch.device

    def values(self, numel: int) -> torch.Tensor:
        """Noise, another on each rank."""
        return _values(numel, self.dtype, self.device)


def reductions(codec: Codec, feedback: bool, place: Place) -> Callable[[int], tuple[Run, Run]]:
    """Trials of all-reduces of gradients; with ``feedback`` residuals are kept, too."""
    group, levels = place.group, place.levels

    def trial(numel: int) -> tuple[Run, Run]:
        values = place.values(numel)
        chosen = codec.for_message(numel, place.dtype, dist.get_world_size(group))
        residual, owner = _residuals(numel, place) if feedback else (None, None)

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


def _residuals(numel: int, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros as long as what this rank encodes, and as its chunk of it."""
    group, levels, device = place.group, place.levels, place.device
    low, high = (0, numel) if levels is None else hierarchy.stretch(numel, levels)
    encoders = dist.get_world_size(group) if levels is None else levels.nodes
    index = dist.get_rank(group) if levels is None else levels.node
    start, stop = chunk_ranges(high - low, encoders)[index]
    return torch.zeros(high - low, device=device), torch.zeros(stop - start, device=device)


def gathers(codec: Codec, place: Place) -> Callable[[int], tuple[Run, Run]]:
    """Trials of all-gathers of parameters; sizes are those of what is gathered."""
    group, levels = place.group, place.levels

    def trial(numel: int) -> tuple[Run, Run]:
        world_size = dist.get_world_size(group)
        shard = place.values(-(-numel // world_size))
        out = shard.new_empty(world_size * shard.numel())
        chosen = codec.for_message(shard.numel(), place.dtype, world_size)
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


def messages(planned: Sequence[Planned], device: torch.device) -> tuple[Run, Run]:
    """A trial of several messages of layers or stages, one after the other.

    ``planned``: those that this rank takes part in, on all ranks in one order, so that no two wait
    for each other; none of them is no trial, which takes no time.
    """
    values = [_values(one.numel, one.dtype, device) for one in planned]

    def native() -> None:
        for one, tensor in zip(planned, values, strict=True):
            if one.hop is None:
                dist.all_reduce(tensor, group=one.group)
                tensor.mul_(0.5)  # sums of sums must not overflow
            elif one.hop[0] == dist.get_rank():
                dist.send(tensor, one.hop[1], group=one.group)
            else:
                dist.recv(tensor, one.hop[0], group=one.group)

    def coded() -> None:
        for one, tensor in zip(planned, values, strict=True):
            if one.hop is None:
                collectives.all_reduce(tensor, one.codec, one.group, meter=Meter())
                tensor.mul_(0.5)
            elif one.hop[0] == dist.get_rank():
                collectives.send(tensor, one.hop[1], one.codec, one.group, meter=Meter())
            else:
                collectives.recv(tensor, one.hop[0], one.codec, one.group, meter=Meter())

    return native, coded
