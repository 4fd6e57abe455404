"""Estimate a job's memory on a rank for ``hybridcomp validate``; refuse jobs that do not fit."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hybridcomp.channels.accounting.memory import (
    KeptState,
    MemoryItem,
    meetings,
    memory_lines,
    published,
    rolled_out,
    size,
    taken,
)
from hybridcomp.channels.accounting.rank_messages import RankMessages, Way
from hybridcomp.codecs.words import DTYPES
from hybridcomp.config import CompressionConfig
from hybridcomp.config.error_messages import show
from hybridcomp.dimensions import Dimension
from hybridcomp.errors import ConfigError
from hybridcomp.patches.rules import neox
from hybridcomp.tools.commands.job_files import JobFile
from hybridcomp.tools.plan.bits_between import MASTER, MOMENTS

#: values: DeepSpeed's default of ``reduce_bucket_size`` and ``allgather_bucket_size`` (also its
#: bucket at stage 0), and of ``stage3_prefetch_bucket_size``
BUCKET, PREFETCHED = 500_000_000, 50_000_000
#: bytes of DDP's default bucket
DDP_BUCKET = 25 << 20
#: by dimension: the messages of a step, one entry for each group
StepMessages = dict[Dimension, tuple[RankMessages, ...]]
#: largest number on the command line, and most messages of a dimension in a step
MOST, MOST_MESSAGES = 1e15, 10**6
#: most settings that fit to name in an error
NEAREST = 2


@dataclass(frozen=True)
class JobSize:
    """Figures of a job that its configuration lacks.

    Attributes:
        parameters: number of parameters of the whole model.
        world_size: ranks of the job.
        replicas: ranks that hold the same part of the model before ZeRO shards it; None: the world
            divided by the tensor and pipeline ranks in the file.
        ranks_per_node: ranks of each node; 1 if unknown.
        device_nbytes: bytes of memory of a rank's device; None: not checked.
        activation: number of values that a layer or stage outputs for a micro-batch; None: as in
            the file (GPT-NeoX only).
        tensor_ranks: ranks that split every layer; None: as in the file.
    """

    parameters: int
    world_size: int
    replicas: int | None = None
    ranks_per_node: int = 1
    device_nbytes: float | None = None
    activation: int | None = None
    tensor_ranks: int | None = None

    @classmethod
    def of(cls, asked: argparse.Namespace) -> JobSize | None:
        """Check the options of the command line; None without ``--parameters``.

        Raises ConfigError in one line, naming the option.
        """
        names = ("parameters", "world_size", "replicas", "ranks_per_node", "device_memory",
                 "activation", "tensor_ranks")  # fmt: skip
        options = {f"--{name.replace('_', '-')}": getattr(asked, name) for name in names}
        parameters, world_size = asked.parameters, asked.world_size
        for name, found in options.items():
            if found is not None and not 1 <= found <= MOST:
                raise ConfigError(name, show(found), f"expected a number from 1 to {MOST:g}")
        if parameters is None:
            for name in options:
                if options[name] is not None and name != "--world-size":
                    todo = "memory is computed for a model; add --parameters and --world-size"
                    raise ConfigError(name, options[name], todo)
            return None
        if world_size is None:
            raise ConfigError("--parameters", parameters, "add --world-size, the ranks of the job")
        for name in ("--replicas", "--ranks-per-node", "--tensor-ranks"):
            if (found := options[name]) is not None and world_size % found:
                raise ConfigError(name, found, f"it does not divide --world-size {world_size}")
        values = None if asked.activation is None else int(asked.activation)
        return cls(
            int(parameters), world_size, asked.replicas, asked.ranks_per_node or 1,
            asked.device_memory, values, asked.tensor_ranks,
        )  # fmt: skip


def lines(block: CompressionConfig, file: JobFile, job: JobSize) -> Iterator[str]:
    """Yield the memory that hybridcomp takes on a rank of ``job``, and the engine's.

    Raises ConfigError if the sum of these does not fit into the device's memory, and names the
    nearest settings of the block that fit.
    """
    split = split_of(file, job)
    replicas, numel = job.world_size // split, -(-job.parameters // split)
    whole = replicas
    if block.sync.acts:  # the island's ranks take the place of all replicas
        of_island = block.sync.islands
        if isinstance(of_island, str | int):  # otherwise the island is the whole job
            replicas = max(
                1, (of_island if isinstance(of_island, int) else job.ranks_per_node) // split
            )
    ranks = RanksOfReplica(block, file, numel, replicas, job)
    messages = {**ranks.messages(), **ranks.activations(split)}
    share = -(-numel // replicas)
    jobs = block.sync.jobs
    islands = whole // replicas if jobs is None else jobs.at_start
    others = [
        *meetings(block, share, islands), *published(block, share),
        *rolled_out(block, numel, job.world_size, job.ranks_per_node),
    ]  # fmt: skip
    items = [*taken(block, messages), *others]
    yield from (f"  {line}" for line in memory_lines(items))
    if not items:
        yield f"  {'memory':13} of a rank: nothing"
    if unknown := ranks.unknown(split):
        yield f"  {'':13} without buffers of {unknown}, whose messages --activation VALUES tells"
    engine = 0 if file.whose == "block" else ranks.engine_nbytes()
    if engine:
        yield f"  {'':13} beside weights, gradients and Adam of {size(engine)}, and activations"
    if job.device_nbytes is None:
        return
    own = _on_device(items)
    if engine + own > job.device_nbytes:
        nearest = [
            (_on_device([*taken(block, messages, state), *others]), words)
            for words, state in KeptState.of(block).smaller(block)
        ]
        fits = sorted((n for n in nearest if engine + n[0] <= job.device_nbytes), reverse=True)
        beside = f" beside {size(engine)} of weights, gradients and Adam" if engine else ""
        why = f"hybridcomp takes {size(own)}{beside}; {_advice(fits[:NEAREST])}"
        raise ConfigError("--device-memory", size(job.device_nbytes), why)


def _advice(fits: list[tuple[int, str]]) -> str:
    if not fits:
        return "no error feedback and no deltas do not fit either; take more ranks or shard more"
    return "what fits: " + ", or ".join(f"{words} ({size(nbytes)})" for nbytes, words in fits)


def _on_device(items: list[MemoryItem]) -> int:
    return sum(item.nbytes for item in items if not item.on_host)


def split_of(file: JobFile, job: JobSize) -> int:
    """Return tensor times pipeline ranks, from options or file. Raises ConfigError on a misfit."""
    if job.replicas:
        return job.world_size // job.replicas
    split = job.tensor_ranks or _tensor_ranks(file)
    if file.whose == "neox":
        split *= neox.stages(file.whole)
    if job.world_size % split:
        todo = f"{split} tensor and pipeline ranks do not divide it"
        raise ConfigError("--world-size", job.world_size, todo)
    return split


def _tensor_ranks(file: JobFile) -> int:
    """Return the tensor ranks in the file."""
    return file.job.tensor_parallel * (neox.tensor_ranks(file.whole) if file.whose == "neox" else 1)


@dataclass(frozen=True)
class RanksOfReplica:
    """One rank of a job: its block, file, number of parameters and replicas."""

    block: CompressionConfig
    file: JobFile
    numel: int
    replicas: int
    job: JobSize

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the messages; bf16 where the file leaves it open."""
        return DTYPES[self.file.dtype or "bf16"]

    def messages(self) -> StepMessages:
        """Return the messages of a step of DeepSpeed, or of DDP for a bare block."""
        found, width = self.file.job, self._width()
        rest: dict[str, Any] = {"ranks": self.replicas, "width": width}
        if self.file.whose == "block":
            ddp = _cut(self.numel, DDP_BUCKET // self.dtype.itemsize, "")
            return {"dp": (RankMessages(ddp, "sum", self.dtype, tabled=True, **rest),)}
        stage = found.stage
        bucket = found.zero("reduce_bucket_size") if stage else BUCKET
        summed = _cut(self.numel, bucket, "reduce_bucket_size")
        how: Way = "scatter" if stage == 3 else "own" if found.buckets else "sum"
        sums = DTYPES.get(found.summed_dtype or "", self.dtype)
        dtype = torch.float32 if found.bf16_optimizer else sums
        messages: StepMessages = {"dp": (RankMessages(summed, how, dtype, **rest),)}
        if stage:
            name = "prefetch_bucket_size" if stage == 3 else "allgather_bucket_size"
            most = found.zero(name) or (PREFETCHED if stage == 3 else BUCKET)
            gathered = _cut(self.numel, most, f"stage3_{name}" if stage == 3 else name)
            messages["zero"] = (RankMessages(gathered, "gather", self.dtype, **rest),)
        return messages

    def activations(self, split: int) -> StepMessages:
        """Return the activations sent by tensor and pipeline parallelism, if their size is known.

        ``split``: tensor ranks times pipeline ranks. Sums of ``tp`` need at least as much memory as
        its gathers. DeepSpeed's pipelines send their messages in turn; Megatron's hold a sent and a
        received message at the same time.
        """
        numel = self._activation()
        if numel is None:
            return {}
        found, tensor = StepMessages(), self._tensor_ranks()
        if tensor > 1:
            found["tp"] = (RankMessages((numel,), "sum", self.dtype, tensor),)
        if split > tensor:
            at_once = 2 if self.file.whose == "block" else 1
            found["pp"] = (RankMessages((numel,), "send", self.dtype, 2, at_once=at_once),)
        return found

    def unknown(self, split: int) -> str:
        """Return, in words, the dimensions that have a codec but messages of unknown length."""
        if split == 1 or self._activation() is not None:
            return ""
        names: tuple[Dimension, ...] = ("tp", "pp")
        return " and ".join(name for name in names if self.block.active(name))

    def _activation(self) -> int | None:
        """Return the values of an activation: micro-batch times tokens times width."""
        if self.job.activation is not None or self.file.whose != "neox":
            return self.job.activation
        names = ("train_micro_batch_size_per_gpu", "seq_length", "hidden_size")
        counts = [self.file.whole.get(name) for name in names]
        known = [count for count in counts if isinstance(count, int)]
        return math.prod(known) if len(known) == len(names) else None

    def _tensor_ranks(self) -> int:
        """Return the number of ranks that split every layer."""
        return self.job.tensor_ranks or _tensor_ranks(self.file)

    def _width(self) -> int:
        """Return how many replicas in the largest unit sum before encoding; 1 in one level."""
        if self.block.hierarchy == "none":
            return 1
        found = self.block.widths
        first, *above = found if isinstance(found, list) else [found]
        units = [self.job.ranks_per_node if isinstance(first, str) else first]
        for width in above:
            if isinstance(width, str):  # only the job's launcher knows it
                break
            units.append(width * units[-1])
        for unit in reversed(units):
            local = max(1, unit * self.replicas // self.job.world_size)
            if local < self.replicas:
                return local if self.replicas % local == 0 else 1
        return 1

    def engine_nbytes(self) -> int:
        """Return the bytes of weights, gradients and Adam's states on a device, after sharding."""
        found, width = self.file.job, self.dtype.itemsize
        stage, own = found.stage, -(-self.numel // self.replicas)
        states = (MOMENTS + (MASTER if width == 2 else 0)) * (own if stage else self.numel)
        weights = width * (own if stage == 3 else self.numel)
        gradients = width * (own if stage >= 2 else self.numel)
        return weights + gradients + (0 if found.cpu_offload else states)


def _cut(numel: int, most: int, name: str) -> tuple[int, ...]:
    """Cut ``numel`` values into messages of ``most``, or raise ConfigError about key ``name``."""
    whole, rest = divmod(numel, most)
    if whole > MOST_MESSAGES:
        raise ConfigError(f"zero_optimization.{name}", most, f"{whole:.2g} messages in a step")
    return (most,) * whole + ((rest,) if rest else ())
