"""Keep layers of a stage in host memory while it generates, and prefetch each before it runs.

For stages whose weights leave too little device memory for keys and values (as PMEP of EnergonAI,
which keeps layers on other GPUs instead). An optimizer may hold many parameters in one flat buffer,
so whole storages are freed, and layers that stay on the device get new memory. Afterwards all
weights are restored in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from hybridcomp.channels.accounting.ledger import Ledger
from hybridcomp.channels.accounting.memory import size
from hybridcomp.codecs.expcode import ExpCode
from hybridcomp.collectives import Meter
from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.generation.gathered import free_nbytes

KEY = "generate.weights_gb"
#: device slots for offloaded layers (the running and the next one), and the device memory of slots
#: and decoding buffers, in slots
SLOTS, BUFFERS = 2, 3
#: parameters in a slot start at multiples of this
ALIGNED = 256


@dataclass(eq=False)
class _Weight:
    """A parameter to offload; ``home``: original tensor, ``start``: byte offset in a slot."""

    param: nn.Parameter
    home: Tensor
    start: int = 0
    payload: Tensor | None = None
    codec: ExpCode | None = None

    def encode(self) -> None:
        """Copy the values to the host and encode them there, without device memory."""
        values, codec = self.home.cpu().view(-1), ExpCode()
        if codec.takes(values.dtype):
            out = torch.empty(
                codec.wire_nbytes(len(values), values.dtype), dtype=torch.uint8, device="cpu"
            )
            self.payload, self.codec = out[: codec.encode(values, out)].clone(), codec
        else:
            self.payload = values.view(torch.uint8).clone()
        if self.home.is_cuda:
            self.payload = self.payload.pin_memory()

    def decode(self, out: Tensor, meter: Meter) -> None:
        """Write the values into ``out``, on the current stream of its device."""
        assert self.payload is not None, "encoded"
        payload = self.payload.to(out.device, non_blocking=True)
        with meter.coding():
            if self.codec is None:
                out.view(-1).view(torch.uint8).copy_(payload)
            else:
                self.codec.decode(payload, out.view(-1))
        meter.sent(payload.numel())
        meter.used["none" if self.codec is None else self.codec.spec] = None


class HostLayers:
    """The offloaded layers of a stage, as a context; ``fetch`` loads one into a device slot."""

    def __init__(
        self, layers: Sequence[Callable[..., Any]], modules: Sequence[nn.Module],
        device: torch.device, most_gb: float | None, ledger: Ledger,
    ) -> None:  # fmt: skip
        """Choose the fewest layers to offload so that weights take at most ``most_gb``.

        ``most_gb``: limit for weights on the device, in 1e9 bytes; None: offload nothing. Raises
        ConfigError, before moving anything, if no choice fits or host memory is too small.
        """
        params = list(dict.fromkeys(p for m in modules for p in m.parameters() if p.numel()))
        self._device, self._ledger = device, ledger
        self._layers: dict[int, list[_Weight]] = {}
        if most_gb is not None:
            self._layers = _chosen([_params_of(layer) for layer in layers], params, most_gb * 1e9)
        go = {weight.param: weight for own in self._layers.values() for weight in own}
        emptied = {_storage(param) for param in go}
        moved = [param for param in params if _storage(param) in emptied]
        self._moved = [go.get(param) or _Weight(param, param.data) for param in moved]
        self._stay = [weight for weight in self._moved if weight.param not in go]
        self._gaps: list[tuple[Tensor, int, list[tuple[int, Tensor]]]] = []
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(device) if device.type == "cuda" else None
        self._pool: ThreadPoolExecutor | None = None
        self._slots: list[Tensor] = []
        self._free: list[Any] = []  # event of each slot: the slot may be overwritten
        self._now: int | None = None
        self._coming: tuple[int, int, Future[Meter]] | None = None  # layer, slot
        needed = sum(weight.home.nbytes for weight in self._moved)
        if needed and needed > (free := free_nbytes(torch.device("cpu"))):
            todo = f"{len(go)} weights would wait in host memory, and {size(free)} are free"
            raise ConfigError(KEY, Shown(f"up to {size(needed)} needed"), todo)

    def __enter__(self) -> HostLayers:
        """Offload the layers; on failure restore everything."""
        if not self._layers:
            return self
        try:
            for weight in self._moved:
                weight.encode()
            self._empty()
            most = max(map(_span, self._layers.values()))
            self._slots = [_new(most, self._device) for _ in range(SLOTS)]
        except BaseException:
            self._put_back()
            raise
        self._free = [self._event() for _ in range(SLOTS)]
        gone = sum(weight.home.nbytes for weight in self._moved)
        self._ledger.record_native(("offload", "backward"), gone)
        self._pool = ThreadPoolExecutor(1, "hybridcomp layers")
        self._ask(next(iter(self._layers)), 0)
        return self

    def _empty(self) -> None:
        """Free the storages, already copied to the host; layers that stay get new memory."""
        homes: dict[int, list[Tensor]] = {}
        for weight in self._moved:
            homes.setdefault(_storage(weight.home), []).append(weight.home)
            weight.param.data = weight.home.new_empty(0)
        for inside in homes.values():
            whole, gaps, at = _whole(inside[0]), list[tuple[int, Tensor]](), 0
            spans = sorted((int(h.storage_offset()) * h.itemsize, h.nbytes) for h in inside)
            for start, nbytes in [*spans, (len(whole), 0)]:
                if start > at:
                    gaps.append((at, whole[at:start].to("cpu", copy=True)))
                at = max(at, start + nbytes)
            self._gaps.append((inside[0], len(whole), gaps))
            whole.untyped_storage().resize_(0)
        for weight in self._stay:
            weight.param.data = torch.empty_like(weight.home, device=self._device)
            weight.decode(weight.param.data, Meter())

    def fetch(self, at: int) -> None:
        """Wait until layer ``at`` is on the device, and start to fetch the next offloaded one."""
        if at not in self._layers or at == self._now:
            return
        if self._coming is None or self._coming[0] != at:
            self._ask(at, self._met())
        slot = self._met()
        for weight in self._layers[self._now] if self._now is not None else ():
            weight.param.data = weight.home.new_empty(0)
        self._free[1 - slot] = self._event()
        for weight in self._layers[at]:
            weight.param.data = self._place(weight, slot)
        self._now = at
        order = list(self._layers)
        self._ask(order[(order.index(at) + 1) % len(order)], 1 - slot)

    def _met(self) -> int:
        """Wait for the layer that is being loaded, and count its bytes; return its slot."""
        assert self._coming is not None, "one is always under way"
        at, slot, future = self._coming
        meter = future.result()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        raw_nbytes = sum(weight.home.nbytes for weight in self._layers[at])
        self._ledger.record(("offload", "forward"), raw_nbytes, meter)
        return slot

    def _event(self) -> Any:
        """Record an event after all queued device work; loading into a slot waits for it."""
        if self._stream is None:
            return None
        return torch.cuda.current_stream(self._device).record_event()

    def _ask(self, at: int, slot: int) -> None:
        assert self._pool is not None, "entered"
        self._coming = at, slot, self._pool.submit(self._load, at, slot)

    @torch.no_grad()
    def _load(self, at: int, slot: int) -> Meter:
        """Copy a layer into a slot, on a separate thread and stream."""
        meter = Meter(where="layers on the host")
        with torch.cuda.stream(self._stream):
            if self._stream is not None:
                self._stream.wait_event(self._free[slot])
            for weight in self._layers[at]:
                weight.decode(self._place(weight, slot), meter)
        return meter

    def _place(self, weight: _Weight, slot: int) -> Tensor:
        part = self._slots[slot][weight.start : weight.start + weight.home.nbytes]
        return part.view(weight.home.dtype).view(weight.home.shape)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore all weights in place, bit for bit."""
        if self._pool is not None:
            with suppress(Exception):  # the layer that failed to load is no longer needed
                self._met()
            self._pool.shutdown()
            self._put_back()

    def _put_back(self) -> None:
        for weight in self._moved:
            weight.param.data = weight.home.new_empty(0)
        self._slots.clear()
        emptied = set()
        for home, nbytes, gaps in self._gaps:
            home.untyped_storage().resize_(nbytes)
            emptied.add(_storage(home))
            for start, kept in gaps:
                _whole(home)[start : start + len(kept)].copy_(kept)
        for weight in self._moved:
            if _storage(weight.home) in emptied:
                weight.decode(weight.home, Meter())
            weight.param.data = weight.home
        self._gaps.clear()


def _chosen(
    layers: Sequence[list[nn.Parameter]], params: Iterable[nn.Parameter], most: float
) -> dict[int, list[_Weight]]:
    """Return the layers to offload, as few as fit, evenly spaced; none if all may stay."""
    total = sum(param.nbytes for param in params)
    if total <= most:
        return {}
    homes = [id(home) for layer in layers for home in layer]
    fixed = {_storage(p) for p in params if not _moves(p)}
    may: dict[int, list[_Weight]] = {}
    for at, own in enumerate(layers):
        if own and all(homes.count(id(p)) == 1 and _storage(p) not in fixed for p in own):
            may[at] = _laid_out(own)
    options: list[tuple[int, float, list[int]]] = []
    for largest in set(map(_span, may.values())):  # a slot has room for any offloaded layer
        alike = [at for at, own in may.items() if largest <= 2 * _span(own) <= 2 * largest]
        for count in range(BUFFERS + 1, len(alike) + 1):
            chosen = [alike[index * len(alike) // count] for index in range(count)]
            gone = sum(weight.home.nbytes for at in chosen for weight in may[at])
            options.append((count, total - gone + BUFFERS * largest, chosen))
    if fitting := [option for option in options if option[1] <= most]:
        return {at: may[at] for at in min(fitting)[2]}
    least = min((needed for _, needed, _ in options), default=total)
    text = (
        f"the layers of this stage take {size(total)}, and no less than {size(least)} with all on "
        f"the host that can wait there, as {BUFFERS} have room on the device"
    )
    raise ConfigError(KEY, Shown(size(most)), f"{text}; allow more, or take more stages")


def _moves(param: nn.Parameter) -> bool:
    return param.is_contiguous() and param.untyped_storage().resizable()


def _params_of(layer: Any) -> list[nn.Parameter]:
    """Return the parameters of a layer, or of the modules inside a function."""
    parts = [layer, *layer.args] if isinstance(layer, partial) else [layer]
    modules = [part for part in parts if isinstance(part, nn.Module)]
    return list(dict.fromkeys(p for module in modules for p in module.parameters() if p.numel()))


def _laid_out(params: Iterable[nn.Parameter]) -> list[_Weight]:
    weights: list[_Weight] = []
    for param in params:
        weights.append(_Weight(param, param.data, _span(weights)))
    return weights


def _span(weights: Sequence[_Weight]) -> int:
    """Return the bytes that some weights take in a slot."""
    end = weights[-1].start + weights[-1].home.nbytes if weights else 0
    return -(-end // ALIGNED) * ALIGNED


def _new(nbytes: int, device: torch.device) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _storage(values: Tensor) -> int:
    """Return a storage's address, which identifies its tensors."""
    return values.untyped_storage().data_ptr()


def _whole(values: Tensor) -> Tensor:
    """Return all bytes of the storage of ``values``."""
    return torch.empty(0, dtype=torch.uint8, device=values.device).set_(values.untyped_storage())
