"""The rows of a description of a cluster: what was timed, and what it took.

Bytes of a message are those of upstream's tensor: of an all-reduce what each rank has, of a gather
what all have together afterwards, of a reduce-scatter what each rank brings, of an all-to-all what
each rank sends and keeps, of a send the message. A group is known by its ranks and by the nodes
that it spans: 4 ranks on 2 nodes are two on each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from hybridcomp.plan.machines.figures import Stored

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
#: what else happens while something is timed: nothing; all other groups of that shape send as well;
#: they do, and every rank computes matrix products. A codec: alone, or beside a matrix product
Beside = Literal["alone", "groups", "compute"]
Direction = Literal["encode", "decode", "decode_add"]
Kind = Literal[
    "product", "elementwise", "adam", "host_adam", "block_forward", "block_backward"
]  # fmt: skip
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
#: the setting of messages without a codec
NATIVE = "none"
#: of every row of the file: an unknown key is an error
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
class Timing:
    """Seconds of one native collective of ``ranks`` ranks on ``nodes`` nodes.

    compute_left: with ``beside`` "compute", the share of the matrix products that a rank still
        computes in that time.
    returned: of a send whose receiver waited for it, the seconds until the sender went on.
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
class Sent:
    """Seconds of a message of hybridcomp, from the call to the result.

    setting: of its codec. numel: values of ``dtype`` of the message; nbytes: of their payload.
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
class Encoded(Sent):
    """One encoded collective."""

    beside: Beside = "alone"


@dataclass(frozen=True, kw_only=True)
class Carried(Sent):
    """A message through the channel of its dimension.

    What a channel takes beside codec and wire (its choice, its records, headers, the order of its
    calls) is in these seconds.

    setting: ``NATIVE`` where the channel left the message to upstream. direct: the same message by
    torch.distributed alone, in turns with it. beside: alone, or as the dimension sends, in all
    groups of that shape at once.
    """

    dimension: Literal["tp", "pp", "ep", "cp"]
    direct: Stored
    beside: Literal["alone", "groups"] = "alone"


@dataclass(frozen=True)
class LeftOut:
    """A message of two sizes whose longer one was not timed: its turns would have taken too long.

    dimension: whose channel it goes through; empty: of none, a collective alone. setting: of its
    codec; empty: of every one. numel: values of the longer message. timed: of the one that was.
    factor: that coding and wire of longer messages are taken to need, which two sizes would tell.
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

    fixed_size: whether payloads have a size that all ranks know, so that none has to be exchanged.
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
    """Seconds of a copy between device and host memory; on a CPU, inside host memory."""

    __pydantic_config__ = STRICT

    direction: Literal["to_host", "to_device"]
    nbytes: Count
    seconds: Stored


@dataclass(frozen=True)
class Kernel:
    """Seconds that a rank's device computes.

    kind and size: a matrix ``product`` or a transformer block (``block_forward``,
        ``block_backward``) of so many FLOP; an ``elementwise`` operation that reads and writes so
        many bytes; an ``adam`` step on so many values, or one in the memory of a GPU's host
        (``host_adam``).
    kept_nbytes: of a block, what stays in memory between forward and backward.
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
class Training:
    """Seconds of an engine's own steps on a small model whose replicas are all ranks.

    What the host does for a step, a micro-batch and a bucket, and how the engine's work and the
    messages get in each other's way, is in these seconds and in no other row.

    block: of compression, as the file of the engine has it; empty: the engine alone. blocks: of
        the model, each ``flops`` of forward for a micro-batch of ``samples`` samples of ``length``
        tokens, and ``parameters`` values.
    micro, last: of a micro-batch that is followed by another one, and of the last one, the
        optimizer's step included; of the slowest rank.
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
