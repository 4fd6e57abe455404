"""Blocks of megatron-core's parameters in checkpoint coordinates, and how to split them further."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError

KEY = "publish.names"


@dataclass(frozen=True)
class WeightPart:
    """A block of a parameter: name, shape of the whole, offset, own shape, and values."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: tuple[int, ...]
    values: Tensor

    def rows(self, name: str, low: int, high: int, at: int, rows: int) -> WeightPart:
        """Return rows ``[low, high)`` as a block of the tensor ``name``, from its row ``at`` on.

        ``rows``: number of rows of that tensor.
        """
        return WeightPart(
            name, (rows, *self.shape[1:]), (at, *self.offset[1:]),
            (high - low, *self.local[1:]), self.values[low:high],
        )  # fmt: skip

    def transposed(self) -> WeightPart:
        """Return this block as a block of the transposed matrix; a vector stays as it is."""
        if len(self.shape) == 1:
            return self
        return WeightPart(
            self.name, self.shape[::-1], self.offset[::-1], self.local[::-1], self.values.t()
        )

    def gate_and_up(self, names: tuple[str, str]) -> Iterator[WeightPart]:
        """Yield this block's rows of the gate, then those of the up projection, under ``names``.

        The whole tensor has all rows of the gate, then those of the up projection.
        """
        half, low = self.shape[0] // 2, self.offset[0]
        for which, name in enumerate(names):
            first = max(low, which * half)
            last = min(low + self.local[0], (which + 1) * half)
            if first < last:
                yield self.rows(name, first - low, last - low, first - which * half, half)

    def expert(self) -> tuple[int, WeightPart]:
        """Return the number of this block's only expert, and that expert's block."""
        if self.local[0] != 1:
            raise self.refused("expected one expert in each part")
        values = self.values.squeeze(0) if self.values.dim() == len(self.local) else self.values
        part = replace(
            self, shape=self.shape[1:], offset=self.offset[1:], local=self.local[1:], values=values
        )
        return self.offset[0], part

    def refused(self, why: str) -> ConfigError:
        """Return the error of a part without a translation."""
        todo = f'{why}; leave "names" out to publish under those of Megatron\'s checkpoints'
        return ConfigError(KEY, Shown(f"{self.name} {self.shape}"), todo)
