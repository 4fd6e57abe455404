"""Propose how often islands should meet (``"sync"``), from what a meeting and a step take.

Islands change a training: they are proposed, never chosen. A meeting is an all-gather of what each
rank's fp32 shard has moved, in 4 bits with error feedback, between the ranks of one place in all
islands (``hybridcomp.sync``). Between two meetings nothing leaves an island.
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
#: fewer steps are not proposed: DiLoCo and its successors were published with 15 to 500
LEAST = 10
#: messages that hardly lengthen a step are no reason for islands
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
        """Return the fewest steps of ``step_s`` after which meetings take ``SHARE`` or less."""
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
        islands: nodes, each of them an island; all of their ranks send at the same time.

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
        islands: each with one rank of a place.
        rate: bits a second of a rank's link to the others.
        codec: of ``sync``; None: native.
        device: runs the codec.

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
    """Say in a sentence how often islands of one node should meet, in place of ``plan``.

    None where one node holds the job, where a dimension other than ``dp`` and ``zero`` cuts the
    model (islands refuse it), where their messages take less than ``WORTH`` of a step, and where
    meetings would not make steps shorter. Raises HybridcompError as ``measured`` does.
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
