"""Learn from an engine's own loader where checkpoint values go, and write changes there.

An engine packs, shards and renames checkpoint tensors while it loads them. ``learn`` runs the
loader once and records its copies into parameters instead of executing them. Each copy maps a block
of a checkpoint tensor to a block of a parameter. With this map, changed values are written to
their places, and a few values of every parameter are compared after each load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

#: operations that write the same values whatever is loaded
CONSTANT = (
    torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default,
)  # fmt: skip
#: number of values of a block that are compared after a load, at most
SAMPLES = 16


@dataclass(frozen=True)
class Strided:
    """Positions of a block's values in a storage: a first offset, and a stride per dimension."""

    offset: int
    strides: tuple[int, ...]

    def of(self, like: Tensor, positions: list[Tensor]) -> Tensor:
        """Return the storage offsets of values of the block.

        ``positions``: for each dimension the values' indices, tensors like ``like``.
        """
        found = torch.full_like(like, self.offset)
        for position, stride in zip(positions, self.strides, strict=True):
            found += position * stride
        return found


@dataclass(frozen=True)
class Block:
    """A block of ``sizes`` that the loader copies from a tensor into parameter ``to``.

    ``source`` counts from the tensor's first value, ``target`` from the parameter storage's first.
    """

    to: str
    sizes: tuple[int, ...]
    source: Strided
    target: Strided

    def places(self, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Find which flat offsets of the checkpoint tensor lie in this block.

        Returns a mask of ``offsets`` and their positions in the parameter's storage, both on the
        device of ``offsets``.
        """
        rest = offsets - self.source.offset
        inside = rest >= 0
        found = torch.full_like(offsets, self.target.offset)
        dims = zip(self.source.strides, self.sizes, self.target.strides, strict=True)
        for stride, size, to in sorted(dims, reverse=True):  # outermost dimension first
            position = torch.div(rest, stride, rounding_mode="floor")
            inside &= position < size
            rest = rest - position * stride
            found += position * to
        inside &= rest == 0
        return inside, found[inside]

    def some(self) -> tuple[Tensor, Tensor]:
        """Return a few values' offsets in the tensor and in the storage, with first and last."""
        numel = torch.Size(self.sizes).numel()
        flat = torch.linspace(
            0, numel - 1, min(SAMPLES, numel), dtype=torch.float64, device="cpu"
        ).long()
        positions = list(torch.unravel_index(flat, self.sizes)) if self.sizes else []
        return self.source.of(flat, positions), self.target.of(flat, positions)


@dataclass
class LoaderLayout:
    """Record which blocks of each checkpoint tensor an engine's loader copies to this worker.

    Attributes:
        blocks: for each checkpoint name the blocks that are copied; empty if this worker holds no
            part of the tensor.
        unknown: for each checkpoint name that the loader does not simply copy, the reason.
    """

    blocks: dict[str, list[Block]] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)

    def writer(
        self, parameters: Mapping[str, Tensor], changes: Iterable[tuple[str, Tensor, Tensor]]
    ) -> Callable[[], None]:
        """Check changed values and their places; return a function that writes them.

        ``changes``: names of known tensors, flat offsets and values.
        """
        rows: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
        for name, offsets, values in changes:
            for block in self.blocks[name]:
                inside, places = block.places(offsets)
                if places.numel():
                    row = rows.setdefault(block.to, ([], []))
                    row[0].append(places)
                    row[1].append(values[inside])
        ready = []
        for name, (places_of, values_of) in rows.items():
            device = parameters[name].device
            where, what = torch.cat(places_of).to(device), torch.cat(values_of).to(device)
            ready.append((_storage(parameters[name]), where, what))

        def write() -> None:
            for flat, where, what in ready:
                flat[where] = what

        return write

    def differing(
        self, parameters: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]]
    ) -> str:
        """Compare a few values of each block; return the name of a parameter that differs, or "".

        ``weights``: checkpoint tensors; unknown ones are skipped. The host waits once per device.
        """
        found: dict[torch.device, list[tuple[str, Tensor]]] = {}
        for name, weight in weights:
            flat = weight.reshape(-1)
            for block in self.blocks.get(name, ()):
                source, target = block.some()
                parameter = parameters[block.to]
                mine = _storage(parameter)[target.to(parameter.device)]
                wanted = flat[source].to(parameter.device)
                is_other = (_bits(mine) != _bits(wanted)).any()
                found.setdefault(parameter.device, []).append((block.to, is_other))
        for rows in found.values():
            others = torch.stack([is_other for _, is_other in rows]).tolist()
            for (name, _), is_other in zip(rows, others, strict=True):
                if is_other:
                    return name
        return ""


def learn(
    load: Callable[[Iterable[tuple[str, Tensor]]], object],
    parameters: Mapping[str, Tensor],
    weights: Iterable[tuple[str, Tensor]],
) -> LoaderLayout:
    """Run the loader ``load`` on each of ``weights``, recording its copies; nothing is written.

    Args:
        load: loads an iterable of checkpoint names and tensors.
        parameters: the parameters that it writes, by the engine's names.
        weights: contiguous tensors, each with its own storage.
    """
    found = LoaderLayout()
    homes = _homes(parameters)
    for name, weight in weights:
        noted = _Noted(homes, weight)
        try:
            with torch.no_grad(), noted:
                load([(name, weight)])
        except Exception as error:
            noted.odd = f"{type(error).__name__}: {error}"
        if noted.odd:
            found.unknown[name] = noted.odd
        else:
            found.blocks[name] = noted.blocks
    assert _homes(parameters) == homes, "the loader has given the engine other storages"
    return found


def _homes(parameters: Mapping[str, Tensor]) -> dict[int, str]:
    """Map the storage of each non-empty parameter to its name."""
    return {
        parameter.untyped_storage().data_ptr(): name
        for name, parameter in parameters.items()
        if parameter.numel()
    }


class _Noted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record copies from one tensor into parameters; ``odd``: why another write occurred."""

    def __init__(self, homes: Mapping[int, str], weight: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks: list[Block] = []
        self.odd = ""
        self._homes, self._weight = homes, weight
        self._from = weight.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            for target in given if isinstance(given, (list, tuple)) else [given]:
                home = target.untyped_storage().data_ptr() if isinstance(target, Tensor) else -1
                if home in self._homes:
                    self._note(func, self._homes[home], target, args)
                    return given
                if home == self._from:
                    self._odd(f"{func} writes to what it is given")
                    return given
        return func(*args, **kwargs)

    def _odd(self, why: str) -> None:
        self.odd = self.odd or why

    def _note(self, func: Any, name: str, target: Tensor, args: Any) -> None:
        if func in CONSTANT:
            return  # rows that pad a vocabulary stay as the engine's own load left them
        source = args[1] if func is torch.ops.aten.copy_.default else None
        if not isinstance(source, Tensor) or source.untyped_storage().data_ptr() != self._from:
            self._odd(f"{func} writes other values than those of the checkpoint")
            return
        if source.shape != target.shape or source.dtype != target.dtype or not _nested(source):
            self._odd(f"{func} converts or repeats values")
            return
        dims = [n for n, size in enumerate(source.shape) if size > 1]

        def strided(view: Tensor, begin: int) -> Strided:
            strides = tuple(int(view.stride(n)) for n in dims)
            return Strided(int(view.storage_offset()) - begin, strides)

        sizes = tuple(source.shape[n] for n in dims)
        begin = int(self._weight.storage_offset())
        self.blocks.append(Block(name, sizes, strided(source, begin), strided(target, 0)))


def _nested(view: Tensor) -> bool:
    """Return whether a view's strides give every value its own place in the storage."""
    inner = 1
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size > 1 and stride < inner:
            return False
        inner = max(inner, stride * size)
    return True


def _storage(parameter: Tensor) -> Tensor:
    """Return all values of a parameter's storage."""
    numel = parameter.untyped_storage().nbytes() // parameter.element_size()
    return parameter.detach().as_strided((numel,), (1,), 0)


def _bits(values: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return values.view(kinds[values.element_size()])
