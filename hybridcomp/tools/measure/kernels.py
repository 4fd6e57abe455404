"""Time kernels of a device: matrix products, elementwise work, Adam steps, transformer blocks.

All ranks compute at the same time, as in a training, so that ranks that share cores or memory slow
each other down here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from hybridcomp.codecs.words import DTYPES
from hybridcomp.tools.measure import options
from hybridcomp.tools.measure.block import BlockSize, TransformerBlock, kept_nbytes
from hybridcomp.tools.measure.clock import LEAST, CallClock, HostCallClock, Run, samples
from hybridcomp.tools.measure.team import MeasuredPart, Team
from hybridcomp.tools.plan.machines.estimates import summary
from hybridcomp.tools.plan.machines.rows import Kernel, Kind

#: a size is left out if two calls and LEAST timings may take this many times the allowance, and
#: more than SURE_S; blocks that the user names are always timed in the dtype that devices train in
PATIENCE, SURE_S = 3.0, 0.25


@dataclass(frozen=True)
class TimedSizes:
    """Sizes to time on one type of device."""

    products: tuple[int, ...]  # rows, columns and depth of matrix products
    blocks: tuple[BlockSize, ...]
    elements: tuple[int, ...]
    parameters: tuple[int, ...]


CPU = TimedSizes(
    (64, 128, 256, 512, 1024),
    tuple(
        BlockSize(batch, 128, width)
        for batch, width in ((2, 64), (8, 64), (8, 128), (8, 256), (8, 512))
    ),
    (1 << 12, 1 << 16, 1 << 20, 1 << 23),
    (1 << 14, 1 << 18, 1 << 21),
)
GPU = TimedSizes(
    (256, 1024, 2048, 4096, 8192),
    tuple(BlockSize(batch, 2048, width, 128) for batch, width in ((1, 1024), (1, 4096), (4, 4096))),
    (1 << 12, 1 << 20, 1 << 24, 1 << 27),
    (1 << 16, 1 << 22, 1 << 26),
)


#: values of Adam steps in the memory of a GPU's host
HOST_PARAMETERS = (1 << 18, 1 << 23)


@dataclass(frozen=True)
class _TimedKernel:
    """A row to measure: ``prepare`` makes tensors and returns the call to time."""

    kind: Kind
    dtype: str
    size: float
    prepare: Callable[[], Run]
    note: str = ""
    kept_nbytes: Callable[[], int] = int

    @property
    def family(self) -> tuple[str, str]:
        return self.kind, self.dtype


def trained_size(device: torch.device) -> BlockSize:
    """Return the small trainings' block, whose passes take milliseconds each."""
    return GPU.blocks[0] if device.type == "cuda" else CPU.blocks[3 * len(CPU.blocks) // 4]


def dtypes_of(device: torch.device) -> dict[str, torch.dtype]:
    """Return the dtypes that trainings use on ``device``."""
    return {
        name: DTYPES[name] for name in options.DTYPES if name != "fp16" or device.type == "cuda"
    }


def kernel_rows(
    team: Team, clock: CallClock, part: MeasuredPart, blocks: Sequence[BlockSize] = ()
) -> list[Kernel]:
    """Time this rank's kernels; a collective over the job, as all begin every case together.

    ``blocks``: replace the default ones.
    """
    cases = list(_cases(team.device, blocks))
    rows = []
    rates: dict[tuple[str, str], float] = {}  # seconds per unit of size, on the slowest rank
    trained = "bf16" if team.device.type == "cuda" else "fp32"
    for case, allowance in zip(cases, part.allowances(len(cases)), strict=True):
        expected = rates.get(case.family, 0.0) * case.size
        named = (
            blocks and case.kind in ("block_forward", "block_backward") and case.dtype == trained
        )
        if not named and expected * (2 + LEAST) > max(SURE_S, PATIENCE * allowance):
            continue
        own = HostCallClock() if case.kind == "host_adam" else clock
        seconds = samples(own, case.prepare(), allowance)
        rates[case.family] = team.most([median(seconds)])[0] / case.size
        rows.append(
            Kernel(
                team.rank, case.kind, case.dtype, case.size, summary(seconds), case.note,
                case.kept_nbytes(),
            )
        )  # fmt: skip
    return rows


def _cases(device: torch.device, blocks: Sequence[BlockSize]) -> Iterator[_TimedKernel]:
    """Yield every case, small ones of each kind first: their rates predict larger ones."""
    sizes = GPU if device.type == "cuda" else CPU
    for name, dtype in dtypes_of(device).items():
        for block in blocks or sizes.blocks:
            made = PreparedBlock(block, device, dtype)
            yield _TimedKernel(
                "block_forward", name, block.flops, made.forward, block.describe(), made.kept_nbytes
            )
            yield _TimedKernel(
                "block_backward", name, 2 * block.flops, made.backward, block.describe()
            )
        for side in sizes.products:
            yield _TimedKernel(
                "product", name, 2.0 * side**3, matrix_product(side, device, dtype), str(side)
            )
        for numel in sizes.elements:
            nbytes = 2.0 * numel * dtype.itemsize
            yield _TimedKernel("elementwise", name, nbytes, _scale(numel, device, dtype))
    for numel in sizes.parameters:
        yield _TimedKernel("adam", "fp32", float(numel), _adam(numel, device))
    for numel in HOST_PARAMETERS if device.type == "cuda" else ():
        yield _TimedKernel("host_adam", "fp32", float(numel), _adam(numel, torch.device("cpu")))


def matrix_product(side: int, device: torch.device, dtype: torch.dtype) -> Callable[[], Run]:
    """Return a function that prepares a product of square matrices and returns the call of it."""

    def prepare() -> Run:
        one, two = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(one)
        return lambda: torch.mm(one, two, out=out)

    return prepare


def _scale(numel: int, device: torch.device, dtype: torch.dtype) -> Callable[[], Run]:
    def prepare() -> Run:
        values = torch.randn(numel, device=device).to(dtype)
        out = torch.empty_like(values)
        return lambda: torch.mul(values, 0.5, out=out)

    return prepare


def _adam(numel: int, device: torch.device) -> Callable[[], Run]:
    def prepare() -> Run:
        parameter = torch.nn.Parameter(torch.randn(numel, device=device))
        parameter.grad = torch.randn(numel, device=device)
        return torch.optim.AdamW([parameter], lr=1e-4).step

    return prepare


class PreparedBlock:
    """Prepares the passes of a block over random values."""

    def __init__(self, size: BlockSize, device: torch.device, dtype: torch.dtype) -> None:
        self._size, self._device, self._dtype = size, device, dtype

    def forward(self) -> Run:
        block, hidden = self._made()
        return lambda: block(hidden)

    def backward(self) -> Run:
        block, hidden = self._made()
        out = block(hidden)
        gradient = torch.randn_like(out)
        wanted = [hidden, *block.parameters()]
        return lambda: torch.autograd.grad(out, wanted, gradient, retain_graph=True)

    def kept_nbytes(self) -> int:
        return kept_nbytes(*self._made())

    def _made(self) -> tuple[TransformerBlock, Tensor]:
        size = self._size
        block = TransformerBlock(size).to(self._device, self._dtype)
        hidden = torch.randn(size.batch, size.length, size.width, device=self._device)
        return block, hidden.to(self._dtype).requires_grad_()
