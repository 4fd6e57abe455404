"""Write, read and recognize residuals in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hybridcomp.codecs.quantized_residual import QuantizedResidual, Residual, as_fp32, is_state
from hybridcomp.job import saved

#: ``sender``: error of encoding this rank's values (first hop).
#: ``owner``: error of encoding the sum that this rank owns (second hop).
Hop = Literal["sender", "owner"]
HOPS: tuple[Hop, ...] = ("sender", "owner")
#: key of residuals shared by a node's ranks in a saved state
COMMON = "common"
#: offset of a slice in its parameter, and its values
Held = tuple[int, Residual]


@dataclass(frozen=True)
class NodeStretch:
    """Residual of a parameter from ``offset`` on that ``count`` ranks of a node share.

    In two levels a rank encodes a slice of its node's sum, and only the message determines which
    slice. So after a change of ranks every rank of the node starts with all of the node's
    residuals; with each message it applies the residuals of its slice and drops those of the other
    ranks' slices.
    """

    offset: int
    values: Residual
    index: int  # this rank's index among the ``count`` ranks
    count: int

    @property
    def own(self) -> Held:
        """Return this rank's share; the shares of the ``count`` ranks cover each value once."""
        low, high = (self.values.numel() * i // self.count for i in (self.index, self.index + 1))
        return self.offset + low, self.values[low:high]


def held_in(
    state: Mapping[str, Mapping[str, Sequence[Any]]],
) -> Iterator[tuple[str, tuple[int, Tensor]]]:
    """Yield name and slice (offset, fp32 values) from one rank's saved state, of all hops.

    The slices of all ranks add up to the error that later messages must make up for.
    """
    for hop in HOPS:
        for name, stored in state[hop].items():
            yield from (
                (name, (offset, as_fp32(from_checkpoint(values)))) for offset, values in stored
            )
    for name, stored in state.get(COMMON, {}).items():
        for offset, values, index, count in stored:
            first, own = NodeStretch(offset, from_checkpoint(values), index, count).own
            yield name, (first, as_fp32(own))


def is_stretch(value: Any) -> bool:
    """Return whether ``value`` is an offset and the finite values that start there.

    Residuals shared by a node have two more numbers: this rank's part, and the number of parts.
    """
    if not isinstance(value, (tuple, list)) or len(value) not in (2, 4):
        return False
    offset, values, *part = value
    if not saved.is_count(offset):
        return False
    if part and not (all(map(saved.is_count, part)) and part[0] < part[1]):
        return False
    if not isinstance(values, Tensor):
        return is_state(values)
    is_flat = values.dtype == torch.float32 and values.dim() == 1
    return is_flat and bool(values.isfinite().all())


def are_residuals(value: Any) -> bool:
    """Return whether ``value`` has the form of ``Residuals.state_dict``, with finite values."""
    if not isinstance(value, dict) or set(value) - {COMMON} != set(HOPS):
        return False
    return all(
        isinstance(by_name, dict)
        and all(isinstance(name, str) for name in by_name)
        and all(isinstance(found, (list, tuple)) for found in by_name.values())
        and all(is_stretch(one) for found in by_name.values() for one in found)
        for by_name in value.values()
    )


def for_checkpoint(values: Residual) -> Any:
    """Return a copy of ``values`` as a checkpoint holds them."""
    return values.cpu().clone() if isinstance(values, Tensor) else values.state()


def from_checkpoint(values: Any) -> Residual:
    """Return the residual in a checkpoint; fp32 residuals are the stored tensor itself."""
    return values if isinstance(values, Tensor) else QuantizedResidual.from_state(values)


def copy_of(values: Any) -> Residual:
    return values.clone() if isinstance(values, Tensor) else QuantizedResidual.from_state(values)
