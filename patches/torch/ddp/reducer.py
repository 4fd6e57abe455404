"""The hook of DistributedDataParallel: gradient buckets, dimension ``dp``.

DDP calls the hook once the backward pass has filled a bucket, with gradients not yet divided: so
the hook multiplies by 1/ranks, as DDP's reducer does without a hook
(``mark_variable_ready_dense``), and then sums. Buckets come in the same order on all ranks. The
first message of a bucket travels while the backward pass fills the next one, whose hook then
finishes it; the last bucket of a pass finishes all. All messages are sent from one thread: those of
a second one could overtake the backward pass's other messages, on some ranks only.

DDP rebuilds its buckets after the first step: residuals belong to parameters, never to buckets, and
a lossy codec encodes each parameter independently (``layout``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hybridcomp.channels import NAME, AllReduce
from hybridcomp.channels.residuals.pieces import Piece
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Handle
from hybridcomp.collectives.wire.encoding import POOL
from hybridcomp.job import small_messages
from hybridcomp.patches.common.sparse_tables import SparseTables
from hybridcomp.patches.torch.attached import Attached
from hybridcomp.patches.torch.ddp import slot as ddp_slot
from hybridcomp.patches.torch.ddp.layout import BucketLayout
from hybridcomp.patches.torch.ddp.slot import Bucket


@dataclass
class _Pending:
    """A pending bucket: its handle, the future on which DDP waits, and the gradients."""

    handle: Handle
    future: Bucket
    gradients: Tensor
    message: Tensor  # the encoded tensor: the gradients, or the table of ``layout``
    layout: BucketLayout | None
    buffer: Tensor | None  # the memory of ``message`` if that is a table


@dataclass(eq=False, kw_only=True)
class _BucketSum(AllReduce):
    """Average of a bucket's gradients over the ranks."""

    reducer: Reducer
    bucket: Any
    gradients: Tensor
    layout: BucketLayout | None = None
    buffer: Tensor | None = None

    def native_nbytes(self, size: int) -> int:
        """Return the bytes of a native sum; sparse rows go to every other rank."""
        if not self.gradients.is_sparse:
            return super().native_nbytes(size)
        rows = self.gradients.coalesce()
        return (rows.indices().nbytes + rows.values().nbytes) * (size - 1)

    def load(self, codec: Codec) -> Tensor:
        """Multiply by 1/ranks, and copy into a table with a row for each parameter.

        A low-rank codec needs no table: it takes whole matrices, each separately. With error
        feedback lossless codecs use the table, too, since they send residuals.
        """
        gradients, factor = self.gradients, 1.0 / dist.get_world_size(self.group)
        by_parameter = self.reducer.error_feedback or not codec.lossless
        if not by_parameter or codec.low_rank is not None:
            self.values = gradients.mul_(factor)
            return self.values
        self.layout = self.reducer.layout(self.bucket)
        nbytes = self.layout.numel * gradients.itemsize
        self.buffer, values = POOL.take_bytes(nbytes, gradients.device)
        self.values = values.view(gradients.dtype)
        self.layout.pack(gradients, factor, self.values)
        return self.values

    def pieces(self) -> Sequence[Piece]:
        """Return the parameters in the table; without a table those of the bucket, without gaps."""
        if self.layout is not None:
            return self.layout.pieces
        return [Piece(getattr(p, NAME), 0, real_numel(p)) for p in self.bucket.parameters()]

    def taken(self) -> dict[str, Tensor]:
        """Return which parameters' sums DDP uses."""
        return self.reducer.taken(self.bucket)

    def started(self, handle: Handle) -> _Pending:
        """Finish the earlier buckets, whose first message has been posted."""
        assert self.values is not None, "loaded"
        future: Bucket = torch.futures.Future(devices=_devices(self.gradients))
        self.reducer.finish()
        return _Pending(handle, future, self.gradients, self.values, self.layout, self.buffer)


class Reducer:
    """Reducer of one model's buckets, called by DDP's communication hook."""

    def __init__(self, model: DistributedDataParallel, attached: Attached) -> None:
        self._group = model.process_group
        self._model: Any = model
        self._attached = attached
        self._channel = attached.channels["dp"]
        self.error_feedback = self._channel.error_feedback
        self._pending: list[_Pending] = []
        self._layouts: dict[tuple[str, ...], BucketLayout] = {}
        self._is_rebuilt = False
        #: names of parameters with a gradient since the last sum; None if DDP finds no unused ones
        self._used: set[str] | None = None
        self._noted: set[str] = set()
        if self.error_feedback and (model.find_unused_parameters or model.static_graph):
            self._used = set()
            self._note_used()
        self._rows = attached.channels["embed"]
        self.tables = SparseTables(model.module if self._rows.active else nn.Module())
        self._stream: Any = None

    def _note_used(self) -> None:
        """Record each trained parameter when it gets a gradient."""
        for parameter in self._model._module_parameters:
            name = getattr(parameter, NAME)
            if self._used is None or not parameter.requires_grad or name in self._noted:
                continue
            self._noted.add(name)  # this hook runs before DDP's, which calls the reducer
            note = functools.partial(_note, self._used, name)
            handle = parameter.register_post_accumulate_grad_hook(note)
            self._attached.on_detach(handle.remove)

    def renew(self) -> None:
        """Adapt to a new reducer of torch, which was made for other parameters."""
        self._is_rebuilt = False
        self._forget_layouts()
        self._note_used()

    def __call__(self, bucket: Any) -> Bucket:
        """Start to average a bucket over the ranks; return the future of the averaged gradients."""
        self._attached.reduced()
        gradients: Tensor = bucket.buffer()
        if bucket.index() == 0:
            self._pending.clear()  # left by a pass that an exception ended
            self._follow_rebuilt()
        if gradients.is_sparse and self._rows.active:
            with self._beside(gradients):
                return self._rows_of(bucket, gradients)
        message = _BucketSum(
            numel=gradients.numel(), dtype=gradients.dtype, group=self._group, async_op=True,
            reducer=self, bucket=bucket, gradients=gradients,
        )  # fmt: skip
        with self._beside(gradients):
            started = self._start(message)
        if started is None:
            future = ddp_slot.average(gradients, self._group)
        else:
            future = started.future
            self._pending.append(started)
        if bucket.is_last():
            if self._used is not None:
                self._used.clear()
            with self._beside(gradients):
                self.finish()
        return future

    def _rows_of(self, bucket: Any, gradients: Tensor) -> Bucket:
        """Average the rows of a table, in a bucket of its own, after all buckets before it."""
        from hybridcomp.channels.messages.row_sums import RowSum, as_gradient, touched

        self.finish()
        (weight,) = bucket.parameters()
        factor = 1.0 / dist.get_world_size(self._group)
        message = RowSum(
            dtype=gradients.dtype, group=self._group, direction="backward",
            mine=touched(gradients), scaled=lambda: touched(gradients.mul_(factor)),
            table=getattr(weight, NAME), rows=weight.shape[0], wrong=self.tables.wrong(weight),
        )  # fmt: skip
        future: Bucket = torch.futures.Future(devices=_devices(gradients))
        future = self._rows.run(
            message,
            native=lambda: ddp_slot.average(gradients, self._group),
            encoded=lambda found: _finished(future, as_gradient(found, weight)),
        )
        if bucket.is_last() and self._used is not None:
            self._used.clear()
        return future

    def _start(self, message: _BucketSum) -> _Pending | None:
        """Send a bucket's first message, then finish earlier buckets; None if it stays native."""
        if message.gradients.is_sparse:
            self._channel.run_native(message, lambda: None)
            return None
        return self._channel.run(message, native=lambda: None, encoded=message.started)

    def taken(self, bucket: Any) -> dict[str, Tensor]:
        """Return, for parameters unused here since the last sum, whether any rank has used them.

        If DDP looks for unused parameters, it discards the sums of those that no rank used, and
        with them our residuals. In that case this is a collective of one number for each parameter
        in ``bucket``, for which the host does not wait.
        """
        if self._used is None:
            return {}
        names = [getattr(parameter, NAME) for parameter in bucket.parameters()]
        flags = torch.tensor(
            [name in self._used for name in names], dtype=torch.int32, device="cpu"
        )
        flags = flags.to(bucket.buffer().device, non_blocking=True)
        small_messages.most(flags, self._group)
        found = zip(names, flags.bool().unbind(), strict=True)
        return {name: flag for name, flag in found if name not in self._used}

    def layout(self, bucket: Any) -> BucketLayout:
        parameters = bucket.parameters()
        names = tuple(getattr(parameter, NAME) for parameter in parameters)
        if names not in self._layouts:
            numels = list(map(real_numel, parameters))
            self._layouts[names] = BucketLayout(names, numels, dist.get_world_size(self._group))
        return self._layouts[names]

    def _follow_rebuilt(self) -> None:
        if not self._is_rebuilt and self._model._has_rebuilt_buckets:
            self._is_rebuilt = True
            self._forget_layouts()

    def _forget_layouts(self) -> None:
        """Detach residuals from the old buckets' layouts, so that new layouts collect them."""
        self._layouts.clear()
        residuals = self._attached.channels.residuals
        residuals.load(residuals.state_dict())

    def finish(self) -> None:
        """Wait for the pending buckets in order: ``wait`` posts further messages."""
        finished, self._pending = self._pending, []
        for one in finished:
            one.handle.wait()
            if one.layout is not None:
                one.layout.unpack(one.message, one.gradients)
                POOL.give(one.buffer)
            one.future.set_result(one.gradients)  # on a GPU they are ready when this stream arrives

    @contextmanager
    def _beside(self, gradients: Tensor) -> Iterator[None]:
        """On a GPU, run the body on a second stream, after the backward pass's work so far."""
        if gradients.device.type != "cuda":
            with nullcontext():
                yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(gradients.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(gradients.device))
        with torch.cuda.stream(self._stream):
            yield


def _note(used: set[str], name: str, parameter: Tensor) -> None:
    """Record that a parameter got a gradient; the hook holds no reference to the model."""
    used.add(name)


def _finished(future: Bucket, value: Tensor) -> Bucket:
    future.set_result(value)
    return future


def _devices(gradients: Tensor) -> list[int | str | torch.device] | None:
    return [gradients.device] if gradients.device.type == "cuda" else None


def real_numel(parameter: Tensor) -> int:
    """Return the real numbers in a parameter: DDP sums complex values as pairs of these."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)
