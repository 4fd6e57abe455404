"""Keep layers of a stage in host memory while it generates, and bring each back one ahead.

For stages whose weights leave too little of the device to keys and values (PMEP of EnergonAI, whose
layers wait on other GPUs). The layers leave encoded, without loss, and lie afterwards where they
lay before. An optimizer may hold many parameters in one flat buffer, so whole storages are emptied:
what else lies in them waits on the host as it is, and layers that stay get memory of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from hybridcomp.channels.ledger import Ledger
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.expcode import ExpCode
from hybridcomp.collectives import Meter
from hybridcomp.config.error_messages import Shown
from hybridcomp.config.memory import size
from hybridcomp.errors import ConfigError
from hybridcomp.generation.gathered import free_nbytes

KEY = "generate.weights_gb"
#: layers on the device at once beside those that stay: one that runs, the next one, its payload
SLOTS, BUFFERS = 2, 3
#: parameters in a slot begin at multiples of this
ALIGNED = 256


@dataclass(eq=False)
class _Weight:
    """A parameter on the host.

    Attributes:
        home: its values where they lie outside of a generation.
        codec, payload: on the host; None: its bytes.
        start: of its values in a slot.
    """

    param: nn.Parameter
    home: Tensor
    start: int
    codec: Codec | None = None
    payload: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def encode(self) -> None:
        """Copy the values to the host and encode them there, which takes nothing of the device."""
        values = self.home.cpu().view(-1)
        codec = ExpCode()
        if codec.takes(values.dtype):
            out = torch.empty(codec.wire_nbytes(len(values), values.dtype), dtype=torch.uint8)
            self.payload, self.codec = out[: codec.encode(values, out)].clone(), codec
        else:
            self.payload = _bytes(values).clone()
        if self.home.is_cuda:
            self.payload = self.payload.pin_memory()

    def decode(self, out: Tensor) -> None:
        """Write the values into ``out``, on the current stream of its device."""
        payload = self.payload.to(out.device, non_blocking=True)
        if self.codec is None:
            _bytes(out.view(-1)).copy_(payload)
        else:
            self.codec.decode(payload, out.view(-1))


class HostLayers:
    """The layers of a stage that wait on the host, as a context; ``fetch`` brings one back."""

    def __init__(
        self, layers: Sequence[Callable[..., Any]], modules: Sequence[nn.Module],
        device: torch.device, most_gb: float | None, ledger: Ledger,
    ) -> None:  # fmt: skip
        """Choose as few layers as leave ``most_gb`` (1e9 bytes; None: all stay) to the others.

        Raises ConfigError, before anything has moved, where no choice does, or the host is full.
        """
        self._params = list(dict.fromkeys(p for m in modules for p in m.parameters()))
        self._device, self._ledger = device, ledger
        self._layers: dict[int, list[_Weight]] = {}
        if most_gb is not None:
            chosen = _chosen([_params_of(layer) for layer in layers], self._params, most_gb * 1e9)
            self._layers = {at: _laid_out(own) for at, own in chosen.items()}
        self._stay: list[tuple[nn.Parameter, Tensor]] = []
        self._rests: list[tuple[Tensor, int, list[tuple[int, Tensor]]]] = []
        self._pool: ThreadPoolExecutor | None = None
        self._slots: list[Tensor] = []
        self._used: list[Any] = []  # events: a slot may be overwritten
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(device) if device.type == "cuda" else None
        self._now: int | None = None
        self._coming: tuple[int, int, Future[Meter]] | None = None  # layer, slot
        self._check_host()

    def _check_host(self) -> None:
        """Raise ConfigError where the host has no room for all storages that are emptied."""
        weights = self._weights
        storages = {w.home.untyped_storage().data_ptr(): w.home.untyped_storage() for w in weights}
        needed = 2 * sum(one.nbytes() for one in storages.values())
        if storages and needed > (free := free_nbytes(torch.device("cpu"))):
            todo = (
                f"{len(self._layers)} layers would wait in host memory, and {size(free)} are free"
            )
            raise ConfigError(KEY, Shown(f"up to {size(needed)} needed"), todo)

    @property
    def _weights(self) -> list[_Weight]:
        return [weight for own in self._layers.values() for weight in own]

    def __enter__(self) -> HostLayers:
        """Take the layers to the host; where that fails, all is as before."""
        if not self._layers:
            return self
        try:
            for weight in self._weights:
                weight.encode()
            self._empty()
            most = max(_span(own) for own in self._layers.values())
            self._slots = [_new(most, self._device) for _ in range(SLOTS)]
            self._used = [self._event() for _ in range(SLOTS)]
        except BaseException:
            self._put_back()
            raise
        gone = sum(_nbytes(weight.home) for weight in self._weights)
        self._ledger.record_native(("offload", "backward"), gone)
        self._pool = ThreadPoolExecutor(1, "hybridcomp layers")
        self._ask(next(iter(self._layers)), 0)
        return self

    def _empty(self) -> None:
        """Free the storages of the layers; what else lies in them waits, or gets its own memory."""
        parts: dict[int, list[Tensor]] = {}
        gone = {weight.param for weight in self._weights}
        for weight in self._weights:
            parts.setdefault(weight.home.untyped_storage().data_ptr(), []).append(weight.home)
        copies: list[tuple[nn.Parameter, Tensor]] = []
        for param in self._params:
            if param not in gone and param.untyped_storage().data_ptr() in parts:
                self._stay.append((param, param.data))
                copies.append((param, param.data.to("cpu", copy=True)))
        for weight in self._weights:
            weight.param.data = weight.home.new_empty(0)
        for param, copy in copies:
            param.data = copy
        for homes in parts.values():
            whole = _bytes_of_storage(homes[0])
            rest: list[tuple[int, Tensor]] = []
            at = 0
            spans = sorted((int(h.storage_offset()) * h.itemsize, _nbytes(h)) for h in homes)
            for start, nbytes in [*spans, (len(whole), 0)]:
                if start > at:
                    rest.append((at, whole[at:start].to("cpu", copy=True)))
                at = start + nbytes
            self._rests.append((homes[0], len(whole), rest))
            whole.untyped_storage().resize_(0)
        for param, copy in copies:
            param.data = copy.to(self._device)

    def fetch(self, at: int) -> None:
        """Have layer ``at`` on the device before it runs, and begin to bring the next one."""
        if at not in self._layers or at == self._now:
            return
        if self._coming is None or self._coming[0] != at:
            slot = self._met(self._coming)
            self._ask(at, slot)
        assert self._coming is not None
        coming, self._coming = self._coming, None
        slot = self._met(coming)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._let_go(1 - slot)
        for weight in self._layers[at]:
            weight.param.data = self._place(weight, slot)
        self._now = at
        order = list(self._layers)
        self._ask(order[(order.index(at) + 1) % len(order)], 1 - slot)

    def _met(self, coming: tuple[int, int, Future[Meter]] | None) -> int:
        """Wait for a layer that is under way, and count it; return its slot."""
        if coming is None:
            return 0
        at, slot, future = coming
        raw_nbytes = sum(_nbytes(weight.home) for weight in self._layers[at])
        self._ledger.record(("offload", "forward"), raw_nbytes, future.result())
        return slot

    def _let_go(self, slot: int) -> None:
        """Take the layer that has run from its slot, which the next one may then overwrite."""
        if self._now is not None:
            for weight in self._layers[self._now]:
                weight.param.data = weight.param.data.new_empty(0)
        self._used[slot] = self._event()

    def _event(self) -> Any:
        """Return what a slot's next layer waits for: all that the device was asked for so far."""
        if self._stream is None:
            return None
        return torch.cuda.current_stream(self._device).record_event()

    def _ask(self, at: int, slot: int) -> None:
        assert self._pool is not None
        self._coming = at, slot, self._pool.submit(self._load, at, slot)

    @torch.no_grad()
    def _load(self, at: int, slot: int) -> Meter:
        """Bring a layer into a slot, on a thread and a stream of its own."""
        meter = Meter(where="layers on the host")
        with torch.cuda.stream(self._stream):
            if self._stream is not None:
                self._stream.wait_event(self._used[slot])
            with meter.coding():
                for weight in self._layers[at]:
                    weight.decode(self._place(weight, slot))
                    meter.sent(weight.payload.numel())
                    meter.used[weight.codec.spec if weight.codec else "none"] = None
        return meter

    def _place(self, weight: _Weight, slot: int) -> Tensor:
        part = self._slots[slot][weight.start : weight.start + _nbytes(weight.home)]
        return part.view(weight.home.dtype).view(weight.home.shape)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put all weights back where they lay, bit for bit."""
        if self._pool is not None:
            with suppress(Exception):  # of a layer that nobody waits for any more
                self._met(self._coming)
            self._pool.shutdown()
            if self._stream is not None:
                self._stream.synchronize()
            self._put_back()

    def _put_back(self) -> None:
        for param in [*(weight.param for weight in self._weights), *(p for p, _ in self._stay)]:
            param.data = param.data.new_empty(0)
        self._slots.clear()
        emptied = set()
        for home, nbytes, rest in self._rests:
            storage = home.untyped_storage()
            storage.resize_(nbytes)
            emptied.add(storage.data_ptr())
            whole = _bytes_of_storage(home)
            for start, kept in rest:
                whole[start : start + len(kept)].copy_(kept)
        for weight in self._weights:
            if weight.home.untyped_storage().data_ptr() in emptied:
                weight.decode(weight.home)
            weight.param.data = weight.home
        for param, home in self._stay:
            param.data = home
        self._rests.clear()
        self._stay.clear()


def _chosen(
    layers: Sequence[list[nn.Parameter]], params: Iterable[nn.Parameter], most: float
) -> dict[int, list[nn.Parameter]]:
    """Return the layers that leave, few and evenly spaced ones; none where all may stay."""
    total = sum(map(_nbytes, params))
    if total <= most:
        return {}
    homes = [one for layer in layers for one in layer]
    may = [at for at, own in enumerate(layers) if own and all(_moves(p, homes) for p in own)]
    sizes = {at: _span(_laid_out(layers[at])) for at in may}
    options: list[tuple[int, float, list[int]]] = []
    for largest in set(sizes.values()):  # a slot has room for any layer that leaves
        alike = [at for at in may if largest <= 2 * sizes[at] <= 2 * largest]
        for count in range(BUFFERS + 1, len(alike) + 1):
            found = [alike[index * len(alike) // count] for index in range(count)]
            gone = sum(_nbytes(one) for at in found for one in layers[at])
            options.append((count, total - gone + BUFFERS * largest, found))
    if fitting := [option for option in options if option[1] <= most]:
        return {at: layers[at] for at in min(fitting)[2]}
    least = min((needed for _, needed, _ in options), default=total)
    todo = (
        f"the layers of this stage take {size(total)}, and no less than {size(least)} with "
        f"all on the host that can wait there, of which {BUFFERS} have room on the device"
    )
    raise ConfigError(
        KEY, Shown(size(most)), f"{todo}; allow more, or cut the model into more stages"
    )


def _moves(param: nn.Parameter, homes: list[nn.Parameter]) -> bool:
    """Return whether a parameter can leave: of one layer alone, in memory that can be freed."""
    alone = sum(one is param for one in homes) == 1
    return alone and param.is_contiguous() and param.untyped_storage().resizable()


def _params_of(layer: Any) -> list[nn.Parameter]:
    """Return the parameters of a layer, or of the modules that a function was given."""
    parts = [layer, *layer.args] if isinstance(layer, partial) else [layer]
    modules = [part for part in parts if isinstance(part, nn.Module)]
    return list(dict.fromkeys(p for one in modules for p in one.parameters() if p.numel()))


def _laid_out(params: Iterable[nn.Parameter]) -> list[_Weight]:
    weights: list[_Weight] = []
    for param in params:
        weights.append(_Weight(param, param.data, _span(weights)))
    return weights


def _span(weights: Sequence[_Weight]) -> int:
    """Return the bytes of a slot that some weights take."""
    end = weights[-1].start + _nbytes(weights[-1].home) if weights else 0
    return -(-end // ALIGNED) * ALIGNED


def _nbytes(values: Tensor) -> int:
    return values.numel() * values.itemsize


def _bytes(values: Tensor) -> Tensor:
    return values.view(torch.uint8)


def _new(nbytes: int, device: torch.device) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _bytes_of_storage(values: Tensor) -> Tensor:
    """Return all bytes of the storage that ``values`` lies in."""
    return _new(0, values.device).set_(values.untyped_storage())
