"""Keep this rank's even share of each whole tensor that an export yields on every rank."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from hybridcomp.errors import ConfigError, PublishError
from hybridcomp.escaping import one_line
from hybridcomp.publishing import DTYPES, EngineWeights, Held, WeightRange


class Shares:
    """This rank's share of each exported tensor, on the host, in the published dtype.

    Later exports must have the names, shapes and order of the first.
    """

    def __init__(self, dtype: str, rank: int, count: int) -> None:
        """Keep share ``rank`` of ``count``. Raises ConfigError if ``dtype`` cannot be published."""
        if dtype not in DTYPES:
            raise ConfigError("publish.dtype", dtype, f"expected one of {', '.join(DTYPES)}")
        self._dtype, self._rank, self._count = DTYPES[dtype], rank, count
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._values: dict[str, Tensor] = {}

    def take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy this rank's share of every tensor; all ranks iterate over the same export.

        Raises PublishError if a name occurs twice, or names or shapes differ from the first export.
        It raises only after the export's last gather, so that no other rank waits in one.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        problem = ""
        for name, tensor in weights:
            if name in shapes:
                problem = problem or f"{one_line(name)}: it is in the export twice"
            shapes[name] = tuple(tensor.shape)
            low, high = self._borders(tensor.numel())
            share = tensor.detach().reshape(-1)[low:high]
            self._values[name] = share.to("cpu", self._dtype, copy=True)
        if self._shapes and shapes != self._shapes:
            odd = sorted(dict(shapes.items() ^ self._shapes.items()))[0]
            problem = problem or (
                f"{one_line(odd)}: expected the names and shapes of the first export, found a "
                f"parameter more, less or of another shape {shapes.get(odd, 'missing')}"
            )
        if problem:
            raise PublishError(f"{problem}; publish one model to one folder")
        self._shapes = shapes

    def weights(self) -> EngineWeights:
        """Return this rank's shares in the form from which a ``Publisher`` reads them."""
        held = []
        for name, shape in self._shapes.items():
            low, high = self._borders(torch.Size(shape).numel())
            read = functools.partial(self._values.__getitem__, name)
            held.append(Held(WeightRange(name, low, high - low), read))
        dtypes = dict.fromkeys(self._shapes, self._dtype)
        return EngineWeights(self._shapes, dtypes, held, tuple(range(self._count)))

    def drop_values(self) -> None:
        """Free the copied shares; the publisher has its own copy."""
        self._values.clear()

    def _borders(self, numel: int) -> tuple[int, int]:
        return numel * self._rank // self._count, numel * (self._rank + 1) // self._count
