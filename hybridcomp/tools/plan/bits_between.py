"""Count the bits per parameter that cross nodes in a step: natively, under ZeRO++, with a block.

``JobTraffic.lighter`` yields settings that send less and take more memory: secondary copies or
ZeRO 1.
All figures are for many nodes; n nodes send (n - 1) / n of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from hybridcomp.channels.accounting.rank_messages import EXACT_BITS
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.words import DTYPES
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import ConfigError
from hybridcomp.tools.plan.layout import Copy, Layout
from hybridcomp.tools.plan.pays import STEP_BITS, bits, copy_of
from hybridcomp.tools.plan.plan import Plan

#: bits per value of DeepSpeed's quantizers, scales included, at a width of 4,096: int8 in groups of
#: at most 16,000 values (partition_parameters.py, CUDAQuantizer), int4 in as many groups as the
#: longer side of the matrix has values (coalesced_collectives.py)
QWZ, QGZ = 8 + 32 / 8192, 4 + 32 / 4096
#: bytes per parameter of Adam's fp32 moments, and of the fp32 master of 16-bit weights
MOMENTS, MASTER = 8, 4
#: bytes per parameter of a node's secondary copy
COPY_NBYTES: dict[str, float] = {"native": 2.0, "exact": 2.0, "bits8": 33 / 32}


@dataclass(frozen=True)
class JobTraffic:
    """The settings of a data-parallel job that decide how many bits it sends between nodes.

    Attributes:
        stage: of ZeRO.
        dtype: of parameters.
        summed: dtype in which ranks reduce gradients.
        micro_batches: of a step.
        copy: how each node keeps a secondary copy of the parameters, which serves all gathers of a
            step but the first (hpZ), or all gathers; "none": every gather crosses nodes.
        reduced_whole: whether every rank gets all reduced gradients, as at stage 0.
        in_node: whether gradients of micro-batches are summed inside nodes, and cross nodes once a
            step.
        shards_in_node: whether each node has all shards, as under HSDP, so that no gather crosses
            nodes.
        frozen: fraction of the parameters that do not train, as the base model of adapters: they
            have no gradients, and after the first step the nodes' copies hold them.
        frozen_kept: whether each rank keeps frozen parameters (``zero.frozen``), so that no step
            gathers them.
        passes: number of passes of a micro-batch for which stage 3 gathers parameters between
            nodes.
    """

    stage: int
    dtype: torch.dtype = torch.bfloat16
    summed: torch.dtype = torch.bfloat16
    micro_batches: int = 1
    copy: Copy | Literal["none"] = "none"
    reduced_whole: bool = False
    in_node: bool = False
    shards_in_node: bool = False
    frozen: float = 0.0
    frozen_kept: bool = False
    passes: int = 2

    @property
    def reductions(self) -> int:
        """Return how often a step sums all gradients between nodes."""
        return self.micro_batches if self.stage >= 2 and not self.in_node else 1

    @property
    def gathers(self) -> int:
        """Return how often a step gathers all parameters between nodes."""
        if self.shards_in_node:
            return 0
        if self.stage < 3:
            return min(self.stage, 1)
        return self.passes * self.micro_batches if self.copy == "none" else 1

    @property
    def frozen_gathers(self) -> int:
        """Count the gathers of frozen parameters between nodes in a step after the first."""
        return self.gathers if self.stage == 3 and self.copy == "none" else 0

    def native(self) -> float:
        """Return the bits per parameter of upstream's own messages, in NCCL's algorithms."""
        return self._total(self._whole_sums, 8.0 * self.dtype.itemsize)

    def _total(self, sums: float, moved: float) -> float:
        """Return the bits of a step, with ``sums`` bits per reduction, ``moved`` per gather."""
        trained = (1 - self.frozen) * (self.reductions * sums + self.gathers * moved)
        held = 0 if self.frozen_kept else self.frozen_gathers
        return trained + self.frozen * held * moved

    @property
    def _whole_sums(self) -> float:
        """Return the bits of native reductions: whole buckets below stage 3, or HSDP's shards."""
        scattered = self.stage == 3 and not self.shards_in_node
        return 8.0 * self.summed.itemsize * (1 if scattered else 2)

    def plus_plus(self) -> float:
        """Return the bits of ZeRO++ with its three parts, at stage 3."""
        return (1 - self.frozen) * (self.micro_batches * QGZ + QWZ)

    def encoded(self, dp: Codec | None, zero: Codec | None) -> float:
        """Return the bits with these codecs; None: native."""
        whole = self.stage == 0 or self.reduced_whole or self.shards_in_node
        sums = self._whole_sums if dp is None else bits(dp, self.summed) * (2 if whole else 1)
        moved = 8.0 * self.dtype.itemsize if zero is None else bits(zero, self.dtype)
        moved = STEP_BITS.get(self.copy, moved)
        return self._total(sums, moved)

    def over(self, layout: Layout) -> JobTraffic:
        """Return this job with the copies and sums of ``layout``."""
        kept = layout.frozen != "gathered"
        job = replace(
            self, in_node=layout.accumulate == "node", frozen_kept=kept,
            shards_in_node=layout.shards > 1, passes=1 if layout.stays else self.passes,
        )  # fmt: skip
        return replace(job, copy=layout.copy) if layout.hpz > 1 else job

    def lighter(self, encodes: bool = True) -> Iterator[tuple[str, JobTraffic]]:
        """Yield settings that send less, with the memory that they take.

        ``encodes``: whether gradients have a codec; sums inside nodes need one.
        """
        width = self.dtype.itemsize
        base, once = self, ""
        if encodes and self.stage >= 2 and self.micro_batches > 1 and not self.in_node:
            base, once = replace(self, in_node=True), f"{_ONCE} and "
            yield f"{_ONCE}: 4 bytes a parameter in a node", base
        for kind, words in _COPIES.items():
            steps = self.dtype.itemsize == 2 or kind == "native"
            if self.stage == 3 and self.copy == "none" and steps:
                held = COPY_NBYTES[kind] * width / 2 + 4 * bool(once)
                told = f"{once}{words}: {held:.3g} bytes a parameter in a node"
                yield told, replace(base, copy=kind)
        if self.frozen and self.frozen_gathers and not self.frozen_kept:
            held = self.frozen * EXACT_BITS[width == 2] / 8
            told = f'"zero": {{"frozen": "device"}}: {held:.3g} bytes a parameter in a rank'
            yield told, replace(self, frozen_kept=True)
        if self.stage >= 2 and (self.stage == 3 or self.micro_batches > 1):
            whole, held = "gradients", (1 - self.frozen) * width
            if self.stage == 3:
                whole, held = "parameters and gradients", width + held
            yield (
                f"ZeRO 1, which keeps {whole} whole: {held:.3g} bytes a parameter in a rank",
                replace(self, stage=1, copy="none", in_node=False),
            )
        if self.stage == 3 and self.copy == "none" and not self.shards_in_node:
            held = width + MOMENTS + (MASTER if width == 2 else 0)
            held = width + (1 - self.frozen) * held
            yield (
                f"fully_shard on a mesh of nodes and their ranks (HSDP): {held:.3g} bytes a "
                "parameter in a node, with gradients and Adam",
                replace(self, shards_in_node=True),
            )


#: how a block writes sums inside nodes
_ONCE = '"dp": {"accumulate": "node"}'
#: how a block writes each secondary copy
_COPIES: dict[Copy, str] = {
    "native": "zero_hpz_partition_size N, the ranks of a node",
    "exact": '"secondary": "exact"',
    "bits8": '"secondary": {"bits": 8}, whose passes compute with 8 bits',
}


def check_frozen(share: float) -> None:
    """Raise ConfigError where the share of frozen parameters is out of range."""
    if not 0 <= share < 1:
        raise ConfigError("--frozen", share, "expected a share from 0 to below 1, such as 0.99")


def of_plan(plan: Plan) -> tuple[JobTraffic, float] | None:
    """Return the traffic of a plan with replicas only, and its bits; None for other layouts."""
    layout = plan.layout
    if not layout.is_uncut:
        return None
    dtype, torchs = DTYPES[plan.dtype], plan.engine == "fsdp2"
    summed = torch.float32 if torchs or plan.engine == "megatron" else dtype
    job = JobTraffic(layout.zero_stage, dtype, summed, layout.accumulation, frozen=plan.frozen)
    if torchs and layout.hpz > 1 and layout.copy == "native":  # renewed in every forward pass
        job, layout = replace(job, passes=1), layout.replace(hpz=1)
    elif layout.hpz > 1 and not torchs:  # the DeepSpeed file asks for a copy, encoded or not
        job = replace(job, copy="native")
    gradients, parameters = (plan.choices[name, "forward"].codec for name in ("dp", "zero"))
    return job, job.over(layout).encoded(gradients, parameters)


def told(job: JobTraffic, encoded: float) -> str:
    """Return the bits of a job with a block or plan, natively, and under ZeRO++, in words."""
    peer = f"ZeRO++ {job.plus_plus():.1f}, " if job.stage == 3 else ""
    return (
        f"between nodes a step sends {encoded:.1f} bits a parameter (natively {job.native():.1f}, "
        f"{peer}among many nodes)"
    )


def lines(config: CompressionConfig, job: JobTraffic) -> Iterator[str]:
    """Yield the bits of ``job`` with a block, and settings that send less.

    Yields no line for a low-rank codec, whose bits depend on the shapes of the matrices.
    """
    if {"dp", "zero"} & set(config.policy().low_rank):
        return
    codecs = config.codecs()
    dp, zero = codecs["dp", "forward"], codecs["zero", "forward"]
    keeps_frozen = config.zero.keeps_frozen is not None
    if dp is None and zero is None and not (keeps_frozen and job.frozen):
        return
    in_node = dp is not None and config.dp.accumulate == "node"
    kept = replace(job, in_node=in_node, frozen_kept=keeps_frozen)
    copy = copy_of(config)
    if copy is not None:
        kept = replace(kept, copy=copy)
    sent = kept.encoded(dp, zero)
    yield told(job, sent)
    found = [(other.encoded(dp, zero), words) for words, other in kept.lighter(dp is not None)]
    for fewer, words in sorted(found):
        if fewer < sent:
            yield f"  {fewer:.1f} with {words}"
