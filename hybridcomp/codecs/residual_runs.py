"""Read and write many views of low-bit residuals as a few contiguous runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from hybridcomp.codecs.quantized_residual import BLOCK, QuantizedResidual, Residual

#: most values of a run that is unpacked for encoding, 16 MB as fp32; ``runs`` names exceptions
LONGEST = 1 << 22
#: stands for no limit
ALL = 1 << 62


@dataclass
class ResidualRun:
    """Views of one residual, each beginning where the previous one ends or at the next block.

    Operations on the run give the same bits as on its ``parts``, one after the other.
    """

    parts: list[QuantizedResidual]

    @property
    def whole(self) -> QuantizedResidual:
        """Return the view from the first part to the last."""
        return self.parts[0].view(self.parts[0].start, self.parts[-1].stop)

    def goes_on(self, part: QuantizedResidual, longest: int) -> bool:
        """Return whether ``part`` continues the run.

        ``longest``: limit on the run's values with ``part``. A part that begins inside the run's
        last block continues it at any length.
        """
        first, end, start = self.parts[0], self.parts[-1].stop, part.start
        if not first.shares(part) or start not in (end, -(-end // BLOCK) * BLOCK):
            return False
        return bool(start % BLOCK) or part.stop - first.start <= longest

    def unpack(self, out: Tensor | None = None) -> list[Tensor]:
        """Return the values of each part: views of one new fp32 tensor, or of ``out``."""
        values, begin = self.whole.unpack(out), self.parts[0].start
        return [values[part.start - begin : part.stop - begin] for part in self.parts]

    def pack(self, values: Tensor) -> None:
        """Quantize ``values``, as long as the run, into the run.

        A part that begins inside the previous part's last block is written separately, after it.
        """
        begin, first = self.parts[0].start, self.parts[0]
        for part, behind in zip(self.parts, [*self.parts[1:], None], strict=True):
            if behind is None or behind.start % BLOCK:
                written = first.view(first.start, part.stop)
                written.pack(values[first.start - begin : part.stop - begin])
                first = behind or part

    def zero_(self) -> None:
        """Set the values to zero."""
        for one in [self.whole] if all(part.in_blocks for part in self.parts) else self.parts:
            one.zero_()


def runs(parts: Sequence[Residual], longest: int) -> Iterator[ResidualRun]:
    """Group the low-bit residuals among ``parts``, in order, into runs.

    A run has at most ``longest`` values, unless it is a single part or its parts share blocks.
    """
    run: ResidualRun | None = None
    for part in parts:
        if not isinstance(part, QuantizedResidual):
            continue
        if run is not None and run.goes_on(part, longest):
            run.parts.append(part)
            continue
        if run is not None:
            yield run
        run = ResidualRun([part])
    if run is not None:
        yield run


def joined(parts: Sequence[Residual]) -> QuantizedResidual | None:
    """Return ``parts`` as one view if each begins at the next block border after the previous one.

    Returns None otherwise, if parts are fp32, or if the first does not begin at a block border.
    """
    filled = [part for part in parts if part.numel()] or parts[:1]
    found = list(runs(filled, ALL))
    if len(found) != 1 or len(found[0].parts) < len(filled):
        return None
    return None if any(part.start % BLOCK for part in found[0].parts) else found[0].whole
