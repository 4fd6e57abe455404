"""Steps of collectives that send no message, or a single one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor
from torch.distributed import Work

from hybridcomp.codecs.quantized_residual import QuantizedResidual, Residual, as_fp32
from hybridcomp.collectives.wire.encoding import add_values, settle
from hybridcomp.collectives.wire.handle import Meter, Pending, Steps

T = TypeVar("T")


def given(result: T) -> Steps[T]:
    """Return the steps of a collective that already has its ``result`` and sends nothing."""
    yield from ()
    return result


def transfer(post: Callable[[], Work], meter: Meter) -> None:
    """Run a collective that is a single message: ``post`` it, wait for it."""

    def steps() -> Steps[None]:
        yield post()

    Pending(steps(), meter, async_op=False)


def add_alone(residual: Residual, values: Tensor) -> None:
    """Add ``residual`` to ``values`` in place: the sum over a group of one rank.

    The rounding error of the dtype of ``values`` stays in the residual.
    """
    sums = as_fp32(residual)
    add_values(sums, values)
    values.copy_(sums)
    settle(sums, values)
    if isinstance(residual, QuantizedResidual):
        residual.pack(sums)
