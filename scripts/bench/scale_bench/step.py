"""A step of an engine as its seams see it: one rank of a group of any size, and no engine.

Every step calls the functions that hybridcomp puts in the place of upstream's, with the tensors
that upstream would give them for the blocks of a transformer: buckets, slices with their owners,
shards. What upstream computes is left out, and so is the wire (``gpu_bench.messages``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import NAME, Channels
from hybridcomp.config import CompressionConfig

#: gradients of 4 bits with error feedback, the rest 8 bits; nothing is sampled, as in most steps
BLOCK: dict[str, Any] = {
    "dp": {"codec": "blockint", "bits": 4, "error_feedback": True},
    **{name: {"codec": "blockint", "bits": 8} for name in ("zero", "tp", "pp")},
    "min_bytes": 0,
    "when": "always",
    "ledger": {"sample_every": 0},
}
DTYPE = torch.bfloat16


class Shape(NamedTuple):
    """Give the width of a transformer's blocks and the tokens of a micro-batch that steps send."""

    width: int
    blocks: int
    tokens: int

    def parameters(self, block: int) -> list[tuple[str, tuple[int, ...]]]:
        """Return names and shapes of a block's parameters, in the order of the model."""
        h = self.width
        shapes = {
            "norm1.weight": (h,), "norm1.bias": (h,), "qkv.weight": (3 * h, h),
            "qkv.bias": (3 * h,), "out.weight": (h, h), "out.bias": (h,), "norm2.weight": (h,),
            "norm2.bias": (h,), "up.weight": (4 * h, h), "up.bias": (4 * h,),
            "down.weight": (h, 4 * h), "down.bias": (h,),
        }  # fmt: skip
        return [(f"{block}.{name}", shape) for name, shape in shapes.items()]


class Engine:
    """One rank of an engine: its parameters, its channels, and ``step``.

    Only inside of a group without a wire. ``device``: of all tensors, on "meta" without values.
    """

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape, self.device = shape, torch.device(device)
        self.ranks, self.me = dist.get_world_size(), dist.get_rank()
        self.posted = 0  # messages of the last step that upstream sends itself
        self.channels = Channels(CompressionConfig.parse(BLOCK))
        self.blocks = [
            [self._parameter(name, size) for name, size in shape.parameters(block)]
            for block in range(shape.blocks)
        ]
        self.prepare()

    def prepare(self) -> None:
        """Make what upstream keeps from step to step."""

    def step(self) -> None:
        """Send the messages of one optimizer step with one micro-batch."""
        raise NotImplementedError

    def empty(self, *size: int) -> Tensor:
        """Return a tensor of the messages' dtype, of ones where it has values."""
        return torch.ones(*size, dtype=DTYPE, device=self.device)

    def flat(self, block: Sequence[Any]) -> Tensor:
        """Return a 1-D tensor as long as the parameters of ``block``."""
        return self.empty(sum(p.numel() for p in block))

    def _parameter(self, name: str, size: tuple[int, ...]) -> Any:
        found = torch.nn.Parameter(self.empty(*size))
        setattr(found, NAME, name)
        return found


def native(*_: Any, **__: Any) -> Any:
    """Stand for upstream's own function, which no message of these blocks may reach."""
    raise AssertionError("a message stayed native")
