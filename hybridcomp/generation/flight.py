"""Batches in flight: each stage starts the next pass as soon as it has sent the previous one.

The stages of a pipeline form a ring. The first stage keeps several passes in flight. A frame
describes its pass, so the other stages compute and forward passes in order of arrival. The last
stage picks tokens and sends them to the first, which puts them into the next pass (NBPP of
EnergonAI, without a controller).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import TracebackType

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hybridcomp.channels import Channels, Posted, PostReceive, PostSend
from hybridcomp.collectives import Group
from hybridcomp.generation.frames import HopFrame, Incoming, Outgoing
from hybridcomp.generation.past import PackedPass
from hybridcomp.generation.picking import Picked, Picker
from hybridcomp.generation.requests import Requests
from hybridcomp.generation.stage_runner import StageRunner

#: upper bounds of a frame header's bytes: per token, per part of a pass, and for the rest
TOKEN_NBYTES, PART_NBYTES, REST_NBYTES = 24, 160, 4096


@dataclass
class GenerationFigures:
    """Counts of a rank's work, added up over calls of ``generate``.

    Attributes:
        passes: passes that the rank's stage has run.
        tokens: tokens that the rank's layers have computed; there is no padding.
        hops: frames with hidden states that the rank has sent.
    """

    passes: int = 0
    tokens: int = 0
    hops: int = 0


@dataclass(frozen=True)
class Hops:
    """Encode and decode the hidden states (1, N, width) that one stage sends to the next.

    It uses the channel of dimension ``pp``.

    Attributes:
        group: the ranks that exchange frames, in the order of stages; gloo between CPUs.
        tensor: the tensor-parallel group of the stage, each of whose ranks sends a part; None: one
            rank sends everything.
    """

    channels: Channels
    group: ProcessGroup
    tensor: ProcessGroup | None
    width: int
    dtype: torch.dtype
    device: torch.device

    def packed(self, values: Tensor, ranks: tuple[int, int]) -> tuple[Tensor, Posted | None]:
        """Return the bytes of ``values``, and a function that counts them once they are sent."""
        flat = values.to(self.dtype).contiguous().view(-1)
        posted = self._posted(PostSend, flat, ranks)
        return (flat.view(torch.uint8), None) if posted is None else (posted.message, posted)

    def unpacked(self, payload: Tensor, tokens: int, ranks: tuple[int, int]) -> Tensor:
        """Return the hidden states of ``tokens`` tokens from their bytes."""
        flat = torch.empty(tokens * self.width, dtype=self.dtype, device=self.device)
        posted = self._posted(PostReceive, flat, ranks)
        room = flat.view(torch.uint8) if posted is None else posted.message
        room[: payload.numel()].copy_(payload)
        if posted is not None:
            posted.done()
        return flat.view(1, tokens, self.width)

    def _posted(
        self, kind: type[PostSend | PostReceive], flat: Tensor, ranks: tuple[int, int]
    ) -> Posted | None:
        channel = self.channels["pp"]
        message = kind(
            numel=flat.numel(), dtype=flat.dtype, group=self.group, between=ranks, values=flat,
            holders=self.tensor,
        )  # fmt: skip
        native = partial(message.send, channel, None) if self.tensor else lambda: None
        return channel.run(message, native=native, encoded=lambda posted: posted)


class Flight:
    """A stage's part of answering all prompts."""

    def __init__(
        self, runner: StageRunner, hops: Hops, requests: Requests, batch: int,
        figures: GenerationFigures,
    ) -> None:  # fmt: skip
        """Start with equal ``requests`` on all stages; only the first stage's are used."""
        self._runner, self._hops, self._requests, self._figures = runner, hops, requests, figures
        group = Group.of(hops.group)
        self._me, line = group.global_ranks[group.rank], group.global_ranks
        self._before = line[group.rank - 1]
        self._after = line[(group.rank + 1) % group.size]
        room = REST_NBYTES + requests.most * TOKEN_NBYTES
        room += batch * (requests.slots + 1) * PART_NBYTES
        room += requests.most * hops.width * hops.dtype.itemsize * 5 // 4
        self._alone = group.size == 1
        if not self._alone:
            self._incoming = Incoming(self._before, group, requests.slots, room)
            extra = partial(hops.channels.ledger.record_extra, ("pp", "forward"))
            self._outgoing = Outgoing(self._after, group, requests.slots, room, extra)

    def __enter__(self) -> Flight:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Complete all messages that this rank and its neighbours have posted in this flight."""
        if self._alone:
            return
        self._outgoing.close(failed=error is not None)
        self._incoming.close(failed=error is not None)

    def run(self, picker: Picker) -> None:
        """Answer all prompts on the first stage; on others run every pass that arrives."""
        if self._runner.is_first:
            self._lead(picker)
            return
        while (frame := self._incoming.take()).said is not None:
            passed = PackedPass.from_json(frame.said)
            values = self._hops.unpacked(frame.payload, passed.count, (self._before, self._me))
            self._hand_on(passed, self._run(passed, values), picker)

    def _lead(self, picker: Picker) -> None:
        """Keep one pass of each slot in flight."""
        requests, under_way = self._requests, deque[int]()
        waiting = deque(range(requests.slots))
        while waiting or under_way:
            if not waiting:
                slot = under_way.popleft()
                said = self._incoming.take().said
                if said is None:
                    return  # the last stage has failed; the next message raises its error
                requests.take(slot, [_picked(row) for row in said["picked"]])
                waiting.append(slot)
            slot = waiting.popleft()
            while (passed := requests.next(slot)) is not None:
                values = self._run(passed)
                if not self._alone:
                    self._hand_on(passed, values, picker)
                    under_way.append(slot)
                    break
                requests.take(slot, picker(passed, values))

    def _run(self, passed: PackedPass, values: Tensor | None = None) -> Tensor:
        self._figures.passes += 1
        self._figures.tokens += passed.count
        return self._runner(passed, values)

    def _hand_on(self, passed: PackedPass, values: Tensor, picker: Picker) -> None:
        """Send hidden states to the next stage, or picked tokens to the first stage."""
        if self._runner.is_last:
            picked = [asdict(choice) for choice in picker(passed, values)]
            self._outgoing.send(
                HopFrame({"picked": picked}, torch.empty(0, dtype=torch.uint8, device="cpu"))
            )
            return
        payload, posted = self._hops.packed(values, (self._me, self._after))
        self._outgoing.send(HopFrame(passed.as_json(), payload))
        self._figures.hops += 1
        if posted is not None:
            posted.done()


def _picked(said: dict[str, Sequence[int] | None]) -> Picked:
    lists = {key: None if value is None else tuple(value) for key, value in said.items()}
    return Picked(**lists)  # type: ignore[arg-type]
