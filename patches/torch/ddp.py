"""DistributedDataParallel: gradient buckets by ``register_comm_hook``, dimension ``dp``.

DDP calls the hook with a bucket of gradients once the backward pass has filled it, before dividing:
so the hook multiplies by 1/ranks, as DDP's reducer does without a hook
(``mark_variable_ready_dense``), and then sums. Buckets come in the same order on all ranks. The
first message of a bucket travels while the backward pass fills the next one, whose hook then
finishes it; the last bucket of a pass finishes all. No other thread sends, as its messages could
be overtaken on some ranks by others of the backward pass.

DDP rebuilds its buckets after the first step: residuals belong to parameters, never to buckets, and
a lossy codec encodes each parameter independently (``ddp_layout``). DDP holds a slot
(``ddp_slot``), which references the reducer weakly.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hybridcomp.autotune.trials import Sent
from hybridcomp.channels import NAME
from hybridcomp.channels.error_feedback import Piece
from hybridcomp.channels.resharing import Sends
from hybridcomp.codecs.base import VALUE_DTYPES, Codec
from hybridcomp.collectives import Handle, native_nbytes
from hybridcomp.collectives.topology import ranks_of
from hybridcomp.collectives.wire import POOL, first
from hybridcomp.patches.torch import ddp_slot, rules, steps, torch_versions
from hybridcomp.patches.torch.attached import Attached
from hybridcomp.patches.torch.ddp_layout import BucketLayout
from hybridcomp.patches.torch.ddp_slot import Bucket
from hybridcomp.patches.torch.identity import identity_of
from hybridcomp.patches.torch.session import Source, agree_on, read, session_of
from hybridcomp.policy import Dimension

REQUIREMENT = torch_versions.DDP
COVERS = ("dp",)


def attach(model: DistributedDataParallel, source: Source | None) -> Attached | None:
    """Register the hook; None where there is no block. Raises ConfigError, AgreementError."""
    block, group = read(source), model.process_group
    agree_on(block, "ddp", ranks_of(group))
    if block is None:
        return None
    torch_versions.check("ddp", REQUIREMENT)
    absent = rules.check(block, rules.DDP, model)
    parameters = [p for p in model._module_parameters if p.requires_grad]
    session = session_of(block, parameters[0].device, absent)
    session.name_parameters(model.module.named_parameters())
    session.place([group], of_user=True)
    numels = _buckets(parameters, model)
    sent: dict[Dimension, Sent] = {"dp": Sent(numels, "sum", together=True)}
    dtypes = [parameter.dtype.to_real() for parameter in parameters]  # the dtypes of buckets
    encoded = next((dtype for dtype in dtypes if dtype in VALUE_DTYPES), dtypes[0])
    session.measure(group, encoded, sum(numels), sent)
    session.warn(set(dtypes))
    layout = {"ranks": dist.get_world_size(group)}
    divisors = {name: 1.0 for name, _ in model.module.named_parameters()}
    ranks = ranks_of(group)
    sends = {n: Sends(((0, _numel(p)),), ranks) for n, p in model.module.named_parameters()}
    attached = Attached(
        "ddp", identity_of(model.module), session, model.parameters, lambda: divisors, layout,
        lambda: sends,
        uneven=lambda: bool(model._join_config.enable),
    )  # fmt: skip
    reducer = Reducer(model, attached)
    slot = ddp_slot.occupy(model, reducer)
    attached.on_detach(functools.partial(slot.leave, reducer))
    hook = model.register_forward_pre_hook(lambda module, _: _enter(module, attached))
    attached.on_detach(hook.remove)
    steps.follow(attached)
    return attached


def _enter(model: Any, attached: Attached) -> None:
    if model.training and torch.is_grad_enabled():
        attached.entered()


def _buckets(parameters: list[Any], model: Any) -> tuple[int, ...]:
    """Return the elements of each bucket, which DDP fills from the last parameter on."""
    most = int(model.bucket_bytes_cap)
    filled: list[int] = []
    nbytes = 0
    for parameter in reversed(parameters):
        if not filled or nbytes + parameter.nbytes > most:
            filled.append(0)
            nbytes = 0
        filled[-1] += _numel(parameter)
        nbytes += parameter.nbytes
    return tuple(filled)


@dataclass
class _Pending:
    """A bucket under way: its handle, the future that DDP waits for, and the gradients."""

    handle: Handle
    future: Bucket
    gradients: Tensor
    message: Tensor  # the encoded tensor: the gradients, or the table of ``layout``
    layout: BucketLayout | None
    buffer: Tensor | None  # the memory of ``message`` where that is a table


@dataclass(frozen=True)
class _Note:
    """Hook of a parameter that notes that it got a gradient; holds no reference to the model."""

    used: set[str]
    name: str

    def __call__(self, parameter: Tensor) -> None:
        self.used.add(self.name)


class Reducer:
    """Reducer of one model's buckets, called by DDP's communication hook."""

    def __init__(self, model: DistributedDataParallel, attached: Attached) -> None:
        self._group = model.process_group
        self._world_size = dist.get_world_size(self._group)
        self._model: Any = model
        self._attached = attached
        self._channel = attached.channels["dp"]
        self._pending: list[_Pending] = []
        self._layouts: dict[tuple[str, ...], BucketLayout] = {}
        self._is_rebuilt = False
        #: names of parameters that got a gradient since the last sum, where DDP finds unused ones
        self._used: set[str] | None = None
        if self._channel.error_feedback and (model.find_unused_parameters or model.static_graph):
            self._used = set()
            for parameter in model._module_parameters:
                if parameter.requires_grad:  # runs before DDP's hook on it, which calls the reducer
                    name = getattr(parameter, NAME)
                    note = parameter.register_post_accumulate_grad_hook(_Note(self._used, name))
                    attached.on_detach(note.remove)
        self._stream: Any = None

    def __call__(self, bucket: Any) -> Bucket:
        """Start to average a bucket over the ranks; return the future of the averaged gradients."""
        self._attached.reduced()
        gradients: Tensor = bucket.buffer()
        if bucket.index() == 0:
            self._pending.clear()  # left from a pass that an exception ended
            self._follow_rebuilt()
        raw_nbytes, codec = self._raw_nbytes(gradients), None
        if not gradients.is_sparse:
            codec = self._channel.codec(gradients.numel(), gradients.dtype, self._group)
        if codec is None:
            self._channel.native(raw_nbytes)
            future = ddp_slot.average(gradients, self._group)
        else:
            future = torch.futures.Future(devices=_devices(gradients))
            with self._beside(gradients):
                started = self._start(bucket, gradients, codec, raw_nbytes, future)
                self._finish(len(self._pending))
            self._pending.append(started)
        if bucket.is_last():
            if self._used is not None:
                self._used.clear()
            with self._beside(gradients):
                self._finish(len(self._pending))
        return future

    def _raw_nbytes(self, gradients: Tensor) -> int:
        """Return the bytes one rank sends in a native sum; sparse rows go to every other rank."""
        if gradients.is_sparse:
            rows = gradients.coalesce()
            nbytes = rows.indices().nbytes + rows.values().nbytes
            return nbytes * (self._world_size - 1)
        return int(
            native_nbytes.all_reduce_nbytes(gradients.numel(), gradients.dtype, self._world_size)
        )

    def _start(
        self, bucket: Any, gradients: Tensor, codec: Codec, raw_nbytes: int, future: Bucket
    ) -> _Pending:
        """Send the first message of a bucket."""
        layout, message, buffer, factor = None, gradients, None, 1.0 / self._world_size
        # low rank needs whole matrices and handles each separately anyway; with error feedback a
        # lossless codec that sends the residuals uses their layout
        by_parameter = self._channel.error_feedback or not codec.lossless
        if by_parameter and codec.low_rank is None:
            layout = self._layout(bucket)
            buffer = POOL.take(layout.numel * gradients.itemsize, gradients.device)
            message = first(buffer, layout.numel * gradients.itemsize).view(gradients.dtype)
            layout.pack(gradients, factor, message)
        else:
            gradients.mul_(factor)
        pieces = None
        if self._channel.wants_pieces(codec):
            pieces = _pieces(bucket) if layout is None else layout.pieces
        handle = self._channel.all_reduce(
            message, codec, self._group, raw_nbytes=raw_nbytes, pieces=pieces, async_op=True,
            taken=self._taken(bucket),
        )  # fmt: skip
        return _Pending(handle, future, gradients, message, layout, buffer)

    def _taken(self, bucket: Any) -> dict[str, Tensor]:
        """Whether any rank has used them since the last sum: parameters that this one has not.

        Where DDP looks for unused ones it throws their sum away, and what was left out of earlier
        sums would go with it. A collective then, of one number for each parameter in ``bucket``,
        which the host does not wait for.
        """
        if self._used is None:
            return {}
        names = [getattr(parameter, NAME) for parameter in bucket.parameters()]
        flags = torch.tensor([name in self._used for name in names], dtype=torch.int32)
        flags = flags.to(bucket.buffer().device, non_blocking=True)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        found = zip(names, flags.bool().unbind(), strict=True)
        return {name: flag for name, flag in found if name not in self._used}

    def _layout(self, bucket: Any) -> BucketLayout:
        parameters = bucket.parameters()
        names = tuple(getattr(parameter, NAME) for parameter in parameters)
        if names not in self._layouts:
            numels = list(map(_numel, parameters))
            self._layouts[names] = BucketLayout(names, numels, self._world_size)
        return self._layouts[names]

    def _follow_rebuilt(self) -> None:
        """Detach residuals from the first step's buckets, so that the rebuilt ones collect them."""
        if not self._is_rebuilt and self._model._has_rebuilt_buckets:
            self._is_rebuilt = True
            self._layouts.clear()
            residuals = self._attached.channels.residuals
            residuals.load(residuals.state_dict())

    def _finish(self, count: int) -> None:
        """Wait for the first ``count`` buckets, in order: ``wait`` posts further messages."""
        finished, self._pending = self._pending[:count], self._pending[count:]
        for one in finished:
            one.handle.wait()
            if one.layout is not None:
                one.layout.unpack(one.message, one.gradients)
                POOL.give(one.buffer)
            one.future.set_result(one.gradients)  # on a GPU it is ready when this stream gets here

    @contextmanager
    def _beside(self, gradients: Tensor) -> Iterator[None]:
        """Run the body on a second stream after the backward pass's work so far, on a GPU."""
        if gradients.device.type != "cuda":
            with nullcontext():
                yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(gradients.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(gradients.device))
        with torch.cuda.stream(self._stream):
            yield


def _devices(gradients: Tensor) -> list[int | str | torch.device] | None:
    return [gradients.device] if gradients.device.type == "cuda" else None


def _pieces(bucket: Any) -> list[Piece]:
    """Return the parameters of a bucket as pieces, in its order; there are no gaps."""
    return [Piece(getattr(p, NAME), 0, _numel(p)) for p in bucket.parameters()]


def _numel(parameter: Tensor) -> int:
    """Return the real numbers in a parameter: DDP sums complex values as pairs of these."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)
