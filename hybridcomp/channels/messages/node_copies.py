"""Update a node's copy of sharded parameters with the changes since its last update.

W ranks own one share each of every parameter, N nodes of R ranks keep a copy of all shares. Global
rank ``j R + i`` has local index i on node j and owns share ``j R + i``. Of its node's copy it holds
slice i: shares ``i N`` to ``(i + 1) N - 1``, the cut of DeepSpeed's hpZ and of FSDP2's
``reshard_after_forward=R``. Only its owner changes a share, so a share is sent once to each node:

1 inside the node, natively: each rank gets the old values of its own share from the rank that holds
  them
2 the ranks of local index i gather the new values of shares ``i, R + i, 2 R + i, ...``, encoded: as
  steps from the old ones, or whole
3 inside the node each payload goes to the rank that holds its slice and decodes it there

So no rank keeps its own old values beside the copy, and all ranks of a node send and receive
equally much between nodes. A copy may consist of encoded bytes. Changes of bytes are sent as steps
as well: each byte is converted to a 16-bit value that steps when the byte does.

Shapes: n values (or bytes), this rank's share of all parameters of one renewal; a *slice* and a
*column* are (N, n), a row for each share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp import collectives
from hybridcomp.channels.channel import Channel
from hybridcomp.channels.messages.comparisons import words_of_all
from hybridcomp.channels.messages.delta_references import digest
from hybridcomp.codecs.exact_steps import ExactSteps
from hybridcomp.codecs.expcode import ExpCode
from hybridcomp.collectives import Levels, Meter, Transfer, native_nbytes
from hybridcomp.collectives.topology import Nodes
from hybridcomp.collectives.wire import transport
from hybridcomp.collectives.wire.chunking import Range
from hybridcomp.collectives.wire.encoding import POOL
from hybridcomp.collectives.wire.steps import transfer
from hybridcomp.config import BLOCK
from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.job.gates import gate
from hybridcomp.log import say

KEY = f"{BLOCK}.zero.secondary"
#: state of all nodes' copies: current, a delta behind, or unusable
State = Literal["current", "steps", "whole"]
#: bit pattern of the bf16 value that stands for byte 0 of an encoded copy; byte b has FIRST + b
FIRST = 0x3F00


def width_of(nodes: Nodes) -> int:
    """Return the ranks per node. Raises ConfigError if copies cannot be split over the nodes."""
    of_rank = nodes.of_rank
    count = len(set(of_rank))
    width = len(of_rank) // count
    blocks = [rank // width for rank in range(len(of_rank))]
    alike = len(set(zip(of_rank, blocks, strict=True))) == len(set(blocks)) == count
    if not alike or not 1 < width < len(of_rank):
        each = sorted(Counter(of_rank).values())
        shown = f"{count} nodes of {', '.join(map(str, dict.fromkeys(each)))} ranks"
        todo = (
            "copies need several nodes of equally many ranks, more than one, numbered node by "
            "node; remove it"
        )
        raise ConfigError(KEY, Shown(f"{shown} (by {nodes.source})"), todo)
    return width


@dataclass(eq=False)
class CopyGroups:
    """The ranks of a job by node, for the exchanges of copies.

    Attributes:
        nodes: keeps the process groups alive.
        levels: this rank's place, the group of its node, and the group of its local index, which
            has a rank on each node.
    """

    nodes: Nodes
    levels: Levels

    @classmethod
    def of(cls, width: int, source: str) -> CopyGroups:
        """Make the groups of a job with ``width`` consecutive ranks per node; a collective.

        ``source``: where the nodes are known from, for messages. Needs several nodes of several
        ranks.
        """
        ranks = tuple(range(dist.get_world_size()))
        nodes = Nodes([rank // width for rank in ranks], source)
        nodes.prepare([ranks])
        levels = nodes.group(None, two_levels=True).levels
        assert levels is not None, "several nodes of several ranks"
        return cls(nodes, levels)

    @property
    def shares(self) -> range:
        """Return the shares of this rank's slice."""
        count, local = self.levels.nodes, self.levels.local
        return range(local * count, (local + 1) * count)

    @property
    def size(self) -> int:
        """Return the number of ranks, W."""
        return self.levels.nodes * self.levels.width

    @cached_property
    def own(self) -> int:
        """Return the share of this rank."""
        return self.levels.node * self.levels.width + self.levels.local

    def holder(self, share: int) -> int:
        """Return the local index of the ranks whose slice has ``share``."""
        return share // self.levels.nodes

    def old_share(self, slice_: Tensor, meter: Meter) -> Tensor:
        """Return the old values of this rank's own share, (n,), which a rank of its node sends.

        A collective of the node. ``slice_``: this rank's slice, (N, n), contiguous.
        """
        width, numel = self.levels.width, slice_.shape[1]
        gives, takes = [0] * width, [0] * width
        takes[self.holder(self.own)] = numel
        rows = [
            share - self.shares[0] for share in self.shares if share // width == self.levels.node
        ]
        for row in rows:
            gives[self.shares[row] % width] = numel
        near = slice_[rows[0] : rows[-1] + 1] if rows else slice_[:0]
        return self._traded(near.view(-1), takes, gives, meter)

    def of_slice(
        self, gathered: Sequence[tuple[Range, list[Tensor]]], meter: Meter
    ) -> Iterator[tuple[int, Range, Tensor]]:
        """Exchange payloads inside the node: give this rank's column, get this rank's slice.

        ``gathered``: by round, a range of elements and the payloads of shares ``i, R + i, ...``.
        Yields for each payload of the slice its row in the slice, its range, and the payload.
        """
        width, rounds = self.levels.width, len(gathered)
        column = range(self.levels.local, self.size, width)
        payloads = [each[node] for node in range(len(column)) for _, each in gathered]
        sizes = torch.tensor([one.numel() for one in payloads], device=payloads[0].device)
        known = collectives.gather_words(sizes, self.levels.inner, meter)
        gives, takes, places = [0] * width, [0] * width, list[tuple[int, int, int]]()
        for node, share in enumerate(column):
            to = self.holder(share)
            gives[to] += sum(known[self.levels.local][node * rounds :][:rounds])
        for local in range(width):
            for share in (one for one in self.shares if one % width == local):
                for each in range(rounds):
                    nbytes = known[local][share // width * rounds + each]
                    places.append((share - self.shares[0], each, nbytes))
                    takes[local] += nbytes
        wire = self._traded(torch.cat(payloads), takes, gives, meter)
        parts = torch.split(wire, [nbytes for *_, nbytes in places])
        for (row, each, _), payload in zip(places, parts, strict=True):
            yield row, gathered[each][0], payload

    def _traded(self, values: Tensor, takes: list[int], gives: list[int], meter: Meter) -> Tensor:
        """Send ``gives[i]`` values to local rank i, receive ``takes[i]`` from it; return those."""
        out = values.new_empty(sum(takes))
        gate()  # no work between the gate and the message
        transfer(
            lambda: transport.all_to_all(out, values, takes, gives, self.levels.inner, meter), meter
        )
        return out


def state_of(
    channel: Channel,
    groups: CopyGroups,
    held: Callable[[], tuple[Iterable[Tensor] | None, bool]],
    device: torch.device,
) -> State:
    """Return what to send so that all nodes hold the same new copy; a collective.

    The result is the same on all ranks. Prints a message if the nodes' copies differ, as after user
    code wrote into a copy.

    Args:
        held: prepares this rank's send; returns its old slice, 1-D contiguous (None: no slice
            to take steps from), and whether the nodes already have its current share. If ``held``
            fails on one rank, ``state_of`` raises on all of them.
    """

    def words() -> Tensor:
        mine = torch.zeros(3, dtype=torch.int64, device=device)
        copies, is_sent = held()
        if copies is not None:
            mine[0], mine[1] = 1, int(is_sent)
            for place, copy in enumerate(copies):
                mine[2] += (2 * place + 1) * _digest(copy).to(device)  # odd: no difference is lost
        return mine

    states = words_of_all(channel, words, 3, device)
    if not all(ready for ready, _, _ in states):
        return "whole"
    width = groups.levels.width
    other = [rank for rank, (*_, own) in enumerate(states) if own != states[rank % width][2]]
    if not other:
        return "current" if all(sent for _, sent, _ in states) else "steps"
    if dist.get_rank() == 0:
        say(
            f"{channel.dimension}, step {channel.step}: the secondary copies of ranks {other} are "
            f"not those of ranks 0 to {width - 1} (somebody wrote into them), so steps would go "
            "wrong; this gather sends the parameters whole"
        )
    return "whole"


@torch.no_grad()
def renew(
    channel: Channel,
    groups: CopyGroups,
    own: Tensor,
    held: Tensor | None,
    native: tuple[int, torch.dtype],
) -> Tensor:
    """Return this rank's slice with the new values of all shares, (N, n); a collective.

    A gate of the operation precedes each of its messages.

    Args:
        own: (n,) bf16, fp16 or uint8, the new values of this rank's share.
        held: (N, n), contiguous, the old slice, the same on all nodes; it may be overwritten. None:
            shares are sent whole.
        native: elements of a share and their dtype, by which the ledger counts what upstream would
            have sent.

    Raises CodecError where a payload is damaged.
    """
    levels, meter, new = groups.levels, channel.meter(own.device), _as_steps(own)
    assert new.numel(), "parameters"
    # 1
    codec: ExpCode = ExpCode()
    if held is not None:
        codec = ExactSteps().against(_as_steps(groups.old_share(held, meter)))
    slice_ = new.new_empty(levels.nodes, new.numel()) if held is None else _as_steps(held)
    # 2
    gathered, buffers = collectives.gather_payloads(new, Transfer(codec, levels.outer, meter))
    # 3
    for row, stretch, payload in groups.of_slice(gathered, meter):
        with meter.coding():
            if groups.shares[row] == groups.own:
                slice_[row].copy_(new)
            else:
                codec.decode(payload, slice_[row][slice(*stretch)])
    POOL.give(*buffers)
    found = slice_
    if own.dtype == torch.uint8:
        found = slice_.view(torch.int16).sub(FIRST).to(torch.uint8)
    # natively one all-gather over all ranks replaces this message and the gather inside the node
    raw = native_nbytes.all_gather_nbytes(*native, levels.nodes)
    channel.record(meter, raw, "forward", _crossing(groups, native) / raw)
    return found


@torch.no_grad()
def gather_inside(
    channel: Channel,
    groups: CopyGroups,
    slice_: Tensor,
    native: tuple[int, torch.dtype],
    was_renewed: bool,
    out: Tensor,
) -> None:
    """Gather all ranks' shares into ``out`` (W, n) from the slices of a node; a node collective.

    ``native``: size and dtype of a share in the job's native gather over all ranks, as in
    ``renew``. ``was_renewed``: whether ``renew`` already counted this gather's bytes between nodes.
    """
    levels, meter = groups.levels, channel.meter(slice_.device)
    flat, inner = slice_.contiguous().view(-1), levels.inner
    transfer(lambda: transport.all_gather(out.view(-1), flat, inner, meter), meter)
    raw = native_nbytes.all_gather_nbytes(*native, len(out))
    crossing = 0 if was_renewed else _crossing(groups, native)
    raw -= native_nbytes.all_gather_nbytes(*native, levels.nodes) if was_renewed else 0
    channel.record(meter, raw, "forward", crossing / raw)


def _crossing(groups: CopyGroups, native: tuple[int, torch.dtype]) -> int:
    """Return the bytes that this rank sends to another node in a ring over all ranks."""
    is_last = groups.levels.local == groups.levels.width - 1
    return is_last * native_nbytes.all_gather_nbytes(*native, groups.size)


def _as_steps(values: Tensor) -> Tensor:
    """Return 16-bit values for delta encoding: one for each byte, or ``values`` unchanged."""
    if values.dtype != torch.uint8:
        return values
    return values.to(torch.int16).add_(FIRST).view(torch.bfloat16)


def _digest(copy: Tensor) -> Tensor:
    """Return a hash of a copy's bits; encoded copies are a multiple of 16 bytes long."""
    return digest(copy.view(torch.bfloat16) if copy.dtype == torch.uint8 else copy)
