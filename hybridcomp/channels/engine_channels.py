"""Channels of one engine: place its nodes, measure its links and close its optimizer steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from hybridcomp.autotune.memory_limits import has_room
from hybridcomp.autotune.timing import judge, judge_seen
from hybridcomp.autotune.trials import (
    StepTraffic,
    TrialGroup,
    agree_on,
    gathers,
    messages,
    reductions,
)
from hybridcomp.autotune.verdicts import WARM
from hybridcomp.channels import memory_use
from hybridcomp.channels.channel import Channel
from hybridcomp.channels.engine_state import ATTRIBUTE, EngineState, specs_of, waiting_for
from hybridcomp.channels.error_feedback import Residuals
from hybridcomp.channels.guard import Guard
from hybridcomp.channels.host_copies import HostMoves
from hybridcomp.channels.host_pace import Pace
from hybridcomp.channels.ledger import Ledger
from hybridcomp.codecs import poll_payloads, require_kernels
from hybridcomp.collectives import poll_headers
from hybridcomp.collectives.topology import Nodes, Ranks, discover
from hybridcomp.config import CompressionConfig
from hybridcomp.config.memory import size
from hybridcomp.dimensions import DIMENSIONS, MEASURED_EARLY, ROWS, TWO_LEVELS, Dimension
from hybridcomp.job import small_messages

#: number of parameters where it is not known yet: more than any trial takes
UNKNOWN = 1 << 62
#: why a run compresses nothing
ALL_NATIVE = 'the link is faster than the codecs ("when": "auto")'
#: attribute of a parameter: its dotted name, unique in the job
NAME = "_hybridcomp_name"


def channels_of(obj: Any) -> Channels | None:
    """Return the channels that ``obj`` was tagged with, None where no engine is attached to it."""
    found: Channels | None = getattr(obj, ATTRIBUTE, None)
    return found


class Channels(EngineState):
    """All dimensions of one engine, with the state that they share."""

    def __init__(self, config: CompressionConfig) -> None:
        policy = config.policy()
        super().__init__(
            config=config,
            policy=policy,
            ledger=Ledger(codecs=specs_of(policy)),
            guard=Guard(config.limits()),
            seen=waiting_for(config),
            pace=Pace.of(config, policy),
            residuals=Residuals(config.dp.residual_bits),
        )
        self.by_dimension = {name: Channel(name, self) for name in DIMENSIONS}
        self.host = HostMoves(self, self.by_dimension["offload"])

    def __getitem__(self, dimension: Dimension) -> Channel:
        return self.by_dimension[dimension]

    def __iter__(self) -> Iterator[Channel]:
        return iter(self.by_dimension.values())

    @property
    def nodes_of_sums(self) -> Nodes | None:
        """The nodes whose ranks encode a sum of gradients together; None: each rank encodes alone.

        So it is with low-rank factors, which are summed in one level.
        """
        return None if "dp" in self.policy.low_rank else self.nodes

    def leave_out(self, absent: Collection[Dimension]) -> None:
        """Note dimensions that this job sends no messages of: nothing is measured for them."""
        self.absent = frozenset(absent)
        for name in absent:
            self.seen.forget(name)

    def lossy(self, dimension: Dimension) -> bool:
        """Return whether forward messages of this step are lossy: not on a fast link."""
        codec = self.policy.codecs.get((dimension, "forward"))
        return (
            codec is not None
            and not codec.lossless
            and not self.verdicts.native(dimension, self.step)
        )

    def place(self, groups: Iterable[Ranks]) -> list[str]:
        """Discover the nodes and make the two levels of the groups of dp and zero; a collective.

        ``groups``: those that this rank is in. Returns messages for the user.
        """
        low_rank = self.policy.low_rank
        names = [name for name in TWO_LEVELS if self[name].active and name not in low_rank]
        if self.config.hierarchy == "none" or not names:
            return []
        self.nodes = discover(self.config.hierarchy)
        notes = self.nodes.prepare(groups)
        return [f"{', '.join(names)}: {note}" for note in notes]

    def run_autotune(
        self,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        device: torch.device,
        numel: int = UNKNOWN,
        sent: Mapping[Dimension, StepTraffic] | None = None,
        only: Collection[Dimension] = MEASURED_EARLY,
    ) -> list[str]:
        """Time dp and zero, as far as they have ``when: auto``, encoded and native; a collective.

        Call it after ``place``. ``group``: replicas of this rank's parameters, ``numel`` values of
        ``dtype``. ``sent``: messages of a step, where they are known. ``only``: measure these
        dimensions, where others have another group or dtype. Returns messages for the user, the
        same on all ranks. Raises ConfigError where codecs cannot run on ``device``.
        """
        self.is_weighed = True
        known = sent or {}
        memory_use.note(self, known, {n: self[n].group(group) for n in known}, dtype, device)
        if numel != UNKNOWN:
            self.replicas = dist.get_world_size(group)
            share = -(-numel // self.replicas)
            self.share = min(self.share or share, share)
        encoded = {name for (name, _), codec in self.policy.codecs.items() if codec is not None}
        if encoded - self.policy.low_rank and dist.get_world_size() > 1:
            require_kernels(device)
        wanted = [name for name in MEASURED_EARLY if name in only and name not in self.absent]
        names = [name for name in self.config.measured() if name in wanted]
        if not names or dist.get_world_size(group) < 2:
            return []
        place = TrialGroup(self["zero"].group(group), dtype, device)
        common = small_messages.least(torch.tensor(numel, device=device), group)
        with self.gains.measuring():
            self._judge(names, group, int(common), known, place)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the buffers of the trials are as large as the messages
        self._note_verdicts()
        told = [self.verdicts.by_dimension[name].describe(name) for name in names]
        return told + self._nothing_left()

    def _judge(
        self,
        names: Iterable[Dimension],
        group: dist.ProcessGroup | None,
        numel: int,
        sent: Mapping[Dimension, StepTraffic],
        place: TrialGroup,
    ) -> None:
        """Run the trials of each of ``names`` (dp, zero) and keep its verdict; a collective."""
        dtype, device = place.dtype, place.device
        for name in names:
            known = sent.get(name)
            whole = agree_on(known, group, device)
            summed = ROWS[name].summed
            if known is None or not whole:
                known = StepTraffic((numel,), "sum" if summed else "gather")
            codec = self.policy.codecs[name, "forward"]
            assert codec is not None, "the block was checked"
            trials = gathers(codec, place)
            if summed:
                bits = self.residuals.bits if self[name].error_feedback else 0
                trials = reductions(codec, bits, place)
            self.verdicts.by_dimension[name] = judge(trials, known, dtype.itemsize, device, whole)
            del trials

    def _nothing_left(self) -> list[str]:
        """Return a message that nothing is compressed, once no verdict can change any more."""
        if self.idle_reason(self.step) != ALL_NATIVE or self.verdicts.may_change:
            return []
        return [f'nothing is compressed in this run: {ALL_NATIVE}; "when": "always" compresses']

    def idle_reason(self, step: int) -> str:
        """Return why a run that ends at ``step`` has encoded no message."""
        here = [n for n in DIMENSIONS if self[n].active and n not in self.absent]
        if not here and self.config.sync.acts:
            return "islands sent at their meetings alone, and sync has no codec"
        if not here:
            return "the dimensions that the block compresses send nothing in this job"
        alone = dist.is_initialized() and dist.get_world_size() < 2
        if alone and self.config.sync.jobs is None:
            return "one rank sends nothing"
        if all(n in self.verdicts.by_dimension and self.verdicts.native(n, step) for n in here):
            return ALL_NATIVE
        if any(n in self.guard.trips for n in here):
            return "the guard gave up"
        if step <= self.config.start_step:
            return f"it ended at step {step}, and start_step is {self.config.start_step}"
        return f"no message had min_bytes, {self.config.min_bytes}, and a dtype that codecs take"

    def _unmeasured(self) -> list[str]:
        """Return a message about dimensions that are compressed without having been measured."""
        if self.is_weighed:
            return []
        here = [n for n in self.config.measured() if n in MEASURED_EARLY and n not in self.absent]
        why = "not timed, as this job makes its groups in a way of its own"
        return [f"{', '.join(here)}: compressed, {why}"] if here else []

    def _weigh_seen(self, device: torch.device) -> list[str]:
        """Time those of tp and pp that wait for a verdict, with messages like those observed.

        A collective. Returns messages for the user, the same on all ranks.
        """
        waits = self.seen.waiting and self.step > self.config.start_step
        if not waits or not self.seen.is_due():
            return []
        told = []
        for name, (plan, nbytes) in self.seen.plans().items():
            with self.gains.measuring():
                verdict = judge_seen(messages(plan, device), nbytes, device)
            self.verdicts.by_dimension[name] = verdict
            self.seen.forget(name)
            told.append(verdict.describe(name))
        self._note_verdicts()
        return told + (self._nothing_left() if told else [])

    def resume_verdicts(self, state: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Take over the verdicts of a checkpoint; returns messages for the user."""
        told = self.verdicts.restore(state, self.seen.waiting)
        for name in self.verdicts.by_dimension:
            self.seen.forget(name)
        self._note_verdicts()
        return told

    def _compare(self, device: torch.device) -> list[str]:
        """Compare steps of the run where a trial was close; a collective when the comparison ends.

        Returns messages for the user, the same on all ranks.
        """
        if not self.verdicts.by_dimension or self.step < self.config.start_step + WARM:
            return []
        if self.pace.is_measuring:
            return []  # these steps differ in how offload copies
        without, told = set(self.guard.trips), []
        allocates = self.verdicts.begins("dp") and self.verdicts.native("dp", self.step)
        allocates = allocates and self.config.error_feedback("dp")
        if allocates and not has_room(nbytes := memory_use.feedback_nbytes(self), device):
            without.add("dp")
            needed = f"{size(nbytes)} for error feedback"
            told.append(f"dp: stays native: to compare steps, {needed} would be needed")
        compared = self.verdicts.compare(self.step, without, device)
        self._note_verdicts()
        return told + compared + (self._nothing_left() if compared else [])

    def _note_verdicts(self) -> None:
        """Write into the ledger which dimensions are native, and since which step."""
        ledger = self.ledger
        for name, verdict in self.verdicts.by_dimension.items():
            if name in self.guard.trips:
                continue
            ledger.native_since.pop(name, None)
            if not verdict.pays:
                ledger.native_since[name] = verdict.since
                ledger.encoded_since.pop(name, None)
            elif verdict.since:
                ledger.encoded_since[name] = verdict.since

    def open_step(self, device: torch.device) -> bool:
        """Note the first forward pass of a step; return whether later steps may be compared."""
        if self.verdicts.recheck is not None:
            self.verdicts.recheck.open(self.step, device)
        return self.verdicts.may_compare

    def reopen_step(self) -> None:
        """Note that the step was skipped; it begins again with the next first forward pass."""
        if self.verdicts.recheck is not None:
            self.verdicts.recheck.reopen(self.step)

    def close_step(self, sampled: bool, device: torch.device) -> list[str]:
        """Close an optimizer step, after ``step`` was counted: run due measurements, ask the guard.

        ``sampled``: whether that step was a ``sampling`` one. A collective. Returns messages for
        the user, the same on all ranks. Raises CodecError where this rank has received a damaged
        payload or a wrong header; on a GPU a step or two later, as nothing waits for the check.
        """
        poll_payloads()
        poll_headers()
        self.ledger.drain()
        if self.config.start_step < self.step:
            self.gains.count(self.verdicts, self.step - 1, self.guard.trips)
        told = self._unmeasured() + self._weigh_seen(device) + self._compare(device)
        if self.guard.flushed("dp", self.step) or self.verdicts.holds_nothing("dp", self.step):
            self.residuals.clear()
        if not sampled or not self.guard.watching:
            return told
        return told + self._fall_back(self.guard.decide(self.step, device))

    def resume_guard(self, state: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Take over the guard of a checkpoint; returns messages for the user."""
        return self._fall_back(self.guard.restore(state))

    def _fall_back(self, names: Iterable[Dimension]) -> list[str]:
        fallen = {name: self.guard.trips[name] for name in names}
        self.ledger.native_since.update({name: trip.step for name, trip in fallen.items()})
        return [trip.describe(name) for name, trip in fallen.items()]

    @property
    def layout(self) -> list[Any] | None:
        """Return the nodes of all ranks, by which residuals are split; None in one level."""
        return None if self.nodes is None else self.nodes.layout

    def resync(self) -> None:
        """Send exact parameters in the next gather; it is enough that one rank calls it."""
        self.generation += 1

    @property
    def sampling(self) -> bool:
        """Return whether this step measures the error of its messages."""
        return self.by_dimension["dp"].sampling
