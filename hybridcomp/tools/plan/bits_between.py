"""Count the bits a parameter that cross nodes in a step: natively, under ZeRO++, and with a block.

Beside them stand the settings of DeepSpeed that send less for memory: hpZ and ZeRO 1. All figures
are those among many nodes; n nodes send (n - 1) / n of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from hybridcomp.codecs.base import Codec
from hybridcomp.config import CompressionConfig
from hybridcomp.tools.plan.pays import bits

#: scale and values of DeepSpeed's quantizers at a width of 4,096: int8 in groups of at most 16,000
#: values (partition_parameters.py, CUDAQuantizer), int4 in as many groups as the longer side has
#: values (coalesced_collectives.py)
QWZ, QGZ = 8 + 32 / 8192, 4 + 32 / 4096


@dataclass(frozen=True)
class JobTraffic:
    """A job of data-parallel ranks, as far as its bits between nodes depend on it.

    Attributes:
        stage: of ZeRO.
        dtype: of parameters.
        summed: dtype of gradients between ranks.
        micro_batches: of a step.
        secondary: whether each node keeps a whole copy (hpZ), from which backward passes gather.
        reduced_whole: whether all ranks get all gradients, as at stage 0.
    """

    stage: int
    dtype: torch.dtype = torch.bfloat16
    summed: torch.dtype = torch.bfloat16
    micro_batches: int = 1
    secondary: bool = False
    reduced_whole: bool = False

    @property
    def reductions(self) -> int:
        """Sums of all gradients in a step."""
        return self.micro_batches if self.stage >= 2 else 1

    @property
    def gathers(self) -> int:
        """Gathers of all parameters between nodes in a step."""
        if self.stage < 3:
            return min(self.stage, 1)
        return self.micro_batches * (1 if self.secondary else 2)

    def native(self) -> float:
        """Bits a parameter of upstream's own messages, in NCCL's algorithms."""
        sums = 8.0 * self.summed.itemsize * (1 if self.stage == 3 else 2)  # whole buckets below 3
        return self.reductions * sums + self.gathers * 8.0 * self.dtype.itemsize

    def plus_plus(self) -> float:
        """Bits of ZeRO++ with its three parts, at stage 3."""
        return self.micro_batches * (QGZ + QWZ)

    def encoded(self, dp: Codec | None, zero: Codec | None) -> float:
        """Bits with these codecs; None: native."""
        whole = self.stage == 0 or self.reduced_whole
        if dp is None:
            sums = 8.0 * self.summed.itemsize * (1 if self.stage == 3 else 2)
        else:
            sums = bits(dp, self.summed) * (2 if whole else 1)
        moved = 8.0 * self.dtype.itemsize if zero is None else bits(zero, self.dtype)
        return self.reductions * sums + self.gathers * moved

    def lighter(self) -> Iterator[tuple[str, JobTraffic]]:
        """Yield settings of DeepSpeed that send less, with the memory that they take."""
        width = self.dtype.itemsize
        if self.stage == 3 and not self.secondary:
            yield (
                f"zero_hpz_partition_size N, the ranks of a node: {width} bytes a parameter in a "
                "node",
                replace(self, secondary=True),
            )
        if self.stage >= 2 and (self.stage == 3 or self.micro_batches > 1):
            held, whole = (2, "parameters and gradients") if self.stage == 3 else (1, "gradients")
            yield (
                f"ZeRO 1, which keeps {whole} whole: {held * width} bytes a parameter in a rank",
                replace(self, stage=1, secondary=False),
            )


def lines(config: CompressionConfig, job: JobTraffic) -> Iterator[str]:
    """Yield the bits of ``job`` with a block, and what sends less; nothing where it has low rank.

    How much a low rank sends depends on the matrices.
    """
    if {"dp", "zero"} & set(config.policy().low_rank):
        return
    codecs = config.codecs()
    dp, zero = codecs["dp", "forward"], codecs["zero", "forward"]
    if dp is None and zero is None:
        return
    told = job.encoded(dp, zero)
    peer = f"ZeRO++ {job.plus_plus():.1f}, " if job.stage == 3 else ""
    yield (
        f"between nodes a step sends {told:.1f} bits a parameter (natively {job.native():.1f}, "
        f"{peer}among many nodes)"
    )
    found = [(other.encoded(dp, zero), words) for words, other in job.lighter()]
    for fewer, words in sorted(found):
        if fewer < told:
            yield f"  {fewer:.1f} with {words}"
