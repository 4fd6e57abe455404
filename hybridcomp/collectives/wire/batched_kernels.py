"""Encode, decode and add all payloads of a message in few launches, on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from hybridcomp.codecs.base import MultiTensorKernel
from hybridcomp.codecs.quantized_residual import QuantizedResidual
from hybridcomp.codecs.residual_runs import LONGEST, runs
from hybridcomp.codecs.varying_pieces import PieceKernel
from hybridcomp.collectives.wire.encoding import POOL, EncodeRequest

#: alignment, in fp32 values, of each tensor in a common decode buffer: one vector load
ALIGNED = 4


def encode_at_once(
    kernel: PieceKernel,
    jobs: Sequence[EncodeRequest],
    slots: Sequence[Tensor],
    dtype: torch.dtype,
    words: Tensor,
) -> bool:
    """Encode all ``jobs`` like ``encode_job``, in few launches; write sizes to ``words``, int64.

    Residuals of fewer than 32 bits are unpacked in runs of up to LONGEST values; a whole run is
    read before any of it is written, as on a CPU. Returns whether it encoded: False, with nothing
    changed, if only some jobs have a residual or if residuals are of two kinds.
    """
    kept = [job.residual for job in jobs if job.residual is not None]
    wide = [one for one in kept if isinstance(one, Tensor)]
    kinds = {job.values.dtype for job in jobs if job.values is not job.residual}
    if kept and (len(kept) < len(jobs) or len(wide) not in (0, len(jobs)) or len(kinds) > 1):
        return False
    if len(wide) == len(kept):
        _encode(kernel, jobs, wide, slots, dtype, words)
        return True
    done = 0
    for run in runs(kept, LONGEST):
        here = slice(done, done + len(run.parts))
        buffer, values = POOL.take_fp32(run.whole.numel(), slots[0].device)
        sums = run.unpack(values)
        _encode(kernel, jobs[here], sums, slots[here], dtype, words[here])
        run.pack(values)
        POOL.give(buffer)
        done = here.stop
    return True


def encode_jobs(
    each: MultiTensorKernel,
    jobs: Sequence[EncodeRequest],
    slots: Sequence[Tensor],
    dtype: torch.dtype,
) -> bool:
    """Encode all ``jobs`` as ``dtype`` in one launch if possible; return whether it was possible.

    For codecs of fixed size. Not possible if a job has ``decoded``, or if its ``residual`` already
    holds the sum.
    """
    plain = [job.residual is None for job in jobs]
    if any(job.decoded is not None or job.values is job.residual for job in jobs):
        return False
    if all(plain):
        each.encode([job.values.to(dtype) for job in jobs], slots)
        return True
    residuals = [job.residual for job in jobs if job.residual is not None]
    few = [one for one in residuals if isinstance(one, QuantizedResidual)]
    if len(residuals) < len(jobs) or dtype != torch.float32 or not all(r.in_blocks for r in few):
        return False
    each.encode([job.values for job in jobs], slots, residuals)
    return True


def _encode(
    kernel: PieceKernel,
    jobs: Sequence[EncodeRequest],
    residuals: Sequence[Tensor],
    slots: Sequence[Tensor],
    dtype: torch.dtype,
    words: Tensor,
) -> None:
    """Encode all ``jobs``; ``residuals``: the residual of every job in fp32, or empty."""
    if not residuals:
        kernel.encode([job.values.to(dtype) for job in jobs], slots, words)
    else:
        pairs = zip(residuals, (job.values for job in jobs), strict=True)
        added = [(residual, values) for residual, values in pairs if values is not residual]
        kernel.accumulate([one for one, _ in added], [values for _, values in added])
        kernel.encode([one.to(dtype) for one in residuals], slots, words)
    _settle(kernel, jobs, residuals, slots, dtype)


def _settle(
    kernel: PieceKernel,
    jobs: Sequence[EncodeRequest],
    residuals: Sequence[Tensor],
    slots: Sequence[Tensor],
    dtype: torch.dtype,
) -> None:
    """Decode the payloads of jobs with ``decoded`` or a residual; subtract them from residuals."""
    asked = [index for index, job in enumerate(jobs) if residuals or job.decoded is not None]
    if not asked:
        return
    lacking = [jobs[index].values.numel() for index in asked if jobs[index].decoded is None]
    rooms = [-(-numel // ALIGNED) * ALIGNED for numel in lacking]
    buffer, wide = POOL.take_fp32(sum(rooms), slots[0].device)
    starts = zip(accumulate([0, *rooms[:-1]]), lacking, strict=False)
    delivered: list[Tensor] = []
    for index in asked:
        decoded = jobs[index].decoded
        if decoded is None:
            start, numel = next(starts)
            decoded = wide[start : start + numel]
        delivered.append(decoded)
    kernel.decode_fp32([slots[index] for index in asked], delivered, dtype)
    if residuals:
        kernel.settle(residuals, delivered)
    POOL.give(buffer)


def add_at_once(
    kernel: PieceKernel,
    rows: Sequence[Sequence[Tensor | None]],
    me: int,
    out: Sequence[Tensor],
    own: Sequence[Tensor | None],
    fresh: Sequence[bool],
    dtype: torch.dtype,
) -> None:
    """Add all ranks' payloads of variable size to the sums in ``out``, in rank order.

    1 initialize empty sums, 2 add the payloads of lower ranks, 3 add this rank's exact values or
    payloads, 4 add the payloads of higher ranks.

    Args:
        rows: by rank, the payload for each sum; None for sums to which rank ``me`` adds its ``own``
            values.
        own: this rank's values for each sum; None: ``out`` already holds them.
        fresh: by sum, whether ``out`` holds nothing yet.
        dtype: the encoded dtype.
    """
    # 1
    firsts = zip(out, rows[0], fresh, strict=True)
    begun = [(one, first is None) for one, first, new in firsts if new]
    if begun:
        kernel.begin([one for one, _ in begun], [exact for _, exact in begun], dtype)
    # 2
    _add_columns(kernel, rows[:me], out, dtype)
    # 3
    _add_columns(kernel, rows[me : me + 1], out, dtype)
    exact = [
        (one, values)
        for one, values, payload in zip(out, own, rows[me], strict=True)
        if payload is None and values is not None
    ]
    for kind in {values.dtype for _, values in exact}:
        chosen = [pair for pair in exact if pair[1].dtype == kind]
        kernel.accumulate([one for one, _ in chosen], [values for _, values in chosen])
    # 4
    _add_columns(kernel, rows[me + 1 :], out, dtype)


def _add_columns(
    kernel: PieceKernel,
    rows: Sequence[Sequence[Tensor | None]],
    out: Sequence[Tensor],
    dtype: torch.dtype,
) -> None:
    """Add each rank's row of payloads to the sums."""
    columns = [[row[part] for row in rows] for part in range(len(out))]
    full = [[payload for payload in column if payload is not None] for column in columns]
    chosen = [(column, one) for column, one in zip(full, out, strict=True) if column]
    kernel.add([column for column, _ in chosen], [one for _, one in chosen], dtype)
