"""Keep older versions of a stage's weights, and run passes with them.

The model's parameters hold the newest version, where the optimizer expects it; only during a pass
with an older version their ``data`` is replaced. If autograd saves a parameter or a view of one,
only its position is stored, and the backward pass takes the tensor from the parameter. So the
backward pass computes with the weights that it is given, instead of saved tensors that the
optimizer has since overwritten.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True)
class _SavedWeight:
    """A view of parameter ``index`` that autograd has saved, stored as its position."""

    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class WeightVersions:
    """The newest weights, held by the model, and copies of older versions.

    Attributes:
        parameters: trained parameters, whose versions are kept.
        newest: number of optimizer steps so far, which identifies the newest version.
        most_held: most versions held at once, including the newest.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self._kept: dict[int, list[Tensor]] = {}
        self.newest = 0
        self.most_held = 1

    @property
    def held(self) -> int:
        return 1 + len(self._kept)

    def before_step(self, needed: Iterable[int]) -> None:
        """Copy the newest weights if they are ``needed`` after the step; drop unneeded versions."""
        wanted = set(needed)
        self._kept = {name: kept for name, kept in self._kept.items() if name in wanted}
        if self.newest in wanted:
            self._kept[self.newest] = [p.data.clone() for p in self.parameters]
        self.most_held = max(self.most_held, self.held)

    def after_step(self) -> None:
        self.newest += 1

    def drop(self) -> None:
        """Free all older versions: no pass is pending."""
        self._kept.clear()

    def at(self, version: int) -> Sequence[Tensor] | None:
        """Return the weights of ``version``; None if it is the newest, which the model holds."""
        return None if version == self.newest else self._kept[version]

    @contextmanager
    def inside(self, weights: Sequence[Tensor] | None) -> Iterator[None]:
        """Compute with ``weights`` inside this context, None for the newest; then restore them."""
        if weights is None:
            yield
            return
        own = [p.data for p in self.parameters]
        try:
            for parameter, values in zip(self.parameters, weights, strict=True):
                parameter.data = values
            yield
        finally:
            for parameter, values in zip(self.parameters, own, strict=True):
                parameter.data = values

    @contextmanager
    def forward(self, weights: Sequence[Tensor] | None) -> Iterator[None]:
        """Run a forward pass with ``weights``; autograd saves positions instead of weights."""
        with self.inside(weights):
            places = _Places(self.parameters)
            with saved_tensors_hooks(places.pack, self._unpack):
                yield

    def _unpack(self, saved: Tensor | _SavedWeight) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        data = self.parameters[saved.index].data
        offset = data.storage_offset() + saved.offset
        return data.as_strided(saved.size, saved.stride, offset)


class _Places:
    """Positions of the parameters in their storages; several parameters may share a storage."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        places: dict[int, list[tuple[int, int, int]]] = {}
        for index, parameter in enumerate(parameters):
            data, start = parameter.data, int(parameter.data.storage_offset())
            row = (start, start + data.numel(), index)
            places.setdefault(data.untyped_storage().data_ptr(), []).append(row)
        self._storages = {key: sorted(rows) for key, rows in places.items()}

    def pack(self, tensor: Tensor) -> Any:
        """Return the position of a view of a parameter; return other tensors detached.

        A graph that saves its own output with its history (softmax) would hold itself: one whose
        micro-batch gets no backward pass would never be freed.
        """
        rows = self._storages.get(tensor.untyped_storage().data_ptr())
        if rows is None:
            return tensor.detach()
        offset = int(tensor.storage_offset())
        position = bisect.bisect_right(rows, offset, key=lambda row: row[0]) - 1
        start, stop, index = rows[max(position, 0)]
        if not start <= offset < stop:
            return tensor.detach()
        return _SavedWeight(index, tuple(tensor.shape), tuple(tensor.stride()), offset - start)
