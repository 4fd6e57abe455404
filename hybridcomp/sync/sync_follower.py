"""Hold meetings: what meetings inside a job and meetings between jobs have in common."""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import Channel
from hybridcomp.config import IslandConfig
from hybridcomp.errors import PeerError
from hybridcomp.job.gates import gate
from hybridcomp.job.together import named, together
from hybridcomp.sync.checkpoint_state import checked, read, write
from hybridcomp.sync.master_weights import Masters, bounds, cut, put_back
from hybridcomp.sync.progress import Meeting, Part, Progress
from hybridcomp.sync.recurrence import Fragment, OuterRule


@dataclass
class Figures:
    """Measurements since the last report."""

    meetings: int = 0
    skipped: int = 0
    wait_s: float = 0.0
    drift: float = 0.0
    ahead: int = 0


def drift_of(rows: Tensor, weights: Tensor) -> float:
    """Return how far islands are apart: the norm of their differences over the norm of the weights.

    ``rows``: weight change of each island.
    """
    apart = (rows - rows.mean(dim=0)).square().sum() / len(rows)
    return float((apart / weights.square().sum().clamp(min=1e-30)).sqrt())


class SyncFollower(ABC):
    """A ``StepFollower`` that holds meetings of islands; all ranks call it at the same steps.

    Attributes:
        config: the block's ``sync``.
        progress: clock, parts and pending meetings.
    """

    name = "sync"

    def __init__(
        self, channel: Channel, make: Callable[[], Masters], say: Callable[..., object]
    ) -> None:
        """Prepare for meetings.

        Args:
            channel: the channel of ``sync``.
            make: returns the weights that this rank's optimizer changes; called before the first
                step.
            say: prints a sentence for the user, on rank 0.
        """
        self.config: IslandConfig = channel.state.config.sync
        self.progress = Progress()
        self._channel, self._make, self._say = channel, make, say
        self._masters: Masters | None = None
        self._loaded: Sequence[Mapping[str, Any]] | None = None
        self._figures = Figures()
        self._inside: dist.ProcessGroup | None = None
        self._to_write: list[tuple[int, int, Tensor]] = []  # values to write into the weights
        self._before: list[tuple[Tensor, int, Tensor]] = []  # the old values that these replaced
        self._engine_took = False
        self._told_kept = False

    @property
    def masters(self) -> Masters:
        """Return the weights of this rank, once meetings have begun."""
        assert self._masters is not None, "begun"
        return self._masters

    @property
    def clock(self) -> int:
        """Return the number of requested optimizer steps, including skipped ones."""
        return self.progress.clock

    @property
    def parts(self) -> list[Part]:
        """Return this rank's part of each fragment."""
        return self.progress.parts

    @property
    def under_way(self) -> list[Meeting]:
        """Return the meetings whose means were not taken yet, oldest first."""
        return self.progress.under_way

    def row(self) -> dict[str, float] | None:
        """Return the figures since the last call; None if no meeting was held."""
        found, self._figures = self._figures, Figures()
        if not found.meetings + found.skipped:
            return None
        return {
            "meetings": float(found.meetings),
            "skipped": float(found.skipped),
            "meet_wait_ms": found.wait_s * 1e3,
            "drift": found.drift / max(1, found.meetings),
            "staleness": float(found.ahead),
        }

    def before_step(self) -> None:
        """Begin before the first step; a collective of the job, which may wait for other jobs."""
        if self._masters is not None:
            return
        undo, loaded = contextlib.ExitStack(), self._loaded
        with together("sync: the beginning", undo.close, votes=True):
            undo.callback(setattr, self, "_loaded", loaded)
            undo.callback(self.close)
            self._masters = self._make()
            self._begin()
            if self._to_write:
                undo.callback(self._put_back)
                self._write_out()
        self._written()
        self._catch_up()

    def after_step(self, step: int) -> None:
        """Hold the meetings that are due after a step, by ``clock``; ``step`` is ignored."""
        self.progress.clock += 1
        self.progress.unsent = True
        self._catch_up()

    def _catch_up(self) -> None:
        """Take the means that are due by the clock, then send the fragment that is due.

        All ranks complete each of the two, or none does. If one rank fails, all ranks continue with
        unchanged weights, and unsent changes go into the next message.
        """
        while True:
            if self.under_way and self.under_way[0].due <= self.clock:
                with self._as_one("the meeting"):
                    self._take()
                    if self.masters.kept is not None and not self._told_kept:
                        tell = functools.partial(self._keeps_gradients, self.clock)
                        self.masters.kept.watch(tell)
                    self._write_out()
                continue
            index = self.config.fragment_at(self.clock) if self.progress.unsent else None
            self.progress.unsent = False
            if index is None:
                return
            what = "what this step sends"
            with self._as_one(what):
                problem = self._send(index)
            if problem is not None:
                raise named(problem, self._said(what), PeerError) from problem

    def _said(self, what: str) -> str:
        return f"sync: {what} after step {self.clock}"

    @contextlib.contextmanager
    def _as_one(self, what: str) -> Iterator[None]:
        """Run the ``with`` body; if it fails on any rank that meets, undo it on all of them."""
        undo = contextlib.ExitStack()
        with together(self._said(what), undo.close, votes=True, alone=not self._gates):
            undo.callback(self._kept())
            undo.callback(setattr, self, "progress", self.progress.copy())
            undo.callback(self._put_back)
            yield
        self._written()

    @property
    def _gates(self) -> bool:
        """Return whether ranks may wait for each other in a meeting."""
        return True

    def _kept(self) -> Callable[[], object]:
        """Return a callback that a subclass adds to the undo after a failure; no collective."""
        return bool

    def _write_out(self) -> None:
        """Write the computed values into the weights, and have the engine copy them.

        Islands without values to write also call it, since all islands must pass the same gates.
        """
        for low, high, values in self._to_write:
            self.masters.exchange(low, high, values, self._before)
        gate()
        self._engine_took = True
        self._engine_takes()

    def _engine_takes(self) -> None:
        state = self._channel.state
        # during this gather the job counts as having no islands
        before, state.islands = state.islands, 1
        try:
            self.masters.written()
        finally:
            state.islands = before

    def _put_back(self) -> None:
        """Restore the old values of the weights and of the engine's copies."""
        put_back(self._before)
        if self._engine_took:  # alike on all ranks, which have passed a gate
            self._engine_takes()
        self._written()

    def _written(self) -> None:
        """Discard the values that were to be written."""
        self._to_write, self._before, self._engine_took = [], [], False

    @abstractmethod
    def _begin(self) -> None:
        """Split the weights, and fetch the common state; does not write the weights."""

    def _keeps_gradients(self, met: int) -> None:
        """Warn once, on the island's first rank, that gradients from before a meeting were kept."""
        island, self._told_kept = self._island(), True
        if island is not None:
            self._say(
                f"sync: island {island} keeps gradients over the meeting after step {met} and adds "
                "those of other weights to them; call zero_grad() after every optimizer step, or "
                "choose `every` so that islands meet where an accumulation ends",
                anywhere=True,
            )

    @abstractmethod
    def _send(self, index: int) -> Exception | None:
        """Begin a meeting of fragment ``index``, which becomes the last pending one.

        Returns an error if this rank takes part without a message because it failed.
        """

    @abstractmethod
    def _take(self) -> None:
        """End the oldest pending meeting; does not write the weights."""

    def _cut(self, inside: dist.ProcessGroup | None) -> None:
        """Cut this rank's vector into the parts that it sends, starting from the current weights.

        ``inside``: group of the island's ranks; None: all ranks of the job.
        """
        masters, config, outer = self.masters, self.config, self.config.outer
        rule = OuterRule(
            outer.lr, outer.momentum, outer.nesterov, config.error_feedback, config.decay,
            config.mix, bool(config.staleness),
        )  # fmt: skip
        pieces = masters.shares(inside)
        self.progress.parts = []
        for low, high, numel in cut(masters.numel, config.fragments, *pieces):
            fragment = Fragment(rule, masters.read(low, high, numel))
            self.parts.append(Part(low, high, numel, fragment))

    def _write(self, index: int, values: Tensor) -> None:
        """Queue this rank's part for writing; of replicated weights also other ranks' parts."""
        whole = bounds(self.masters.numel, len(self.parts), index)
        found = self.masters.gathered(self.parts[index], values, whole, self._inside)
        self._to_write.append(found)

    def _fall_back(self, is_own: bool) -> None:
        """Restore every fragment to the weights that all islands last agreed on.

        If only one fragment were restored, the other fragments would spoil it in the next step.
        ``is_own``: whether this rank's island falls back; the other islands only pass the same
        gates.
        """
        for index in range(len(self.parts)):
            if is_own:
                self._write(index, self.parts[index].fragment.fall_back())
            else:
                gate()

    def overflowed(self, loss_scale: float | None) -> str | None:
        """Return, on the island's first rank, a sentence on its step that overflowed.

        ``loss_scale``: loss scale of the next step; None: unknown.
        """
        island = self._island()
        if island is None:
            return None
        scale = "" if loss_scale is None else f", goes on with a loss scale of {loss_scale:g}"
        return (
            f"sync: step {self.clock + 1}: island {island} skips its step for an overflow{scale}, "
            "and meets the others as ever"
        )

    @abstractmethod
    def _island(self) -> str | None:
        """Return the island's name on its first rank; None on its other ranks."""

    def after_skip(self) -> None:
        """Count a step that was skipped for an overflow."""
        self.after_step(-1)

    def close(self) -> None:
        """Free start copies, momentum, residuals and pending meetings. No collective."""
        self.progress = Progress()
        self._channel.state.islands = 1
        if self._masters is not None and self._masters.kept is not None:
            self._masters.kept.stop()
        self._masters = self._loaded = None

    @abstractmethod
    def state(self) -> dict[str, Any] | None:
        """Return this rank's state, of plain types and CPU tensors; None before the first step."""

    def save(self, folder: Path) -> None:
        """Write this rank's state into ``folder``."""
        write(folder, self.state())

    def read(self, folder: Path) -> Sequence[Mapping[str, Any]]:
        """Read and check this rank's entries of the states in ``folder`` (``stored.read``)."""
        return read(folder)

    def check(self, entry: Mapping[str, Any]) -> None:
        """Raise CheckpointError unless ``entry`` has the form that ``state`` returns."""
        checked("the state of sync", entry)

    def resume(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Continue with the next step from ``entries``, which were already checked."""
        self.close()
        self._loaded = list(entries)
