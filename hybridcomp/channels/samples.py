"""Samples: what one encoding of the head of a message would leave out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridcomp.codecs import Radix
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.chunks import stretches

#: elements of a message that the sampled error looks at
SAMPLE_NUMEL = 65536


def take(
    values: Tensor,
    codec: Codec,
    cuts: Sequence[int],
    relative_to: Tensor | None,
    residual: Tensor | None,
) -> tuple[float, float, float, int]:
    """``(squared error, squared values, squared residual, values beyond their bound)``.

    Args:
        values: the message; its first SAMPLE_NUMEL elements are encoded.
        codec: of the first quantization.
        cuts: where it may not reach across.
        relative_to: what the error is relative to, None for ``values``.
        residual: what error feedback holds for them.
    """
    head = values.detach().reshape(-1)[:SAMPLE_NUMEL]
    nbytes = codec.wire_nbytes(head.numel(), head.dtype)
    payload = torch.empty(nbytes, dtype=torch.uint8, device=head.device)
    decoded = torch.empty(head.numel(), dtype=torch.float32, device=head.device)
    exact, outside = head.float(), 0
    for low, high in stretches(0, head.numel(), cuts):
        used = codec.encode(head[low:high], payload)
        codec.decode(payload[:used], decoded[low:high])
        if isinstance(codec, Radix):
            outside += beyond(codec, exact[low:high], decoded[low:high])
    whole = exact if relative_to is None else relative_to.detach().reshape(-1)[:SAMPLE_NUMEL]
    held = 0.0 if residual is None else _square(residual[: head.numel()])
    return _square(decoded - exact), _square(whole), held, outside


def beyond(codec: Radix, values: Tensor, decoded: Tensor) -> int:
    """How many of the fp32 ``values`` are further from ``decoded`` than their segment allows."""
    error = (decoded.double() - values.double()).abs()
    if codec.mode == "abs":
        return int((error > codec.error_bound).sum())
    pad = -values.numel() % codec.segment
    rows = torch.nn.functional.pad(values.double().abs(), (0, pad)).view(-1, codec.segment)
    limits = rows.amax(1).repeat_interleave(codec.segment)[: values.numel()] * codec.error_bound
    return int((error > limits).sum())


def _square(values: Tensor) -> float:
    """Squared L2 norm."""
    return float(values.double().square().sum())
