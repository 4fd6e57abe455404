"""Low-rank sums of gradients: PowerSGD (Vogels et al. 2019, arXiv 1905.13727, algorithms 1 and 2).

One power iteration a step, begun where the last one ended. With M_r the matrix of rank r and Q its
right factor, orthonormal and the same on all ranks,

    P = orthonormal basis of sum_r M_r Q,    Q' = sum_r M_r^T P,    P Q'^T = P P^T sum_r M_r

stands for the sum. What it leaves out, (1 - P P^T) M_r on rank r, is that rank's residual: those of
all ranks add up to the sum minus what was delivered. (The paper keeps M_r minus the mean instead,
whose part that differs between ranks never leaves and grows like a random walk.)

Every rank computes with the same sums, so replicas stay equal where the ranks of a group use the
same library on the same kind of device with as many threads.

torch's ``powerSGD_hook`` is no base for this: its state hangs on bucket indices of DDP, it divides
by the size of the group, and its residuals can neither follow a parameter nor a loss scale.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_rank, get_world_size

from hybridcomp.collectives import native_nbytes
from hybridcomp.collectives.wire import transport
from hybridcomp.collectives.wire.encoding import check_residual, check_values, settle
from hybridcomp.collectives.wire.handle import Steps
from hybridcomp.collectives.wire.meter import Meter


@dataclass(frozen=True)
class Matrix:
    """A stretch of a flat tensor that is ``rows`` x ``columns`` values, row by row."""

    key: str  # names it in the job, on all ranks alike
    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns

    def of(self, flat: Tensor) -> Tensor:
        """The matrix in ``flat``, a view."""
        return flat[self.start : self.stop].view(self.rows, self.columns)


#: orthonormal right factors by ``Matrix.key``, (columns, rank) fp32
WarmStarts = MutableMapping[str, Tensor]
#: is told squared L2 norms: what this rank left out, what it had to send, the values in that
Measure = Callable[[float, float, float], None]


def low_rank_sum(
    values: Tensor,
    matrices: Sequence[Matrix],
    rank: int,
    group: ProcessGroup | None,
    *,
    meter: Meter,
    residual: Tensor,
    warm: WarmStarts,
    needed: Sequence[tuple[int, int]] | None = None,
    measure: Measure | None = None,
) -> Steps[Tensor]:
    """Sum ``values`` over ``group``: matrices to ``rank``, everything else exactly.

    1 what is to be sent is the values and the residual
    2 left factors, with the values outside of matrices behind them: one all-reduce
    3 right factors: one all-reduce; the residual loses what they carry
    4 the products, where they are needed; the next step begins with these right factors

    A NaN or Inf makes its whole matrix NaN on every rank.

    Args:
        values: 1-D contiguous fp32/bf16/fp16, not modified.
        matrices: stretches of ``values`` in order, without overlap; the same on all ranks, as rank.
        residual: fp32, as long as ``values``: updated, and 0 outside of matrices.
        warm: right factors, the same on all ranks; updated.
        needed: ``[start, stop)`` stretches that the caller reads; None: all of it.

    Returns the fp32 sum, undefined in matrices that are not needed at all.
    """
    values = values.detach()
    check_values("values", values)
    check_residual("residual", residual, values.numel())
    me, world_size, device = get_rank(group), get_world_size(group), values.device
    rest = _between(matrices, values.numel())
    # 1
    with meter.coding():
        total = residual.add_(values)
        sent_sq = _squared(total) if measure else 0.0
        # 2
        starts = [_warm_start(warm, matrix, rank, device) for matrix in matrices]
        lefts = [m.of(total) @ start for m, start in zip(matrices, starts, strict=True)]
        first = torch.cat([*(left.view(-1) for left in lefts), *(total[a:b] for a, b in rest)])
    nbytes = native_nbytes.all_reduce_nbytes(first.numel(), first.dtype, world_size)
    meter.sent_ring(nbytes, me, world_size)
    yield from transport.all_reduce(first, group)
    # 3
    with meter.coding():
        *lefts_flat, outside = _split(first, [left.numel() for left in lefts])
        bases = [
            _orthonormal(flat.view(left.shape))
            for flat, left in zip(lefts_flat, lefts, strict=True)
        ]
        rights = [m.of(total).T @ basis for m, basis in zip(matrices, bases, strict=True)]
        second = torch.cat([first[:0], *(right.reshape(-1) for right in rights)])
        for matrix, basis, right in zip(matrices, bases, rights, strict=True):
            settle(matrix.of(residual), basis @ right.T)
        for start, stop in rest:
            residual[start:stop] = 0
        if measure:
            measure(_squared(residual), sent_sq, _squared(values))
    if matrices:
        nbytes = native_nbytes.all_reduce_nbytes(second.numel(), second.dtype, world_size)
        meter.sent_ring(nbytes, me, world_size)
        yield from transport.all_reduce(second, group)
    # 4
    with meter.coding():
        result = torch.empty_like(residual)
        position = 0
        for start, stop in rest:
            result[start:stop] = outside[position : position + stop - start]
            position += stop - start
        *rights_flat, _ = _split(second, [right.numel() for right in rights])
        for matrix, basis, right, flat in zip(matrices, bases, rights, rights_flat, strict=True):
            summed = flat.view(right.shape)
            if needed is None or any(a < matrix.stop and matrix.start < b for a, b in needed):
                torch.mm(basis, summed.T, out=matrix.of(result))
            follow(warm, matrix.key, summed)
    return result


def follow(warm: WarmStarts, key: str, right: Tensor) -> None:
    """Begin the next step with this right factor; one with a NaN or Inf is forgotten."""
    basis = _orthonormal(right)
    warm[key] = torch.where(basis.isfinite().all(), basis, warm[key])  # no look at it on the host


def _warm_start(warm: WarmStarts, matrix: Matrix, rank: int, device: torch.device) -> Tensor:
    """The right factor to begin with; the first one is random, and depends on the key alone."""
    found = warm.get(matrix.key)
    if found is None or found.shape != (matrix.columns, rank):
        seed = int.from_bytes(hashlib.sha256(matrix.key.encode()).digest()[:7], "little")
        generator = torch.Generator().manual_seed(seed)
        found = _orthonormal(torch.randn(matrix.columns, rank, generator=generator))
    warm[matrix.key] = found.to(device)
    return warm[matrix.key]


def _orthonormal(columns: Tensor) -> Tensor:
    """A basis of the space of the columns; Householder's, which stands dependent columns.

    Contiguous: products depend on the layout to the bit, and a checkpoint may not keep another.
    """
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis.contiguous()


def _between(matrices: Sequence[Matrix], numel: int) -> list[tuple[int, int]]:
    """The stretches that are in no matrix."""
    edges = [0, *(edge for m in matrices for edge in (m.start, m.stop)), numel]
    pairs = list(zip(edges[::2], edges[1::2], strict=True))
    assert all(start <= stop for start, stop in pairs), "matrices overlap"
    return [(start, stop) for start, stop in pairs if start < stop]


def _squared(values: Tensor) -> float:
    return float(values.double().square().sum())


def _split(flat: Tensor, numels: Sequence[int]) -> list[Tensor]:
    """``flat`` cut into parts of these lengths, and what is left."""
    return list(torch.split(flat, [*numels, flat.numel() - sum(numels)]))
