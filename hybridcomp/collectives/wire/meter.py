"""What one collective cost: filled in by the collective, written down by the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from hybridcomp.collectives.wire.clock import HOST, Clock, Span


@dataclass
class Meter:
    """Mutable counters of one collective call on this rank.

    ``wire_nbytes`` counts what this rank sends to *other* ranks, payload padding, headers and
    size messages included, so that it can be held against the counters of the network card. What a
    rank "sends" to itself never counts. all_gather counts ``(world_size - 1) * payload``: the
    ring that gloo and NCCL use sends each payload that often.
    """

    messages: int = 0  # calls into torch.distributed
    wire_nbytes: int = 0
    codec_s: float = 0.0  # seconds of the host in encode and decode, where that codes
    wait_s: float = 0.0  # seconds of the host blocked in torch.distributed
    inter_nbytes: int = 0  # of wire_nbytes, to ranks on other nodes
    remote: frozenset[int] = frozenset()  # ranks of the encoded message's group on other nodes
    used: dict[str, None] = field(default_factory=dict)  # specs of the codecs, in order
    clock: Clock = HOST
    where: str = ""  # which message, for an error about it
    spans: list[Span] = field(default_factory=list)  # of a GPU, in a step that is timed

    def sent(self, nbytes: int) -> None:
        """Count one message of ``nbytes`` bytes to other ranks."""
        self.messages += 1
        self.wire_nbytes += nbytes

    def sent_each(self, sizes: Sequence[int]) -> None:
        """Count an all-to-all: ``sizes`` bytes to each rank of the group, 0 to oneself."""
        self.sent(sum(sizes))
        self.inter_nbytes += sum(sizes[rank] for rank in self.remote)

    def sent_around(self, slot: int, rank: int, world_size: int) -> None:
        """Count an all-gather of ``slot`` bytes by a ring: all goes to the next rank."""
        self.sent((world_size - 1) * slot)
        if (rank + 1) % world_size in self.remote:
            self.inter_nbytes += (world_size - 1) * slot

    def use(self, *specs: str) -> None:
        """Remember which codecs the values went through."""
        self.used.update(dict.fromkeys(specs))

    def sent_ring(self, nbytes: int, rank: int, world_size: int) -> None:
        """Count ``nbytes`` bytes of a native ring, which all go to the next rank."""
        self.sent(nbytes)
        if (rank + 1) % world_size in self.remote:
            self.inter_nbytes += nbytes

    def coding(self) -> AbstractContextManager[None]:
        """The ``with`` body encodes or decodes: its time counts as the codec's."""
        return self.clock.time(self, "codec")

    def waiting(self) -> AbstractContextManager[None]:
        """The ``with`` body waits for the wire; on NCCL that is the stream, not the host."""
        return self.clock.time(self, "wait")
