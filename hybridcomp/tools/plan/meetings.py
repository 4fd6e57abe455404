"""Propose how often islands should meet (``"sync"``), from the seconds of a meeting and a step.

Islands change the training's result, so they are proposed, never chosen. In a meeting the ranks of
equal position in all islands all-gather the changes of their fp32 shards, in 4 bits with error
feedback (``hybridcomp.sync``). Between two meetings nothing leaves an island.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import torch

from hybridcomp.channels.accounting.memory import size
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.registry import make_codec
from hybridcomp.dimensions import Dimension
from hybridcomp.tools.plan.answer.report import duration
from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.models.model import Model
from hybridcomp.tools.plan.pays import CODING, Coder, bits
from hybridcomp.tools.plan.plan import Plan

#: largest share of an island's time that its meetings may take
SHARE = 0.05
#: fewest steps between meetings to propose; DiLoCo and its successors were published with 15 to 500
LEAST = 10
#: least share of a step that messages have to take for islands to be proposed
WORTH = 0.1
#: the dimensions whose messages stay inside an island
INSIDE: tuple[Dimension, ...] = ("dp", "zero")
BITS = 4


@dataclass(frozen=True)
class MeetingCost:
    """Bytes that one rank sends in a meeting, and the seconds of the meeting."""

    nbytes: float
    seconds: float

    def every(self, step_s: float) -> int:
        """Return the fewest steps of ``step_s`` per meeting that keep meetings within ``SHARE``."""
        steps = self.seconds * (1 - SHARE) / (SHARE * step_s)
        return max(LEAST, _rounded_up(steps))


def _rounded_up(steps: float) -> int:
    """Round up to two digits: an estimate has no more."""
    unit = int(10 ** max(0, math.floor(math.log10(max(steps, 1.0))) - 1))
    return math.ceil(steps / unit) * unit


def measured(numel: float, islands: int, cluster: Cluster, codec: Codec) -> MeetingCost:
    """Return the cost of a meeting by a cluster's figures.

    Args:
        numel: fp32 values of a rank's shard.
        islands: number of nodes, each an island; all ranks of a node send at the same time.

    Raises HybridcompError where ``cluster`` has no figures for the codec or for its links.
    """
    nbytes = float(codec.wire_nbytes(round(numel), torch.float32))
    coding, wire = cluster.encoded_parts(
        "all_gather", codec.spec, "fp32", islands * numel, islands * nbytes, islands, islands,
        busy=True,
    )  # fmt: skip
    return MeetingCost((islands - 1) * nbytes, coding.value + wire.value)


def estimated(
    numel: float, islands: int, rate: float, codec: Codec | None, device: Coder
) -> MeetingCost:
    """Return the cost of a meeting where nothing was measured.

    Args:
        numel: fp32 values of a rank's shard.
        islands: number of islands; one rank of each takes part in a meeting.
        rate: bits a second of a rank's link to the other islands.
        codec: codec of ``sync``; None: meetings are native.
        device: device that runs the codec.

    Raises ConfigError where the codec's speed is not known.
    """
    nbytes = 4 * numel
    coding = 0.0
    if codec is not None:
        coding = CODING * (1 + islands) * nbytes / device.speed(codec) + device.message_s
        nbytes *= bits(codec, torch.float32) / 32
    sent = (islands - 1) * nbytes
    return MeetingCost(sent, 8 * sent / rate + coding)


def proposal(plan: Plan, cluster: Cluster, model: Model) -> str | None:
    """Return a sentence on how often islands of one node should meet, instead of ``plan``.

    None where one node holds the job, where a dimension other than ``dp`` and ``zero`` cuts the
    model (islands refuse it), where messages of ``dp`` and ``zero`` lengthen a step by less than
    ``WORTH``, and where meetings would not shorten it. Raises HybridcompError as ``measured`` does.
    """
    layout, told = plan.layout, plan.prediction
    seen = sum(told.exposed.get(name, 0.0) for name in INSIDE)
    alone = told.seconds - seen
    plain = layout.ranks == layout.data and not layout.offload and plan.engine == "deepspeed"
    if cluster.nodes < 2 or not plain or layout.ranks != cluster.world_size:
        return None
    if seen < WORTH * told.seconds or alone <= 0:
        return None
    codec = make_codec("blockint", bits=BITS)
    cost = measured(model.parameters / cluster.ranks_per_node, cluster.nodes, cluster, codec)
    every = cost.every(alone)
    mean = alone + cost.seconds / every
    if mean >= told.seconds:
        return None
    block = {
        "preset": "diloco", "islands": "node", "every": every, "codec": codec.name, "bits": BITS,
        "error_feedback": True,
    }  # fmt: skip
    return (
        f"messages of {' and '.join(INSIDE)} lengthen the first plan's step by {duration(seen)} of "
        f"{duration(told.seconds)}; islands of one node that meet every {every} steps would send "
        f"{size(cost.nbytes)} a rank in a meeting of {duration(cost.seconds)}, and a step would "
        f"take down to {duration(mean)}. They train otherwise (docs/sync.md), so this is no plan: "
        f'"sync": {json.dumps(block)}'
    )
