"""Measure the error of one encoding of a message's head, for the ledger and the guard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from hybridcomp.channels.engine_state import EngineState
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.quantized_residual import Residual, squares
from hybridcomp.collectives.wire.chunking import stretches
from hybridcomp.dimensions import Dimension, Direction

#: number of a message's first elements that are sampled
SAMPLE_NUMEL = 65536


class Samples:
    """Sampler of the encoding errors of one dimension of one engine."""

    def __init__(self, dimension: Dimension, state: EngineState) -> None:
        self._dimension = dimension
        self._state = state

    def record(self, direction: Direction, sums: Tensor) -> None:
        """Record a sample, the result of ``encode_once``, at the end of the step."""
        self._state.late_samples.add(sums, partial(self._write, direction))

    def factors(
        self, direction: Direction, left_sq: Tensor, sent_sq: Tensor, value_sq: Tensor
    ) -> None:
        """Record a sample of a low-rank sum.

        Arguments are squared L2 norms, float64 (): this rank's residual after the sum, the sum's
        input (gradients plus residual), and the gradients alone.
        """
        sums = torch.stack([left_sq, sent_sq, value_sq])
        self._state.late_samples.add(sums, partial(self._write_factors, direction))

    def _write_factors(
        self, direction: Direction, left_sq: float, sent_sq: float, value_sq: float
    ) -> None:
        # ratio of residual to gradients
        held = left_sq * sent_sq / value_sq if value_sq else 0.0
        self._write(direction, left_sq, sent_sq, held)

    def _write(
        self, direction: Direction, error_sq: float, value_sq: float, held: float,
        outside: float = 0,
    ) -> None:  # fmt: skip
        """Record in ledger and guard the squared norms of error, values and residual."""
        if not math.isfinite(value_sq):
            return  # the codec turned a finite value into a non-finite one
        error_sq = error_sq if math.isfinite(error_sq) else math.inf  # finite became not finite
        key = (self._dimension, direction)
        self._state.ledger.record_error(key, error_sq, value_sq, int(outside))
        self._state.guard.sample(key, error_sq, value_sq, held)


def encode_once(
    values: Tensor,
    codec: Codec,
    cuts: Sequence[int],
    relative_to: Tensor | None,
    residual: Residual | None,
) -> Tensor:
    """Encode and decode the head of ``values``; return squared L2 norms on its device.

    Returns float64 (4,): squared norms of error, values and residual, and the number of values
    beyond the codec's bound, if it has one. Waits for no device.

    Args:
        values: the message; its first SAMPLE_NUMEL elements are encoded.
        codec: codec of the first quantization.
        cuts: borders that the codec must not cross.
        relative_to: the tensor whose norm the error is divided by, None for ``values``.
        residual: residual of error feedback for ``values``.
    """
    head = values.detach().reshape(-1)[:SAMPLE_NUMEL]
    nbytes = codec.wire_nbytes(head.numel(), head.dtype)
    payload = torch.empty(nbytes, dtype=torch.uint8, device=head.device)
    decoded = torch.empty(head.numel(), dtype=torch.float32, device=head.device)
    exact = head.float()
    outside: Tensor | int = 0
    for low, high in stretches(0, head.numel(), cuts):
        used = codec.encode(head[low:high], payload)
        codec.decode(payload[:used], decoded[low:high])
        outside = outside + codec.beyond(exact[low:high], decoded[low:high])
    whole = exact if relative_to is None else relative_to.detach().reshape(-1)[:SAMPLE_NUMEL]
    held = exact.new_zeros((), dtype=torch.float64)
    if residual is not None:
        held = squares(residual[: head.numel()])
    beyond = torch.zeros_like(held).add_(outside)
    return torch.stack([squares(decoded - exact), squares(whole), held, beyond])
