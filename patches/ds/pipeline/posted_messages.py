"""Post the messages of a pipeline that does not wait: sends and receives return at once.

Each direction has its own process group, in which both sides post in the same order, so no message
waits behind one of the other direction. Receives are posted ahead, but within the call in which the
neighbour sends, so that both sides choose the codec at the same step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import Channel, Posted, PostReceive, PostSend
from hybridcomp.collectives import Group, Meter
from hybridcomp.collectives.wire import transport
from hybridcomp.dimensions import Direction


@dataclass(frozen=True)
class PostedForm:
    """One tensor of a set between two stages: its length and dtype, and whether codecs may change
    it.
    """

    numel: int
    dtype: torch.dtype
    values: bool


@dataclass
class PostedUnderWay:
    """A message that is posted but not complete; ``posted`` has its encoding, None: native."""

    work: Any
    values: Tensor
    posted: Posted | None

    def wait(self) -> float:
        """Wait until the message is complete, and decode it; return the seconds of waiting."""
        start = time.perf_counter()
        self.work.wait()
        waited = time.perf_counter() - start
        if self.posted is not None:
            self.posted.meter.wait_s += waited
            self.posted.done()
        return waited


@dataclass
class _Arriving:
    """Receives of one direction.

    Attributes:
        form: the tensors of a set, learned from the first set.
        due: number of sets that the neighbour sends until the end of this call.
        begun: number of sets whose receives are posted.
    """

    form: list[PostedForm] = field(default_factory=list)
    due: int = 0
    begun: int = 0
    messages: deque[PostedUnderWay] = field(default_factory=deque)


class PostedMessages:
    """Messages of one stage with its neighbours.

    Attributes:
        waited_s: seconds that this stage has waited for messages.
    """

    def __init__(
        self,
        channel: Channel,
        groups: Mapping[Direction, Any],
        sources: Mapping[Direction, int],
        device: torch.device,
        depth: int,
    ) -> None:
        """Post in ``groups``, by direction; messages come from the global ranks ``sources``.

        ``depth``: number of sets whose receives are posted ahead.
        """
        self.depth = depth
        self._channel, self._device = channel, device
        self._groups = {way: Group.of(group) for way, group in groups.items()}
        self._sources = sources
        self._arriving: dict[Direction, _Arriving] = {way: _Arriving() for way in groups}
        self._sent: dict[Direction, deque[list[PostedUnderWay]]] = {w: deque() for w in groups}
        self._told: deque[list[PostedUnderWay]] = deque()
        self.waited_s = 0.0

    def expect(self, direction: Direction, sets: int) -> None:
        """Set how many sets the neighbour sends in this call, and post their receives ahead."""
        arriving = self._arriving[direction]
        arriving.due = sets
        self._post_ahead(direction)

    def send(self, tensor: Tensor, form: PostedForm, direction: Direction, to: int) -> None:
        """Post the send of ``tensor`` to the global rank ``to``, as part of the open set."""
        flat = tensor.detach().to(form.dtype).reshape(-1).contiguous()
        posted = self._post(PostSend, flat, form, direction, (dist.get_rank(), to))
        message = flat if posted is None else posted.message
        work = transport.send(message, to, self._groups[direction], Meter())
        if not self._sent[direction]:
            self._sent[direction].append([])
        self._sent[direction][-1].append(PostedUnderWay(work, message, posted))

    def end_send(self, direction: Direction, under_way: int) -> None:
        """Close the set, and complete all sets except the last ``under_way``.

        gloo's works complete only in ``wait``, so it waits for sets that the neighbour has already
        answered.
        """
        sent = self._sent[direction]
        while len(sent) > under_way:
            for message in sent.popleft():
                message.wait()
        sent.append([])

    def receive(self, out: Tensor, form: PostedForm, direction: Direction) -> None:
        """Wait for the next message of a direction, and write it into ``out``."""
        arriving = self._arriving[direction]
        if not arriving.messages:  # the first messages, whose form is not known yet
            assert not arriving.begun, "receives of later sets are posted ahead"
            arriving.form.append(form)
            arriving.messages.append(self._post_receive(form, direction))
        message = arriving.messages.popleft()
        self.waited_s += message.wait()
        out.detach().copy_(message.values.view(out.shape))

    def end_receive(self, direction: Direction) -> None:
        """Record that a set has been received, and post the next receives."""
        arriving = self._arriving[direction]
        arriving.begun = max(arriving.begun, 1)
        self._post_ahead(direction)

    def send_all(self, values: Tensor, others: Sequence[int]) -> None:
        """Post ``values`` to each of the global ranks ``others``, for their ``receive_all``.

        It is no broadcast, in which some members would forward values and make others wait. Older
        sends are completed, except as many as the first stage is behind.
        """
        group = self._groups["backward"]
        works = [transport.send(values, rank, group, Meter()) for rank in others]
        self._told.append([PostedUnderWay(work, values, None) for work in works])
        while len(self._told) > 2 * self.depth * (len(others) + 1):
            for message in self._told.popleft():
                message.wait()

    def receive_all(self, out: Tensor, source: int) -> None:
        """Receive into ``out`` the values that global rank ``source`` passes to ``send_all``."""
        transport.recv(out, source, self._groups["backward"]).wait()

    def drain(self) -> None:
        """Complete all messages; forget arrived ones and the forms of sets.

        Both neighbours call this between two batches, so every posted receive is matched by a send.
        """
        for arriving in self._arriving.values():
            while arriving.messages:
                self.waited_s += arriving.messages.popleft().wait()
        for sent in (*self._sent.values(), self._told):
            while sent:
                for message in sent.popleft():
                    message.wait()
        self._arriving = {way: _Arriving() for way in self._arriving}

    def _post_ahead(self, direction: Direction) -> None:
        arriving = self._arriving[direction]
        room = self.depth * len(arriving.form)
        while arriving.begun < arriving.due and len(arriving.messages) < room:
            arriving.begun += 1
            for form in arriving.form:
                arriving.messages.append(self._post_receive(form, direction))

    def _post_receive(self, form: PostedForm, direction: Direction) -> PostedUnderWay:
        flat = torch.empty(form.numel, dtype=form.dtype, device=self._device)
        source = self._sources[direction]
        posted = self._post(PostReceive, flat, form, direction, (source, dist.get_rank()))
        message = flat if posted is None else posted.message
        work = transport.recv(message, source, self._groups[direction])
        return PostedUnderWay(work, flat, posted)

    def _post(
        self,
        kind: type[PostSend | PostReceive],
        flat: Tensor,
        form: PostedForm,
        direction: Direction,
        hop: tuple[int, int],
    ) -> Posted | None:
        """Return the encoded message of ``flat`` between the ranks of ``hop``; None: native."""
        message = kind(
            numel=form.numel, dtype=form.dtype, group=None, direction=direction, between=hop,
            values=flat,
        )  # fmt: skip
        if not form.values:
            return self._channel.run_native(message, lambda: None)
        return self._channel.run(message, native=lambda: None, encoded=lambda posted: posted)
