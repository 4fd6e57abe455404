"""EngineState: data that all dimensions of one engine share; calls nothing in other layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from hybridcomp.autotune.traffic_profile import TrafficProfile
from hybridcomp.autotune.verdicts import Verdicts
from hybridcomp.channels.accounting.guard import Guard
from hybridcomp.channels.accounting.late_samples import LateSamples
from hybridcomp.channels.accounting.ledger import Ledger
from hybridcomp.channels.accounting.offload_tuner import OffloadTuner
from hybridcomp.channels.accounting.rank_messages import RankMessages
from hybridcomp.channels.accounting.time_saved import TimeSaved
from hybridcomp.channels.residuals.error_feedback import Residuals
from hybridcomp.channels.residuals.low_rank import Factors
from hybridcomp.channels.residuals.node_sums import NodeSums
from hybridcomp.collectives.topology import Nodes
from hybridcomp.collectives.wire.device_clock import SILENT
from hybridcomp.collectives.wire.handle import HOST, Clock
from hybridcomp.config import BLOCK, CompressionConfig
from hybridcomp.config.policy import Policy
from hybridcomp.dimensions import MEASURED_EARLY, Dimension, Direction
from hybridcomp.errors import ConfigError

#: attribute of an attached engine, its optimizer and its parameters that holds the ``Channels``
ATTRIBUTE = "_hybridcomp_channels"

#: error text for a message that is captured in a CUDA graph
GRAPHS = (
    "a graph that is played again sends what was encoded, but nobody counts it, checks it, or "
    "follows a ramp; switch CUDA graphs off (torchtitan: --training.disable_cuda_graphs), or leave "
    "this dimension out of the block"
)


#: backward passes without an optimizer step after which the step counts as missed
UNCOUNTED = 8


@dataclass(eq=False)
class EngineState:
    """State of one engine: its block, step, verdicts, residuals and counters.

    Attributes:
        step: optimizer steps taken.
        passes: backward passes that sent gradients since the last optimizer step, roughly.
        verdicts: decisions on dimensions with ``when: auto``; ``seen``: messages of the dimensions
            that are still undecided.
        node_sums: sums over micro-batches that this rank keeps for its node.
        pace: decides for each step whether copies of dimension ``offload`` are encoded.
        is_weighed: whether dp and zero have been measured before the first step.
        gains: seconds that encoding has saved, as far as measured.
        late_samples: samples of encoding errors, held until the end of the step.
        absent: dimensions that this job sends no messages of, which are not measured.
        messages: messages of dp and zero in a step by group and dtype, as far as the seams know
            them; for ``memory_use``.
        share: number of this rank's parameters divided by its replicas; 0: unknown.
        replicas: number of ranks that average the gradients of this rank's weights, once known.
        nodes: the nodes of the job under ``hierarchy``, once its groups are known.
        numels: elements of each parameter, by the name that its residuals have; empty: not known.
        frozen_numels: numbers of values that no optimizer changes, by dtype and by whether they are
            vectors.
        common: names of small parameters that tensor-parallel ranks share (``replicated``).
        generation: generation of the reference weights of parameter deltas.
        islands: number of islands that meet; without islands the job is one data-parallel group.
        keeps_files: whether optimizer states are kept in encoded files.
        on_pass: called with ``passes`` after each backward pass that sent gradients.
    """

    config: CompressionConfig
    policy: Policy
    ledger: Ledger
    guard: Guard
    seen: TrafficProfile
    pace: OffloadTuner
    residuals: Residuals = field(default_factory=Residuals)
    factors: Factors = field(default_factory=Factors)
    node_sums: NodeSums = field(default_factory=NodeSums)
    verdicts: Verdicts = field(default_factory=Verdicts)
    step: int = 0
    passes: int = 0
    is_weighed: bool = False
    absent: frozenset[Dimension] = frozenset()
    gains: TimeSaved = field(default_factory=TimeSaved)
    late_samples: LateSamples = field(default_factory=LateSamples)
    messages: dict[Dimension, tuple[RankMessages, ...]] = field(default_factory=dict)
    share: int = 0
    replicas: int = 1
    nodes: Nodes | None = None
    numels: dict[str, int] = field(default_factory=dict)
    frozen_numels: Counter[tuple[torch.dtype, bool]] = field(default_factory=Counter)
    common: frozenset[str] = frozenset()
    generation: int = 0
    islands: int = 1
    keeps_files: bool = False
    on_pass: Callable[[int], None] | None = None
    running: int = -1  # autograd's id of the backward pass that last sent gradients

    def note_pass(self) -> None:
        """Count a backward pass that sends gradients."""
        self.passes += 1
        if self.on_pass is not None:
            self.on_pass(self.passes)

    @property
    def timing(self) -> bool:
        """Return whether this step measures device time.

        Timed steps lie half-way between two error samples, whose extra encodings would be timed
        too, and never include the first step, which loads kernels.
        """
        every = self.config.ledger.sample_every
        return every > 0 and self.step % every == every // 2

    def clock(self, device: torch.device) -> Clock:
        """Return the clock of a message on ``device`` in this step. Raises ConfigError in a CUDA
        graph."""
        if device.type != "cuda":
            return HOST
        if torch.cuda.is_current_stream_capturing():
            raise ConfigError(BLOCK, "a message inside of a CUDA graph", GRAPHS)
        if not self.timing:
            return SILENT
        return self.ledger.device_clock(device)


def specs_of(policy: Policy) -> Mapping[tuple[Dimension, Direction], str]:
    """Return the specs of the codecs of a block, by dimension and direction."""
    return {key: codec.spec for key, codec in policy.codecs.items() if codec}


def waiting_for(config: CompressionConfig) -> TrafficProfile:
    """Return the collector of messages of dimensions that are measured during the run (tp, pp)."""
    return TrafficProfile(name for name in config.measured() if name not in MEASURED_EARLY)
