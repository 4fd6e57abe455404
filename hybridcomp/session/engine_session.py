"""Attach hybridcomp to an engine: the steps common to all engines.

DeepSpeed's engines (``patches/ds/attach.py``), Megatron's processes (``process`` and
``patches/mcore/attach.py``) and code without patches call the same methods at the same moments:

1. ``begin``: the ranks agree on block and versions; channels are made and described to the user.
2. ``name_parameters``, ``place``, ``measure``: facts of the caller's model and groups.
3. ``begin_step`` and ``end_step`` around every optimizer step.
4. ``save`` and ``load`` together with the caller's checkpoint; ``close`` at the end.

The caller sends its messages through ``channels``, and supplies names of parameters, the parameters
in each flat buffer (``pieces``), groups, overflows and the loss scale. All ranks call these methods
together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import NAME, Channels, StepTraffic
from hybridcomp.channels.accounting.ledger_file import make_together
from hybridcomp.channels.accounting.memory import MemoryItem, memory_lines
from hybridcomp.channels.memory_use import memory_of
from hybridcomp.channels.residuals.pieces import Piece
from hybridcomp.codecs.base import VALUE_DTYPES
from hybridcomp.collectives.topology import Ranks, ranks_of
from hybridcomp.config import BLOCK, CompressionConfig, describe, idle_notes, notes
from hybridcomp.dimensions import MEASURED_EARLY, Dimension
from hybridcomp.errors import HybridcompError
from hybridcomp.job import peer_liveness
from hybridcomp.job.devices import default_device
from hybridcomp.job.together import ending
from hybridcomp.log import Once
from hybridcomp.session import saved_session, wandb_run
from hybridcomp.session.agreement import agree_on
from hybridcomp.session.closing import close_at_the_end
from hybridcomp.session.followers import Followers, StepFollower
from hybridcomp.session.reporter import Event, Reporter, describe_run

#: attribute of an engine with its session
ATTRIBUTE = "_hybridcomp_session"
#: upstream package -> calls of its seams for each attached engine, in order
WHEN_ATTACHED: dict[str, list[Callable[[Any, Channels], None]]] = {}
#: appended to a message about a decision that a restart would lose
ADVICE = "; only hybridcomp.save_state keeps this over a restart"


def session_of(engine: Any) -> EngineSession | None:
    """Return the session of an attached engine; None for any other object."""
    session: EngineSession | None = getattr(engine, ATTRIBUTE, None)
    return session


class EngineSession:
    """One engine's channels, and their handling at its steps and checkpoints.

    Attributes:
        channels: one channel for the messages of each dimension.
        loss_scale: factor on the gradients, and therefore on the residuals.
        reporter: sums the ledgers of the ranks; None if other code reports.
        models: number of models whose parameters were named.
        restored: whether the engine has loaded its checkpoint since ``begin``.
        loaded: whether ``load`` has run since ``begin``.
        layout: number of ranks in each group whose coordinates are in the names of parameters.
        followers: objects called around steps, such as publishers.
    """

    def __init__(
        self,
        channels: Channels,
        device: torch.device | None = None,
        *,
        interval: Callable[[], int] | None = None,
        write: Callable[[list[Event], int], object] = wandb_run.log,
        layout: Callable[[], Mapping[str, int]] = dict,
        kept_in: str = "",
    ) -> None:
        """Hold existing ``channels``; ``begin`` makes them.

        Args:
            channels: channels of this engine alone.
            device: device of the messages; None: the device on which the default group reduces.
            interval: optimizer steps between two reports, 0: none; by default the ledger's.
            write: called on every rank with the figures of a report and the report's step.
            layout: number of ranks in each group whose coordinates are in the names of parameters.
            kept_in: words for the engine's checkpoints, if these include the session's state.
        """
        self.channels = channels
        self.loss_scale = 1.0
        self.reporter: Reporter | None = None
        self.models, self.restored, self.loaded = 0, False, False
        self.kept_in = kept_in
        self.followers = Followers()
        self.say = Once()
        close_at_the_end(self)
        self._device = device
        self._interval = interval or (lambda: channels.config.ledger.interval)
        self._write = write
        self.layout = layout

    @classmethod
    def begin(
        cls,
        block: CompressionConfig | None,
        device: torch.device | None = None,
        *,
        packages: Iterable[str] = (),
        absent: Collection[Dimension] = (),
        **options: Any,
    ) -> EngineSession | None:
        """Agree on ``block`` over all ranks and make its channels; return None without a block.

        ``packages``: upstream packages whose versions must agree too; ``absent``: dimensions
        without messages in such a job; ``options``: as for the constructor. Raises AgreementError.
        """
        agree_on(block, *packages)
        if block is None:
            describe_run(None)
            return None
        session = cls(Channels(block), device, **options)
        session.channels.leave_out(absent)
        session.say(*describe(block, absent))
        session.open_reporter()
        return session

    @property
    def device(self) -> torch.device:
        """Return the device of this engine's messages."""
        if self._device is None:
            self._device = default_device()
        return self._device

    def open_reporter(self, jsonl: Path | None = None, ranks: Sequence[int] | None = None) -> None:
        """Report from now on, into ``jsonl`` and an existing W&B run; a collective.

        Raises ConfigError on every rank if rank 0 cannot write the file.

        Args:
            jsonl: None for the block's ``ledger.jsonl``, if any; only rank 0's path is used.
            ranks: global ranks of the model whose ranks open a reporter; None: all ranks.
        """
        config, named = self.channels.config, self.channels.config.ledger.jsonl
        describe_run(config)
        if jsonl is None and named:
            jsonl = Path(named)
        make_together(jsonl, f"{BLOCK}.ledger.jsonl", ranks)
        self.reporter = Reporter(self.channels, jsonl, self.device, self.followers)

    # facts of the caller's model and groups

    def name_parameters(
        self, named: Iterable[tuple[str, Tensor]], common: Iterable[str] = ()
    ) -> None:
        """Store parameter names: unique in the job, equal on ranks that reduce a gradient together.

        Residuals are saved under these names; if the number of ranks changes, a rank loads the
        residuals of its own names. ``common``: names of vectors that tensor-parallel ranks share.
        """
        self.models += 1
        for name, parameter in named:
            setattr(parameter, NAME, name)
            # DDP sums complex numbers as pairs of reals
            pair = (2,) if parameter.is_complex() else ()
            numel = int(getattr(parameter, "ds_numel", parameter.numel()))
            self.channels.numels[name] = 2 * numel if pair else numel
            self.channels.factors.learn(name, (*parameter.shape, *pair))
            if not parameter.requires_grad:
                shape = getattr(parameter, "ds_shape", parameter.shape)
                self.channels.frozen_numels[parameter.dtype, len(shape) < 2] += numel
        self.channels.common |= frozenset(common)

    def pieces(self, parameters: Iterable[Tensor]) -> list[Piece]:
        """Return the pieces of a flat buffer that holds these named parameters whole, in order."""
        return [Piece(getattr(p, NAME), 0, p.numel()) for p in parameters]

    def warn(self, dtypes: Iterable[torch.dtype]) -> None:
        """Tell the user the memory use, and which settings save nothing for these dtypes."""
        config = self.channels.config
        saves_nothing = (note for dtype in dtypes for note in notes(config, dtype))
        self.say(*memory_lines(self.memory), *idle_notes(config), *saves_nothing)

    def place(self, groups: Iterable[Ranks | dist.ProcessGroup], *, of_user: bool = False) -> None:
        """Find the nodes, and set up the two levels of ``hierarchy``; a collective.

        Args:
            groups: groups of this rank that reduce gradients or gather parameters, or these groups'
                ranks.
            of_user: whether the user made the job's groups: their time-outs then stay unchanged,
                while groups made by upstream get the default group's time-out.
        """
        ranks = {group if isinstance(group, tuple) else ranks_of(group) for group in groups}
        self.say(*self.channels.place(ranks))
        if not of_user:
            peer_liveness.limit_waits()

    def measure(
        self,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        numel: int | None = None,
        sent: Mapping[Dimension, StepTraffic] | None = None,
        only: Collection[Dimension] = MEASURED_EARLY,
    ) -> None:
        """Measure dimensions with ``when: auto``, after ``place``; a collective.

        ``group``: ranks with replicas of this rank's ``numel`` parameters of ``dtype``; ``sent``:
        messages of a step, as far as known; ``only``: the dimensions to measure. Messages of a
        dtype that no codec accepts are always native, and not measured.
        """
        if dtype not in VALUE_DTYPES:
            return
        known = {} if numel is None else {"numel": numel}
        autotune = self.channels.tuner.run_autotune
        self.say(*autotune(group, dtype, self.device, sent=sent, only=only, **known))

    @property
    def memory(self) -> list[MemoryItem]:
        """Return this rank's memory use by channels and followers; call it after ``measure``."""
        return memory_of(self.channels)

    # steps

    def follow(self, follower: StepFollower) -> None:
        """Call ``follower`` around every optimizer step, and close it with the session."""
        self.followers.append(follower)

    def before_step(self) -> None:
        """Call the followers while the weights are still those before an optimizer step.

        Call it right before the engine's own step, or at any earlier moment that all ranks of the
        engine reach; further calls in the same step are harmless.
        """
        self.followers.before_step()

    def begin_step(self) -> bool:
        """Begin a step unless it has begun; call before the step's first or every forward pass.

        Returns whether further steps need this call: False once nothing is left to be timed.
        """
        return self.channels.tuner.open_step(self.device)

    def end_step(
        self, *, overflow: bool = False, loss_scale: float = 1.0, step: int | None = None
    ) -> None:
        """End an optimizer step: scale the residuals to the loss scale, report the ledger.

        ``overflow``: whether the step was skipped; then residuals are dropped. ``loss_scale``: loss
        scale of the next step. ``step``: the engine's count of steps taken.
        """
        channels, sampled = self.channels, self.channels.sampling
        channels.step, channels.passes = channels.step + 1 if step is None else step, 0
        with ending(f"the end of step {channels.step}"):
            if overflow:
                channels.residuals.drop()
            elif loss_scale != self.loss_scale:
                channels.residuals.scale(loss_scale / self.loss_scale)
            self.loss_scale = loss_scale
            advice = "" if self.kept_in else ADVICE
            told = channels.close_step(sampled, self.device)
            whose = self.reporter.whose if told and self.reporter is not None else ""
            self.say(*(f"{whose}{text}{advice}" for text in told))
            if overflow:
                # a loss scale of 1 means that there is no scaler
                self.followers.overflowed(None if loss_scale == 1.0 else loss_scale)
            try:
                self.followers.after_step(channels.step)
            except HybridcompError as error:
                if error.names_rank:  # other ranks may not have the error, and enter the report
                    self._report()
                raise
            self._report()

    def _report(self) -> None:
        """Report the ledger when a report is due; a collective."""
        step, every = self.channels.step, self._interval()
        if self.reporter is not None and every and step % every == 0:
            self._write(self.reporter.report(step, self.followers), step)

    def skip_step(self) -> None:
        """Follow a step that a loss scaler skipped; in an island it counts, as others may take it.

        Otherwise the islands would report and decide at different steps.
        """
        if self.channels.config.sync.acts:
            self.end_step(overflow=True, loss_scale=self.loss_scale)
        else:
            self.followers.after_skip()

    def take_events(self) -> list[Event]:
        """Return the last report's figures, only once; for trainers that log at other steps."""
        return [] if self.reporter is None else self.reporter.take()

    @property
    def forgetful(self) -> bool:
        """Return whether the engine was restored from a checkpoint, but the session was not."""
        return self.restored and not self.loaded

    # checkpoints

    def save(
        self, folder: str | Path, loss_scale: float | None = None, references: bool = False
    ) -> None:
        saved_session.save(self, Path(folder), loss_scale, references)

    def load(
        self, folder: str | Path, loss_scale: float | None = None, step: int | None = None
    ) -> None:
        """Load the files of ``save``: ``saved_session.read``, then ``take_over``."""
        saved_session.take_over(self, saved_session.read(self, Path(folder)), loss_scale, step)

    def close(self) -> None:
        """Write the totals; the channels send no message afterwards."""
        try:
            self.followers.close()
        finally:
            if self.reporter is not None:
                self.reporter.close()
