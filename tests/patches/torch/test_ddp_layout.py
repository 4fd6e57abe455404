"""Number of operations that convert a DDP bucket to a table, and back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybridcomp.patches.torch.ddp.layout import BucketLayout


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations other than views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        returns = func._schema.returns
        views = [r.alias_info is not None and not r.alias_info.is_write for r in returns]
        name = str(func).split(".")[1]
        if (not views or not all(views)) and name != "_unsafe_view":
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def layout_of(numels: list[int], ranks: int) -> tuple[BucketLayout, Tensor, Tensor]:
    layout = BucketLayout([f"p{place}" for place in range(len(numels))], numels, ranks)
    gradients = torch.arange(1, sum(numels) + 1).to(torch.bfloat16)
    return layout, gradients, torch.full((layout.numel,), torch.nan, dtype=torch.bfloat16)


def test_a_bucket_takes_few_operations() -> None:
    """The number is constant in the number of parameters, since the backward pass waits for it."""
    counts = []
    for numels in ([64, 128], [64, 128] * 10, [64, 128] * 10 + [5]):
        layout, gradients, flat = layout_of(numels, 2)
        with Operations() as packed:
            layout.pack(gradients, 0.5, flat)
        with Operations() as unpacked:
            layout.unpack(flat, gradients)
        counts.append((len(packed.names), len(unpacked.names)))
    assert counts[0] == counts[1] == (2, 1)
    assert counts[2] == (2 + 2, 1 + 2), "one that its chunks do not fill takes two each way"
