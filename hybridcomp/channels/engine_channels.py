"""Channels of one engine: place its nodes and close its optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from hybridcomp.channels.accounting.guard import Guard
from hybridcomp.channels.accounting.ledger import Ledger
from hybridcomp.channels.accounting.offload_tuner import OffloadTuner
from hybridcomp.channels.channel import Channel
from hybridcomp.channels.engine_state import ATTRIBUTE, EngineState, specs_of, waiting_for
from hybridcomp.channels.offload.host_copies import HostMoves
from hybridcomp.channels.online_tuner import OnlineTuner
from hybridcomp.channels.residuals.error_feedback import Residuals
from hybridcomp.codecs import poll_payloads
from hybridcomp.collectives import finish_sends, poll_headers
from hybridcomp.collectives.topology import Nodes, Ranks, discover
from hybridcomp.config import BLOCK, CompressionConfig
from hybridcomp.dimensions import DIMENSIONS, TWO_LEVELS, Dimension
from hybridcomp.errors import ConfigError

#: attribute of a parameter: its dotted name, unique in the job
NAME = "_hybridcomp_name"


def channels_of(obj: Any) -> Channels | None:
    """Return the ``Channels`` that ``obj`` was tagged with; None if no engine is attached to it."""
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
            pace=OffloadTuner.of(config, policy),
            residuals=Residuals(config.dp.residual_bits),
        )
        self.by_dimension = {name: Channel(name, self) for name in DIMENSIONS}
        self.host = HostMoves(self, self.by_dimension["offload"])
        self.tuner = OnlineTuner(self, self.by_dimension)
        #: returns the frozen parameters of the model; before ``freeze``, those that a checkpoint
        #: lists
        self.frozen: Callable[[], dict[str, Any]] = dict
        self.to_freeze: dict[str, Any] = {}

    def __getitem__(self, dimension: Dimension) -> Channel:
        return self.by_dimension[dimension]

    def __iter__(self) -> Iterator[Channel]:
        return iter(self.by_dimension.values())

    @property
    def nodes_of_sums(self) -> Nodes | None:
        """Return the nodes whose ranks encode gradient sums together; None: each rank encodes
        alone.

        Low-rank factors are summed in one level, so there each rank encodes alone.
        """
        return None if "dp" in self.policy.low_rank else self.nodes

    def leave_out(self, absent: Collection[Dimension]) -> None:
        """Record dimensions without messages in this job, so that they are not measured."""
        self.absent = frozenset(absent)
        for name in absent:
            self.seen.forget(name)

    def lossy(self, dimension: Dimension) -> bool:
        """Return whether forward messages of ``dimension`` are lossy in this step."""
        codec = self.policy.codecs.get((dimension, "forward"))
        return (
            codec is not None
            and not codec.lossless
            and not self.verdicts.native(dimension, self.step)
        )

    @property
    def sums_in_node(self) -> bool:
        """Return whether any dp messages are summed over micro-batches inside the node."""
        asked = self.config.dp.accumulate == "node" and self["dp"].active
        return asked and "dp" not in self.absent and self.layout is not None

    def place(self, groups: Iterable[Ranks]) -> list[str]:
        """Discover the nodes and build the two-level groups of dp and zero; a collective.

        ``groups``: the groups of this rank. Returns messages for the user. Raises ConfigError on
        all ranks if ``dp.accumulate`` is set and there are not several nodes of several ranks.
        """
        low_rank = self.policy.low_rank
        names = [name for name in TWO_LEVELS if self[name].active and name not in low_rank]
        if self.config.hierarchy == "none" or not names:
            return []
        self.nodes = discover(self.config.widths, self.config.level_codecs)
        notes = self.nodes.prepare(groups)
        text = ", ".join(name for name in names if name not in self.absent)
        asked = self.config.dp.accumulate == "node" and self["dp"].active
        if asked and "dp" not in self.absent and self.layout is None:
            notes.append(self._cannot_accumulate(self.nodes))
        return [f"{text}: {note}" for note in notes] if text else []

    def _cannot_accumulate(self, nodes: Nodes) -> str:
        """Return why no group has two levels; raise ConfigError unless native is allowed."""
        count, ranks = len(set(nodes.of_rank)), len(nodes.of_rank)
        why = "no group of gradients has several ranks on each of several nodes"
        if count == 1:
            why = "all ranks share one node, so that nothing crosses"
        elif count == ranks:
            why = "each node has one rank, whose share would be all gradients"
        if self.config.on_unsupported == "error":
            todo = f"{why} (by {nodes.source}); remove it, or say the nodes by hierarchy"
            raise ConfigError(f"{BLOCK}.dp.accumulate", "node", todo)
        return f"accumulate: {why}; every micro-batch is reduced"

    def close_step(self, sampled: bool, device: torch.device) -> list[str]:
        """Close an optimizer step, after ``step`` was counted: run due measurements, ask the guard.

        A collective. ``sampled``: whether errors were sampled in that step. Returns messages for
        the user, the same on all ranks. Raises CodecError if this rank has received a damaged
        payload or a wrong header; on a GPU one or two steps late, since nothing waits for the
        check.
        """
        poll_payloads()
        poll_headers()
        finish_sends()
        self.late_samples.read()
        self.ledger.drain()
        if self.config.start_step < self.step:
            self.gains.count(self.verdicts, self.step - 1, self.guard.trips)
        tuner = self.tuner
        words = self.node_sums.idle() if self.sums_in_node else []
        words += tuner.unmeasured() + tuner.tune_from_profile(device) + tuner.compare(device)
        if self.guard.flushed("dp", self.step) or self.verdicts.holds_nothing("dp", self.step):
            words += self._drop_residuals()
        if not sampled or not self.guard.watching:
            return words
        return words + self._fall_back(self.guard.decide(self.step, device))

    def _drop_residuals(self) -> list[str]:
        """Free residuals that no future message uses; return a message with the lost norm.

        Parameters that no rank used in the step that sent the residuals keep theirs
        (``DeferredResiduals``).
        """
        norm = self.residuals.norm()
        self.residuals.clear()
        why = "no rank used its parameters in the step that sent the rest"
        lost = f"dp: what error feedback held back, of norm {norm:.3g} on rank 0 after step "
        return [f"{lost}{self.step}, goes into no step any more: {why}"] if norm else []

    def continue_from(self, step: int) -> None:
        """Count on from a checkpoint's ``step``, where dimensions that fell back stay native."""
        self.step = step
        self._fall_back(self.guard.go_back(step))

    def resume_guard(self, state: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Restore the guard from a checkpoint; return messages for the user."""
        return self._fall_back(self.guard.restore(state))

    def will_freeze(self, state: dict[str, Any]) -> list[str]:
        """Keep a checkpoint's frozen parameters until ``freeze``; return messages for the user."""
        self.to_freeze = dict(state)
        count = len(state.get("since", ()))
        if not count or state == self.frozen():
            return []
        todo = "hybridcomp.resume freezes them again; behind another load call hybridcomp.freeze"
        return [f"{count} parameters are frozen in the checkpoint: {todo}"]

    def _fall_back(self, names: Iterable[Dimension]) -> list[str]:
        fallen = {name: self.guard.trips[name] for name in names}
        self.ledger.native_since.update({name: trip.step for name, trip in fallen.items()})
        return [trip.describe(name) for name, trip in fallen.items()]

    @property
    def layout(self) -> list[Any] | None:
        """Return the node of every rank, by which residuals are split; None without two levels."""
        return None if self.nodes is None else self.nodes.layout

    def resync(self) -> None:
        """Make the next gather send exact parameters; a call on one rank is enough."""
        self.generation += 1

    @property
    def sampling(self) -> bool:
        """Return whether this step measures the error of its messages."""
        return self.by_dimension["dp"].sampling
