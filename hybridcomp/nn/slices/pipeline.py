"""SlicePipeline: one stage of a pipeline over slices of a sequence.

Its messages belong to ``pp``: activations to the next stage, their gradients back. Sends are
asynchronous, so that a slice travels while the stage works on the next, and the receiver posts
one receive ahead. No upstream pipeline supports slices of different lengths with a backward pass in
reverse order, so this schedule uses only public functions of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hybridcomp.channels import Channels, Posted, PostReceive, PostSend
from hybridcomp.channels.channel import Channel
from hybridcomp.collectives import Group, Meter
from hybridcomp.collectives.wire import transport
from hybridcomp.config.error_messages import Shown
from hybridcomp.dimensions import Direction
from hybridcomp.errors import ConfigError
from hybridcomp.job import small_messages
from hybridcomp.nn.slices.kv_cache import KVCache
from hybridcomp.session import process


class StageLayers(Protocol):
    """Layers of a stage: map a slice's tokens or hidden states, (B, T, ...), to its outputs."""

    def __call__(self, values: Tensor, past: KVCache) -> Tensor: ...


@dataclass
class SliceUnderWay:
    """A pending send or receive; ``done`` is called when it completes."""

    work: Any
    values: Tensor
    done: Callable[[], None] | None = None

    def wait(self) -> Tensor:
        """Wait for the message, call ``done``, and return its values."""
        self.work.wait()
        if self.done is not None:
            self.done()
        return self.values


@dataclass
class Passed:
    """Inputs and outputs of each slice of a batch, kept between forward and backward.

    inputs: tokens or hidden states. outputs: hidden states, or the slice's addend of the loss.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]

    @property
    def loss(self) -> Tensor:
        """Return the detached mean loss of the batch, on the last stage."""
        total: Tensor = torch.stack([output.detach() for output in self.outputs]).sum()
        return total


class SlicePipeline:
    """This rank's stage of a pipeline that works on slices of a sequence."""

    def __init__(
        self,
        stage: StageLayers,
        slices: Sequence[int],
        width: int,
        loss: Callable[[Tensor, Tensor], Tensor],
        *,
        group: ProcessGroup | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        channels: Callable[[], Channels | None] | None = None,
        ignore_index: int = -100,
    ) -> None:
        """Put ``stage`` into the pipeline of ``group``, whose ranks are the stages in order.

        Args:
            stage: this rank's layers; attention layers take keys and values from ``KVCache``.
            slices: tokens of each slice, in order (``nn.slices.lengths.Slices``).
            width: width of the hidden states (B, T, width) between stages.
            loss: maps logits and labels of a slice to the mean loss over counted tokens; called on
                the last stage.
            group: the ranks of the pipeline; None: all ranks.
            dtype, device: dtype and device of the hidden states.
            channels: returns the channels of the messages, None for native ones; by default those
                of this process.
            ignore_index: tokens with this integer label do not count; with non-integer labels all
                tokens count.

        Raises ConfigError on slices without tokens.
        """
        if not slices or min(slices) < 1:
            given = Shown(f"slices of {list(slices)} tokens")
            raise ConfigError("pp", given, "expected one or more slices of at least one token")
        self.stage, self.loss, self.width, self.dtype = stage, loss, width, dtype
        self.device = torch.device("cpu") if device is None else device
        self.slices, self.ignore_index = tuple(slices), ignore_index
        self.group = dist.group.WORLD if group is None else group
        self.number, self.count = dist.get_rank(group), dist.get_world_size(group)
        self._ranks = dist.get_process_group_ranks(self.group)
        self._known = Group.of(self.group)
        self.channels = channels or process.current
        self._agreed: object = None

    @property
    def is_first(self) -> bool:
        """Return whether this stage reads the tokens."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Return whether this stage computes the loss."""
        return self.number == self.count - 1

    @property
    def _edges(self) -> list[tuple[int, int]]:
        return list(pairwise(accumulate(self.slices, initial=0)))

    def step(self, tokens: Tensor, labels: Tensor) -> Tensor | None:
        """Run forward and backward passes of one batch, adding to the parameters' gradients.

        ``tokens``, ``labels``: (B, T), with T the sum of the slices. The first stage reads the
        tokens and the last stage the labels; other stages read only B. Returns the mean loss on the
        last stage, None elsewhere. Raises ConfigError on sequences of another length.
        """
        passed = self.forward(tokens, labels)
        self.backward(passed)
        return passed.loss if self.is_last else None

    def _check(self, what: str, values: Tensor) -> None:
        if values.shape[1] != sum(self.slices):
            todo = f"the slices have {sum(self.slices)}; make both the same"
            raise ConfigError("pp", Shown(f"{what} of {values.shape[1]} tokens"), todo)

    def forward(self, tokens: Tensor, labels: Tensor, stage: StageLayers | None = None) -> Passed:
        """Run the forward passes of all slices of a batch as in ``step``, before ``backward``.

        ``stage`` replaces the pipeline's stage, for example with other parameters. ``backward``
        must follow unless gradients are off (``torch.no_grad``). Raises ConfigError like ``step``,
        and also if stages differ in slices, width or dtype, or if hidden states do not have the
        declared shape.
        """
        self._check("sequences", tokens)
        if self.is_last:
            self._check("labels", labels)
        self._agree()
        run, edges = stage or self.stage, self._edges
        past, inputs, outputs, sent = KVCache(sum(self.slices)), [], [], []
        shares = self._shares(labels) if self.is_last else []
        arriving = None if self.is_first else self._receive(0, len(tokens), "forward")
        for index, (start, stop) in enumerate(edges):
            values = tokens[:, start:stop]
            if arriving is not None:
                values = arriving.wait().requires_grad_()
                if index + 1 < len(edges):
                    arriving = self._receive(index + 1, len(tokens), "forward")
            out = run(values, past.at(start))
            if self.is_last:
                if shares[index]:
                    out = self.loss(out, labels[:, start:stop]) * shares[index]
                else:  # the mean over no tokens is NaN: use 0, with gradients of 0
                    out = out[:, :0].sum()
            else:
                out = self._hidden(out, (len(tokens), stop - start, self.width))
                sent.append(self._send(out, "forward"))
            inputs.append(values)
            outputs.append(out)
        for message in sent:
            message.wait()
        return Passed(inputs, outputs)

    def _agree(self) -> None:
        """Check that all stages send messages of one form; a collective if the form is new."""
        mine = {"slices": self.slices, "width": self.width, "dtype": self.dtype}
        if mine == self._agreed:
            return
        every = small_messages.gather_objects(mine, self.group)
        for key, value in every[0].items():
            for number, other in enumerate(every):
                if other[key] != value:
                    both = Shown(f"{key} {other[key]} on stage {number} and {value} on stage 0")
                    raise ConfigError("pp", both, "expected the same on all stages; make them so")
        self._agreed = mine

    def _hidden(self, out: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """Cast hidden states to the dtype of messages, from which autocast may differ."""
        if tuple(out.shape) != shape:
            given = Shown(f"hidden states {tuple(out.shape)}")
            raise ConfigError("pp", given, f"expected {shape}: batch, tokens, width; set width")
        return out.to(self.dtype)

    def _shares(self, labels: Tensor) -> list[float]:
        """Return each slice's weight in the mean loss: its fraction of the labels that count.

        If no label counts, slices are weighted by length, so that the loss is still called as for
        the whole model. The host waits for labels on a GPU before it receives the first slice.
        """
        counts: list[int] = list(self.slices)
        if not (labels.is_floating_point() or labels.is_complex()):
            counted = (labels != self.ignore_index).sum(0)
            each = [int(part.sum()) for part in torch.split(counted.cpu(), counts)]
            counts = each if any(each) else counts
        return [count / sum(counts) for count in counts]

    def backward(self, passed: Passed, scale: Tensor | None = None) -> None:
        """Run the backward passes, last slice first, so that each slice's keys get all gradients.

        ``scale``: gradient of the loss, with which the last stage starts; None: 1.
        """
        inputs, outputs, edges = passed.inputs, passed.outputs, self._edges
        last, batch, sent = len(edges) - 1, len(inputs[0]), []
        arriving = None if self.is_last else self._receive(last, batch, "backward")
        for index in range(last, -1, -1):
            if arriving is None:
                outputs[index].backward(scale)  # type: ignore[no-untyped-call]
            else:
                grad = arriving.wait()
                if index:
                    arriving = self._receive(index - 1, batch, "backward")
                if not outputs[index].requires_grad:
                    continue  # a first stage whose parameters are all frozen
                outputs[index].backward(grad)  # type: ignore[no-untyped-call]
            if not self.is_first:
                own = inputs[index].grad
                assert own is not None, "the stage does not use what comes in"
                sent.append(self._send(own, "backward"))
        for message in sent:
            message.wait()

    def _channel(self) -> Channel | None:
        channels = self.channels()
        return None if channels is None else channels["pp"]

    def neighbour(self, sends: bool, direction: Direction) -> int:
        """Return the global rank to which this stage sends, or from which it receives."""
        ahead = sends is (direction == "forward")
        return int(self._ranks[self.number + (1 if ahead else -1)])

    def _send(self, values: Tensor, direction: Direction) -> SliceUnderWay:
        flat, to = values.detach().contiguous().view(-1), self.neighbour(True, direction)
        hop = (dist.get_rank(), to)
        posted = self._posted(PostSend, flat, direction, hop)
        message = flat if posted is None else posted.message
        done = None if posted is None else posted.done
        return SliceUnderWay(transport.send(message, to, self._known, Meter()), message, done)

    def _posted(
        self, kind: type[PostSend | PostReceive], flat: Tensor, direction: Direction,
        hop: tuple[int, int],
    ) -> Posted | None:  # fmt: skip
        """Return the encoded form of a message, ``hop``: (sender, receiver); None: native."""
        channel = self._channel()
        if channel is None:
            return None
        message = kind(
            numel=flat.numel(), dtype=flat.dtype, group=self.group, direction=direction,
            between=hop, values=flat,
        )  # fmt: skip
        return channel.run(message, native=lambda: None, encoded=lambda posted: posted)

    def _receive(self, index: int, batch: int, direction: Direction) -> SliceUnderWay:
        """Post the receive of slice ``index`` from the neighbour."""
        shape, source = (batch, self.slices[index], self.width), self.neighbour(False, direction)
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        flat = values.view(-1)
        posted = self._posted(PostReceive, flat, direction, (source, dist.get_rank()))
        message = flat if posted is None else posted.message
        done = None if posted is None else posted.done
        return SliceUnderWay(transport.recv(message, source, self._known), values, done)
