"""Sum gradients by low-rank factors: PowerSGD (Vogels et al. 2019, arXiv 1905.13727, alg. 1 and 2).

Each step runs one power iteration, which starts from the result of the previous step. With M_r the
matrix of rank r, and Q the right factor, orthonormal and the same on all ranks,

    P = orthonormal basis of sum_r M_r Q,    Q' = sum_r M_r^T P,    P Q'^T = P P^T sum_r M_r

approximates the sum. The residual of rank r is its error (1 - P P^T) M_r; the residuals of all
ranks add up to the exact sum minus the delivered sum. (The paper instead keeps M_r minus the
delivered mean. The part of this residual that differs between ranks is never sent and grows like a
random walk.)

Every rank computes with the same sums, so replicas stay equal if the ranks of a group use the same
library on the same kind of device with equally many threads.

torch's ``powerSGD_hook`` does not fit: it keeps its state by DDP's bucket index, it divides by the
group size, and its residuals cannot be moved with a parameter or rescaled with the loss scale.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridcomp.codecs.quantized_residual import squares
from hybridcomp.collectives.wire import transport
from hybridcomp.collectives.wire.encoding import check_residual, check_values, settle
from hybridcomp.collectives.wire.group import Reduction
from hybridcomp.collectives.wire.handle import Steps
from hybridcomp.job.autocast import off


@dataclass(frozen=True)
class Matrix:
    """A slice of a flat tensor that holds ``rows`` x ``columns`` values, row by row."""

    key: str  # name of the matrix, the same on all ranks
    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns

    def of(self, flat: Tensor) -> Tensor:
        """Return the matrix in ``flat``, a view."""
        return flat[self.start : self.stop].view(self.rows, self.columns)


#: orthonormal right factors by ``Matrix.key``, (columns, rank) fp32
WarmStarts = MutableMapping[str, Tensor]
#: called with three squared L2 norms, float64 (): of the new residual, of values + old residual,
#: and of the values
Measure = Callable[[Tensor, Tensor, Tensor], None]


@dataclass(frozen=True)
class Factoring:
    """Matrices in a flat tensor, and the right factors from which power iterations start.

    Attributes:
        matrices: slices of the tensor in order, without overlap; the same on all ranks.
        rank: rank of the factors, the same on all ranks.
        warm: right factors, the same on all ranks; updated.
        needed: ``[start, stop)`` slices that the caller reads; None: the whole tensor.
        measure: called with squared norms (``Measure``); None: this step takes no sample.
    """

    matrices: Sequence[Matrix]
    rank: int
    warm: WarmStarts
    needed: Sequence[tuple[int, int]] | None = None
    measure: Measure | None = None

    def is_needed(self, matrix: Matrix) -> bool:
        """Return whether the caller reads any part of ``matrix``."""
        if self.needed is None:
            return True
        return any(start < matrix.stop and matrix.start < stop for start, stop in self.needed)

    def between(self, numel: int) -> list[tuple[int, int]]:
        """Return the slices of a tensor of ``numel`` elements that belong to no matrix."""
        edges = [0, *(edge for m in self.matrices for edge in (m.start, m.stop)), numel]
        pairs = list(zip(edges[::2], edges[1::2], strict=True))
        assert all(start <= stop for start, stop in pairs), "matrices overlap"
        return [(start, stop) for start, stop in pairs if start < stop]


def low_rank_sum(values: Tensor, factoring: Factoring, how: Reduction) -> Steps[Tensor]:
    """Sum ``values`` over a group: matrices by low-rank factors, everything else exactly.

    1 add the values to the residual, which then holds the values to sum
    2 all-reduce the left factors, followed by the values outside matrices
    3 all-reduce the right factors; subtract this rank's part of the product from the residual
    4 multiply the factors of matrices that are needed; keep the right factors for the next step

    A NaN or Inf makes its whole matrix NaN on every rank.

    Args:
        values: 1-D contiguous fp32/bf16/fp16, not modified.
        how: group, meter and residual. The residual is fp32, as long as ``values``, and is updated;
            outside matrices it becomes 0.

    Returns the fp32 sum. Its values are undefined in a matrix of which the caller needs no part.
    """
    values, residual, meter, matrices = values.detach(), how.residual, how.meter, factoring.matrices
    assert isinstance(residual, Tensor), "low rank without fp32 error feedback"
    check_values("values", values)
    check_residual("residual", residual, values.numel())
    rest = factoring.between(values.numel())
    # 1
    with meter.coding(), off(residual):  # autocast may be on in a backward pass
        total = residual.add_(values)
        sent_sq = squares(total) if factoring.measure else None
        # 2
        lefts, first = _left_factors(total, factoring, rest)
    yield transport.all_reduce(first, how.group, meter)
    # 3
    with meter.coding(), off(residual):
        *lefts_flat, outside = _split(first, [left.numel() for left in lefts])
        summed = [f.view(left.shape) for f, left in zip(lefts_flat, lefts, strict=True)]
        bases = [_orthonormal(left) for left in summed]
        rights = [m.of(total).T @ basis for m, basis in zip(matrices, bases, strict=True)]
        second = torch.cat([first[:0], *(right.reshape(-1) for right in rights)])
        carried = (basis @ right.T for basis, right in zip(bases, rights, strict=True))
        _leave(residual, matrices, carried, rest)
        if factoring.measure and sent_sq is not None:
            factoring.measure(squares(residual), sent_sq, squares(values))
    if matrices:
        yield transport.all_reduce(second, how.group, meter)
    # 4
    with meter.coding(), off(residual):
        *flat, _ = _split(second, [right.numel() for right in rights])
        summed = [f.view(right.shape) for f, right in zip(flat, rights, strict=True)]
        result = torch.empty_like(residual)
        _put(result, rest, outside)
        for matrix, basis, right in zip(matrices, bases, summed, strict=True):
            if factoring.is_needed(matrix):
                torch.mm(basis, right.T, out=matrix.of(result))
            follow(factoring.warm, matrix.key, right)
    return result


def _left_factors(
    total: Tensor, factoring: Factoring, rest: Sequence[tuple[int, int]]
) -> tuple[list[Tensor], Tensor]:
    """Return the left factors, and the message: left factors, then the values outside matrices."""
    matrices, device = factoring.matrices, total.device
    starts = [_warm_start(factoring.warm, matrix, factoring.rank, device) for matrix in matrices]
    lefts = [matrix.of(total) @ start for matrix, start in zip(matrices, starts, strict=True)]
    parts = [left.view(-1) for left in lefts] + [total[start:stop] for start, stop in rest]
    return lefts, torch.cat(parts)


def _leave(
    residual: Tensor,
    matrices: Sequence[Matrix],
    carried: Iterable[Tensor],
    rest: Sequence[tuple[int, int]],
) -> None:
    """Subtract ``carried``, the factors' products, from ``residual``; zero it outside matrices."""
    for matrix, delivered in zip(matrices, carried, strict=True):
        settle(matrix.of(residual), delivered)
    for start, stop in rest:
        residual[start:stop] = 0


def _put(result: Tensor, rest: Sequence[tuple[int, int]], outside: Tensor) -> None:
    """Write ``outside``, the sums of the slices ``rest``, into ``result``."""
    position = 0
    for start, stop in rest:
        result[start:stop] = outside[position : position + stop - start]
        position += stop - start


def follow(warm: WarmStarts, key: str, right: Tensor) -> None:
    """Keep the right factor for the next step, unless it has a NaN or Inf."""
    basis = _orthonormal(right)
    # selected on the device, so that the host does not wait for it
    warm[key] = torch.where(basis.isfinite().all(), basis, warm[key])


def _warm_start(warm: WarmStarts, matrix: Matrix, rank: int, device: torch.device) -> Tensor:
    """Return the right factor to start from; the first is random, seeded by the matrix key only."""
    found = warm.get(matrix.key)
    if found is None or found.shape != (matrix.columns, rank):
        seed = int.from_bytes(hashlib.sha256(matrix.key.encode()).digest()[:7], "little")
        generator = torch.Generator().manual_seed(seed)
        normal = torch.randn(
            matrix.columns, rank, generator=generator, dtype=torch.float32, device="cpu"
        )
        found = _orthonormal(normal)
    warm[matrix.key] = found.to(device)
    return warm[matrix.key]


def _orthonormal(columns: Tensor) -> Tensor:
    """Return an orthonormal basis of ``columns`` by Householder QR, which allows dependent columns.

    The result is contiguous, since the bits of a matrix product depend on the memory layout of its
    inputs, which a checkpoint may not keep.
    """
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis.contiguous()


def _split(flat: Tensor, numels: Sequence[int]) -> list[Tensor]:
    """Cut ``flat`` into parts of ``numels`` elements and the remainder."""
    return list(torch.split(flat, [*numels, flat.numel() - sum(numels)]))
