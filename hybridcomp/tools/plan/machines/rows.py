"""Rows of a cluster's file: each names an operation that was timed, and its seconds.

Bytes of a message are those of upstream's tensor: of an all-reduce each rank's input, of a gather
the output, of a reduce-scatter each rank's input, of an all-to-all each rank's input, the part that
it keeps included, of a send the message. A group is identified by its ranks and by the nodes that
it spans: 4 ranks on 2 nodes are two on each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from hybridcomp.tools.plan.machines.estimates import Estimate, Stored

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
#: load while a message is timed. alone: none; groups: all other groups of that shape send too;
#: compute: groups, and every rank multiplies matrices. A codec is timed alone or under "compute"
Beside = Literal["alone", "groups", "compute"]
Direction = Literal["encode", "decode", "decode_add"]
Kind = Literal[
    "product", "elementwise", "adam", "host_adam", "block_forward", "block_backward"
]  # fmt: skip
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
#: where a copy goes; ``from_drive`` goes to the host as well
Tier = Literal["to_host", "to_device", "to_drive", "from_drive"]
#: the setting of messages without a codec
NATIVE = "none"
#: pydantic's setting of every row of the file: an unknown key is an error
STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Rank:
    """One rank: its node, its device, and the device's memory in bytes (0: not known).

    flops: FLOP/s of a large matrix product, by dtype ("fp32", "bf16", "fp16").
    """

    __pydantic_config__ = STRICT

    node: Count
    device: str
    nbytes: Count = 0
    flops: Mapping[str, Stored] = field(default_factory=dict)


@dataclass(frozen=True)
class MessageHost:
    """Host seconds of an encoded message: a fixed part, and a part for each rank of its group."""

    __pydantic_config__ = STRICT

    each: Stored
    per_rank: Stored

    def seconds(self, ranks: int) -> Estimate:
        """Return the seconds of a message among ``ranks``."""
        return self.each.plus(self.per_rank.times(ranks))


@dataclass(frozen=True)
class Timing:
    """Seconds of one native collective of ``ranks`` ranks on ``nodes`` nodes.

    compute_left: under "compute", the fraction of the usual matrix products that a rank computes
        while the collective runs.
    returned: of a send whose receiver waited for it, the seconds until the sender's call returned.
    """

    __pydantic_config__ = STRICT

    operation: Operation
    ranks: Positive
    nodes: Positive
    nbytes: Count
    seconds: Stored
    beside: Beside = "alone"
    compute_left: Stored | None = None
    returned: Stored | None = None


@dataclass(frozen=True)
class SentMessage:
    """Seconds of a message of hybridcomp, from the call to the result.

    setting: the codec's. numel: number of values, of ``dtype``; nbytes: bytes of their payload.
    """

    __pydantic_config__ = STRICT

    operation: Operation
    setting: str
    dtype: str
    ranks: Positive
    nodes: Positive
    numel: Positive
    nbytes: Count
    seconds: Stored


@dataclass(frozen=True)
class Encoded(SentMessage):
    """One encoded collective."""

    beside: Beside = "alone"


@dataclass(frozen=True, kw_only=True)
class Carried(SentMessage):
    """A message through the channel of its dimension.

    Its seconds include the channel's work beside codec and wire: the choice of the codec, records,
    headers, the order of its calls.

    setting: ``NATIVE`` where the channel left the message to upstream. direct: seconds of the same
    message by torch.distributed alone, timed in turns with it. beside: "alone", or "groups" if all
    groups of that shape send at once, as the dimension does.
    """

    dimension: Literal["tp", "pp", "ep", "cp"]
    direct: Stored
    beside: Literal["alone", "groups"] = "alone"


@dataclass(frozen=True)
class LeftOut:
    """A message timed in its shorter size only: the longer one would have taken too long.

    dimension: its channel sends the message; empty: a collective without a channel. setting: the
    codec's; empty: every codec. numel: values of the longer message. timed: values of the shorter
    message. factor: assumed factor on coding and wire of longer messages, since only two timed
    sizes would give it.
    """

    __pydantic_config__ = STRICT

    operation: Operation
    dtype: str
    ranks: Positive
    nodes: Positive
    numel: Positive
    timed: Positive
    dimension: Literal["", "tp", "pp", "ep", "cp"] = ""
    setting: str = ""
    beside: Literal["alone", "groups"] = "alone"
    factor: float = 1.0


@dataclass(frozen=True)
class Coding:
    """Seconds in which a device encodes, decodes or decodes and adds ``numel`` values.

    fixed_size: whether all ranks know the size of payloads, so that they need not exchange sizes.
    """

    __pydantic_config__ = STRICT

    setting: str
    dtype: str
    direction: Direction
    numel: Positive
    seconds: Stored
    beside: Beside = "alone"
    fixed_size: bool = True


@dataclass(frozen=True)
class Copy:
    """Seconds of a copy between device and host memory, on a CPU inside host memory, or of a file.

    A file is written to a node's drive or read from it while all ranks of the node do so.
    """

    __pydantic_config__ = STRICT

    direction: Tier
    nbytes: Count
    seconds: Stored


@dataclass(frozen=True)
class Kernel:
    """Seconds of a kernel on a rank's device.

    kind and size: a matrix ``product`` or a transformer block (``block_forward``,
        ``block_backward``) of so many FLOP; an ``elementwise`` operation that reads and writes so
        many bytes; an ``adam`` step on so many values, or one in the memory of a GPU's host
        (``host_adam``).
    kept_nbytes: of a block, bytes that stay in memory between forward and backward.
    """

    __pydantic_config__ = STRICT

    rank: Count
    kind: Kind
    dtype: str
    size: Annotated[float, Field(gt=0)]
    seconds: Stored
    note: str = ""
    kept_nbytes: Count = 0


@dataclass(frozen=True)
class TrainedSmall:
    """Seconds of an engine's steps on a small model that every rank replicates.

    Only these seconds include the host's work for a step, a micro-batch and a bucket, and the
    slowdown of compute and messages by each other.

    block: the engine's compression block; empty: the engine alone. blocks: number of the model's
        blocks; each has ``parameters`` values and takes ``flops`` in the forward pass of a
        micro-batch of ``samples`` samples of ``length`` tokens.
    micro: seconds of a micro-batch that another one follows. last: seconds of the last micro-batch
        with the optimizer's step. The figures are those of the slowest rank.
    """

    __pydantic_config__ = STRICT

    engine: str
    zero_stage: Annotated[int, Field(ge=0, le=3)]
    dtype: str
    blocks: Positive
    flops: Annotated[float, Field(gt=0)]
    parameters: Positive
    samples: Positive
    length: Positive
    micro: Stored
    last: Stored
    block: Mapping[str, Any] = field(default_factory=dict)
