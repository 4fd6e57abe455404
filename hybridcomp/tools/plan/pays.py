"""Estimate for ``hybridcomp pays`` below which speed of the link a block makes a job faster.

The cost model is that of ``docs/results/planner.md``, with our measured constants, for users who
have not measured yet:

    native  = bytes / rate
    encoded = fewer bytes / rate + CODING * (coded bytes / speed of the codec) + overhead * messages

Compression pays below the rate at which both are equal. With the compute of a step,

    step = compute + max(0, bytes / rate - OVERLAP * compute) + cost of encoding

The model has no latency, links shared with other jobs, or copies inside a node. ``"when": "auto"``
measures on the real links what this only estimates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from hybridcomp.channels.accounting.rank_messages import EXACT_BITS
from hybridcomp.codecs import make_codec
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.stepcode import cpu_instructions
from hybridcomp.codecs.words import DTYPE_NAMES
from hybridcomp.config import CompressionConfig
from hybridcomp.config.parameter import FrozenConfig
from hybridcomp.dimensions import BETWEEN_RANKS, ROWS, Dimension, Key
from hybridcomp.errors import ConfigError
from hybridcomp.tools.plan.machines.cluster import Cluster

#: share of a step's compute that hides messages (the fit of docs/results/planner.md)
OVERLAP = 0.1
#: share of a codec's seconds that lengthens the step (the same fit)
CODING = 0.7
#: bits a value of lossless codecs, whose size varies, for fp32 and bf16: averages of trainings;
#: stepcode leaves fp32 native, and its bits are those of a learning rate of 3e-4
TYPICAL_BITS: Mapping[str, tuple[float, float]] = {
    "expcode": EXACT_BITS, "mpc": (29.0, 12.4), "stepcode": (32.0, 2.9),
}  # fmt: skip
#: bits per parameter that cross nodes in a step, by kind of secondary copy
STEP_BITS: Mapping[str, float] = {"exact": TYPICAL_BITS["stepcode"][1], "bits8": 2.0}
#: bits a value of radix at an error bound of 0.01, and for each factor of ten below it
RADIX_BITS, RADIX_SLOPE = 6.0, 3.3
#: values in the message for which bits and speeds of codecs are computed
NUMEL = 1 << 20


@dataclass(frozen=True)
class Coder:
    """Device that runs the codecs."""

    what: str
    #: speed of encoding or decoding in 1e9 native bytes/s, by codec or spec ("radix" for bounds)
    speeds: Mapping[str, float]
    message_s: float  # seconds of an encoded message, without those of its bytes

    def speed(self, codec: Codec) -> float:
        """Return native bytes a second. Raises ConfigError where no speed is known."""
        name = "radix" if codec.bounded else codec.name
        found = self.speeds.get(codec.spec, self.speeds.get(name))
        if found is None:
            raise ConfigError("codec", name, "its speed is not known here; give --codec-gbs")
        return 1e9 * found


DEVICES: Mapping[str, Coder] = {
    # seconds of the ledger in the trainings of docs/results/speed.md, bf16; expcode, stepcode
    # and the casts beside mpc and blockint as bench_codecs.py and bench_deltas.py have them
    # (stepcode at a learning rate of 3e-4, with AVX-512; ``documented`` has others); overhead: fit
    "cpu": Coder(
        "one core of a CPU",
        {"blockint": 1.1, "zfp": 0.22, "mpc": 0.36, "radix": 0.41, "expcode": 0.8, "fp8": 0.5,
         "stepcode": 1.1, "bf16": 1.3, "fp16": 1.3},
        0.83e-3,
    ),
    # blockint: the ledger's seconds in the training of docs/results/gpu.md; other codecs: scaled by
    # the proportions in docs/results/gpu.md; overhead: a whole all-reduce of 1 MB
    "gpu": Coder(
        "an H100 that two ranks share",
        {"blockint": 150.0, "zfp": 70.0, "mpc": 115.0, "radix": 100.0, "expcode": 130.0,
         "fp8": 150.0, "bf16": 160.0, "fp16": 160.0},
        0.15e-3,
    ),
}  # fmt: skip
#: speed of stepcode relative to that with AVX-512, by the CPU's instructions (``stages alone`` of
#: bench_publish.py --instructions at commit e5cc6749, mean of encode and decode at a learning rate
#: of 3e-4)
STEPS_BY_INSTRUCTIONS: Mapping[str, float] = {"avx512": 1.0, "avx2": 0.89, "plain": 0.16}


def documented(device: str) -> Coder:
    """Return the documented speeds of ``device``, "cpu" or "gpu".

    The speed of stepcode on a CPU is that with the instructions that this process uses.
    """
    found = DEVICES[device]
    if device != "cpu":
        return found
    steps = found.speeds["stepcode"] * STEPS_BY_INSTRUCTIONS[cpu_instructions()]
    return replace(found, speeds={**found.speeds, "stepcode": steps})


def measured(cluster: Cluster, codecs: Iterable[Codec], dtype: torch.dtype, device: Coder) -> Coder:
    """Return the speeds of ``codecs`` that ``hybridcomp measure`` found, in messages of ``NUMEL``.

    ``device`` gives the overhead of a message. Raises HybridcompError for unmeasured codecs.
    """
    kind, speeds = DTYPE_NAMES[dtype], {}
    for codec in codecs:
        if not codec.takes(dtype):
            continue
        ways = [cluster.coding(codec.spec, kind, NUMEL, way) for way in ("encode", "decode")]
        seconds = sum(way.value for way in ways) / len(ways)
        speeds[codec.spec] = NUMEL * dtype.itemsize / seconds / 1e9
    return replace(device, what=cluster.ranks[0].device, speeds=speeds)


@dataclass(frozen=True)
class MessageGroup:
    """The ranks that exchange a message, and how upstream sends it."""

    ranks: int = 2
    stage: int = 1  # ZeRO stage
    dtype: torch.dtype = torch.bfloat16
    summed: torch.dtype | None = None  # dtype of gradients, if not ``dtype``
    has_hpz: bool = False  # ranks are nodes with DeepSpeed's secondary copy

    def gathers(self, micro_batches: int) -> int:
        """Return how often a step of upstream gathers parameters."""
        return 2 * micro_batches if self.stage == 3 and not self.has_hpz else min(self.stage, 1)

    def sent_as(self, dimension: Dimension) -> torch.dtype:
        """Return the dtype of the messages of ``dimension``."""
        return (self.summed if dimension == "dp" else None) or self.dtype


@dataclass(frozen=True)
class Cost:
    """Cost of messages for one rank."""

    native_nbytes: float
    wire_nbytes: float
    coding_s: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.native_nbytes + other.native_nbytes, self.wire_nbytes + other.wire_nbytes,
            self.coding_s + other.coding_s,
        )  # fmt: skip

    @property
    def pays_below(self) -> float:
        """Bits a second of a rank's link below which compression pays; 0: never."""
        saved = 8 * (self.native_nbytes - self.wire_nbytes)
        if saved <= 0:
            return 0.0
        return saved / self.coding_s if self.coding_s else math.inf

    def speed_up(self, rate: float, compute_s: float) -> float:
        """Return a step's native time divided by its encoded time, at ``rate`` bits/s."""
        hidden = OVERLAP * compute_s
        native = compute_s + max(0.0, 8 * self.native_nbytes / rate - hidden)
        encoded = compute_s + max(0.0, 8 * self.wire_nbytes / rate - hidden) + self.coding_s
        return native / encoded


def bits(codec: Codec, dtype: torch.dtype) -> float:
    """Return bits a value in an encoded message; typical ones where the size varies."""
    width = 8.0 * dtype.itemsize
    if codec.name in TYPICAL_BITS:
        return TYPICAL_BITS[codec.name][dtype != torch.float32]
    bound = getattr(codec, "error_bound", None)
    if bound is not None:
        lossless = TYPICAL_BITS["expcode"][dtype != torch.float32]
        return min(lossless, max(1.0, RADIX_BITS - RADIX_SLOPE * math.log10(bound / 0.01)))
    return min(width, 8.0 * codec.wire_nbytes(NUMEL, dtype) / NUMEL)


def cost(
    dimension: Dimension,
    codec: Codec,
    numel: float,
    job: MessageGroup,
    device: Coder,
    messages: int = 1,
    sent_bits: float | None = None,
) -> Cost:
    """Return the cost of ``messages`` messages with ``numel`` values in total.

    ``sent_bits``: bits per value, if they are not the codec's.

    Steps: (1) shares of ``numel`` that a rank sends natively and encoded, that it encodes and that
    it decodes; (2) bytes; (3) seconds of coding and overhead.
    """
    other = (job.ranks - 1) / job.ranks
    # 1.
    operation = ROWS[dimension].operation
    if operation == "all_gather":
        native, sent, encoded, decoded, hops = other, other, 1 / job.ranks, other, 1
    elif operation == "send":
        native, sent, encoded, decoded, hops = 1.0, 1.0, 1.0, 1.0, 1
    elif operation == "all_to_all" or (dimension == "dp" and job.stage == 3):
        native, sent, encoded, decoded, hops = other, other, other, other, 1
    elif dimension == "dp" and job.stage in (1, 2):
        # DeepSpeed all-reduces a bucket, though a rank keeps one part: encoded, only that is sent
        native, sent, encoded, decoded, hops = 2 * other, other, other, other, 1
    elif job.ranks == 2:  # two ranks swap whole values
        native, sent, encoded, decoded, hops = 1.0, 1.0, 1.0, 1.0, 1
    else:
        native, sent, encoded, decoded, hops = 2 * other, 2 * other, 1.0, 2 * other, 2
    # 2.
    dtype = job.sent_as(dimension)
    nbytes = numel * dtype.itemsize
    ratio = (sent_bits or bits(codec, dtype)) / (8 * dtype.itemsize)
    # 3.
    passes = (encoded + decoded) * nbytes
    coding = CODING * passes / device.speed(codec) + hops * messages * device.message_s
    return Cost(native * nbytes, sent * nbytes * ratio, coding)


def codecs_of(config: CompressionConfig) -> dict[Key, Codec]:
    """Return the codecs whose speed-up can be estimated, by dimension and direction.

    Left out: native dimensions, ``offload`` (its link is the bus), ``tp2d`` (its products hide
    transfers), low rank (its bytes depend on the matrices).
    """
    names = [name for name in BETWEEN_RANKS if not ROWS[name].is_quiet]
    low_rank = config.policy().low_rank
    return {
        (name, way): codec
        for (name, way), codec in config.codecs().items()
        if codec is not None and name in names and name not in low_rank
    }


def step_cost(
    config: CompressionConfig,
    parameters: float,
    job: MessageGroup,
    device: Coder,
    micro_batches: int = 1,
    frozen: float = 0.0,
) -> Cost:
    """Return the cost of all messages of ``dp`` and ``zero`` in a step, in DeepSpeed's buckets.

    ZeRO 2 and 3 reduce in every micro-batch, ZeRO 3 gathers before each forward and each backward
    pass. Gradients summed inside a node cross nodes once a step, as do parameters of which each
    node keeps a copy; messages inside nodes are not counted. A native dimension costs its bytes.
    The share ``frozen`` of the parameters does not train, and only ZeRO 3 gathers it.
    """
    whole, parameters = parameters, (1 - frozen) * parameters
    times: dict[Dimension, int] = {"dp": micro_batches if job.stage >= 2 else 1}
    if job.stage:
        times["zero"] = job.gathers(micro_batches)
    codecs, total = config.codecs(), Cost(0.0, 0.0, 0.0)
    if frozen and job.stage == 3 and not job.has_hpz:  # hpZ's copy holds them
        total = _frozen_cost(config, times["zero"], frozen * whole, job, device)
    for name, count in times.items():
        codec, buckets = codecs[name, "forward"], max(1, math.ceil(parameters / 5e8))
        native = native_cost(name, count * parameters, job)
        if codec is None or name in config.policy().low_rank:
            total += native
            continue
        if (name == "zero" and sends_steps(config, job)) or (
            name == "dp" and config.dp.accumulate == "node"
        ):
            count = 1
        codec, sent_bits = sent_by(config, name, codec, job, device)
        sent = cost(name, codec, count * parameters, job, device, count * buckets, sent_bits)
        total += replace(sent, native_nbytes=native.native_nbytes)
    return total


def _frozen_cost(
    config: CompressionConfig, gathers: int, numel: float, job: MessageGroup, device: Coder
) -> Cost:
    """Return the cost of gathers of ``numel`` frozen parameters in a step after the first.

    Ranks that keep these parameters decode them before each use. A node's secondary copy holds
    them, so that no message crosses nodes.
    """
    native, codec = native_cost("zero", gathers * numel, job), config.codecs()["zero", "forward"]
    kept = config.zero.keeps_frozen
    if kept is not None:
        opened = kept_codec(kept)
        passes = gathers * numel * job.sent_as("zero").itemsize
        return replace(native, wire_nbytes=0.0, coding_s=CODING * passes / device.speed(opened))
    if copy_of(config) is not None:
        return replace(native, wire_nbytes=0.0)
    if codec is None or "zero" in config.policy().low_rank:
        return native
    buckets = gathers * max(1, math.ceil(numel / 5e8))
    sent = cost("zero", codec, gathers * numel, job, device, buckets)
    return replace(sent, native_nbytes=native.native_nbytes)


def kept_codec(kept: FrozenConfig) -> Codec:
    """Return the codec of frozen weights that ranks keep."""
    return make_codec("expcode") if kept.bits is None else make_codec("blockint", bits=kept.bits)


def copy_of(config: CompressionConfig) -> Literal["exact", "bits8"] | None:
    """Return the secondary copy that ``config`` keeps in each node; None for none of ours."""
    if not config.zero.keeps_copy:
        return None
    return "exact" if config.zero.secondary == "exact" else "bits8"


def sends_steps(config: CompressionConfig, job: MessageGroup) -> bool:
    """Return whether gathers send parameters as changes to each node's copy, once a step."""
    return copy_of(config) is not None and job.stage == 3


def sent_by(
    config: CompressionConfig, name: Dimension, codec: Codec, job: MessageGroup, device: Coder
) -> tuple[Codec, float]:
    """Return codec and bits per value of all messages after the first, which uses ``codec``."""
    copy = copy_of(config)
    if name == "zero" and copy is not None and sends_steps(config, job):
        return _steps(device, codec), STEP_BITS[copy]
    return codec, bits(codec, job.sent_as(name))


def _steps(device: Coder, whole: Codec) -> Codec:
    """Return stepcode, or ``whole`` (the copy's codec) where the speed of stepcode is unknown.

    It is unknown on GPUs; on CPUs stepcode is at least as fast as the copy's codec.
    """
    steps = make_codec("stepcode")
    return steps if {steps.name, steps.spec} & set(device.speeds) else whole


def native_cost(dimension: Dimension, numel: float, job: MessageGroup) -> Cost:
    """Return the cost of a dimension that is not compressed."""
    other = (job.ranks - 1) / job.ranks
    twice = ROWS[dimension].summed and job.stage != 3
    nbytes = (2 if twice else 1) * other * numel * job.sent_as(dimension).itemsize
    return Cost(nbytes, nbytes, 0.0)
