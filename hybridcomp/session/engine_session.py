"""What attaching to an engine means, written once for every engine.

DeepSpeed's engines (``patches/ds/attach.py``), Megatron's processes (``process`` and
``patches/mcore/attach.py``) and whatever has no patch at all do the same at the same moments:

1. ``begin``: the ranks agree on block and versions, channels are made, the user reads what they do.
2. ``name_parameters``, ``place``, ``measure``: what the caller knows of its model and its groups.
3. ``begin_step`` and ``end_step`` around every optimizer step.
4. ``save`` and ``load`` beside the caller's own checkpoint; ``close`` at the end.

The caller sends its messages through ``channels``, and supplies what only it knows: names of
parameters, which of them a buffer holds (``pieces``), groups, overflows and the loss scale. All
ranks call everything here together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import NAME, Channels, Sent, checkpoint
from hybridcomp.channels.error_feedback import Piece
from hybridcomp.channels.ledger_file import make_together
from hybridcomp.codecs import check_payloads
from hybridcomp.codecs.base import VALUE_DTYPES
from hybridcomp.collectives import check_headers
from hybridcomp.collectives.topology import Ranks, ranks_of
from hybridcomp.config import BLOCK, CompressionConfig, describe, idle_notes, notes
from hybridcomp.job import peer_liveness
from hybridcomp.job.agreement import agree, versions
from hybridcomp.log import Once
from hybridcomp.policy import ONE_WAY, Dimension
from hybridcomp.session import wandb_run
from hybridcomp.session.reporter import Event, Reporter, describe_run

#: attribute of an engine: its session
ATTRIBUTE = "_hybridcomp_session"
#: upstream package -> what its seams do with an engine that is attached, in their order
WHEN_ATTACHED: dict[str, list[Callable[[Any, Channels], None]]] = {}
#: said behind a decision that a restart would forget
ADVICE = "; only hybridcomp.save_state keeps this over a restart"


def session_of(engine: Any) -> EngineSession | None:
    """The session of an attached engine, None for any other object."""
    found: EngineSession | None = getattr(engine, ATTRIBUTE, None)
    return found


def agree_on(block: CompressionConfig | None, *packages: str, **facts: Any) -> None:
    """Compare the block, the versions of ``packages`` and ``facts`` over all ranks.

    None: this rank has no block. Raises AgreementError, naming the ranks that differ.
    """
    settings = {BLOCK: None} if block is None else block.flat()
    agree({**settings, **facts, **versions(*packages)})
    peer_liveness.announce()
    peer_liveness.limit_waits()


def default_device() -> torch.device:
    """Give the device on which the default group reduces."""
    if "nccl" in str(dist.get_backend()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@dataclass(frozen=True)
class Saved:
    """What ``EngineSession.read`` has read of a checkpoint.

    Attributes:
        state: of the job; None: the folder holds none.
        kept: of the ranks; None: the groups of the job are others.
    """

    folder: Path
    state: checkpoint.State | None
    kept: checkpoint.StoredState | None


class EngineSession:
    """One engine's channels, and what happens to them at its steps and checkpoints.

    Attributes:
        channels: what messages go through, one channel for each dimension.
        loss_scale: the factor on the gradients that residuals are in units of.
        reporter: what sums the ledgers of the ranks; None where somebody else reports.
        models: how many models have had their parameters named.
        restored: whether the engine has loaded a checkpoint of its own since ``begin``.
        loaded: whether ``load`` has.
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
        """Hold ``channels`` that exist; ``begin`` makes them.

        Args:
            channels: of this engine alone.
            device: where its messages are; None: where the default group reduces.
            interval: optimizer steps between two reports, 0: none; without it the ledger's own.
            write: takes the figures of a report and its step, on every rank.
            layout: ranks in each group whose coordinates stand in the names of parameters.
            kept_in: the engine's own checkpoints, in words, where they take along what is saved.
        """
        self.channels = channels
        self.loss_scale = 1.0
        self.reporter: Reporter | None = None
        self.models = 0
        self.restored = self.loaded = False
        self.kept_in = kept_in
        self.say = Once()
        self._device = device
        self._interval = interval or (lambda: channels.config.ledger.interval)
        self._write = write
        self._layout = layout

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
        """Agree on ``block`` over all ranks and make its channels; None: no rank has a block.

        ``packages``: upstream packages whose versions have to agree, too; ``absent``: dimensions
        that such a job has no messages of; ``options``: as for the constructor. Raises
        AgreementError.
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
        """The device on which the messages of this engine are."""
        if self._device is None:
            self._device = default_device()
        return self._device

    def open_reporter(self, jsonl: Path | None = None) -> None:
        """Report from now on, into ``jsonl`` and the W&B run that there is; a collective.

        ``jsonl``: None for the block's ``ledger.jsonl``, where it names one. Raises ConfigError on
        every rank where rank 0 cannot write it.
        """
        config = self.channels.config
        describe_run(config)
        if jsonl is None and config.ledger.jsonl:
            jsonl = Path(config.ledger.jsonl)
        if jsonl is not None:
            make_together(jsonl, f"{BLOCK}.ledger.jsonl")
        self.reporter = Reporter(self.channels, jsonl, self.device)

    # what the caller knows of its model and its groups

    def name_parameters(
        self, named: Iterable[tuple[str, Tensor]], common: Iterable[str] = ()
    ) -> None:
        """Take over names: unique in the job, equal on all ranks that reduce a gradient together.

        Residuals are kept by these names, and go to the ranks that state them when another number
        of ranks loads them.
        ``common``: names of vectors that tensor-parallel ranks have in common.
        """
        self.models += 1
        for name, parameter in named:
            setattr(parameter, NAME, name)
            pair = (2,) if parameter.is_complex() else ()  # DDP sums complex numbers as pairs
            numel = int(getattr(parameter, "ds_numel", parameter.numel()))
            self.channels.numels[name] = 2 * numel if pair else numel
            self.channels.factors.learn(name, (*parameter.shape, *pair))
        self.channels.common |= frozenset(common)

    def pieces(self, parameters: Iterable[Tensor]) -> list[Piece]:
        """What a flat buffer holds: these named parameters, whole and one after the other."""
        return [Piece(getattr(p, NAME), 0, p.numel()) for p in parameters]

    def warn(self, dtypes: Iterable[torch.dtype]) -> None:
        """Tell the user where the block compresses nothing, or saves nothing on these dtypes."""
        config = self.channels.config
        self.say(*idle_notes(config))
        self.say(*(note for dtype in dtypes for note in notes(config, dtype)))

    def place(self, groups: Iterable[Ranks | dist.ProcessGroup], *, of_user: bool = False) -> None:
        """Find the nodes, and make the two levels of ``hierarchy``; a collective.

        Args:
            groups: those of this rank that reduce gradients or gather parameters, or their ranks.
            of_user: whether the user made the groups of this job, whose time-outs then stay what
                they are; those of upstream's groups follow the default group's.
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
        sent: Mapping[Dimension, Sent] | None = None,
        only: Collection[Dimension] = ONE_WAY,
    ) -> None:
        """Measure what may turn itself off (``when: auto``), after ``place``; a collective.

        ``group``: replicas of this rank's ``numel`` parameters of ``dtype``; ``sent``: messages of
        a step, as far as they are known; ``only``: of these dimensions. Messages of a dtype that
        no codec takes are native anyway, and nothing is measured for them.
        """
        if dtype not in VALUE_DTYPES:
            return
        known = {} if numel is None else {"numel": numel}
        self.say(*self.channels.weigh(group, dtype, self.device, sent=sent, only=only, **known))

    # steps

    def begin_step(self) -> bool:
        """A step begins, if it has not yet: before its first forward pass, or any of them.

        Returns whether the next one matters: False once nothing is left to be timed.
        """
        return self.channels.open_step(self.device)

    def end_step(
        self, *, overflow: bool = False, loss_scale: float = 1.0, step: int | None = None
    ) -> None:
        """An optimizer step is over: residuals follow the loss scale, the ledger reports.

        ``overflow``: it was skipped, and what its messages left out belongs to no step;
        ``loss_scale``: of the next one; ``step``: the engine's own count of steps taken.
        """
        channels, sampled = self.channels, self.channels.sampling
        channels.step = channels.step + 1 if step is None else step
        if overflow:
            channels.residuals.drop()
        elif loss_scale != self.loss_scale:
            channels.residuals.scale(loss_scale / self.loss_scale)
        self.loss_scale = loss_scale
        advice = "" if self.kept_in else ADVICE
        self.say(*(f"{text}{advice}" for text in channels.close_step(sampled, self.device)))
        every = self._interval()
        if self.reporter is not None and every and channels.step % every == 0:
            self._write(self.reporter.report(channels.step), channels.step)

    def take_events(self) -> list[Event]:
        """The figures of the last report, once, for a trainer that logs at moments of its own."""
        return [] if self.reporter is None else self.reporter.take()

    @property
    def forgetful(self) -> bool:
        """Whether the engine was restored from a checkpoint, and the session was not."""
        return self.restored and not self.loaded

    # checkpoints

    def save(
        self, folder: str | Path, loss_scale: float | None = None, references: bool = False
    ) -> None:
        """Write step and residuals of all ranks into ``folder``, which is whole afterwards.

        ``loss_scale``: the factor on the gradients; None: that of the last step. ``references``:
        whether the caller has written those of parameter deltas there. Raises CodecError where a
        payload was damaged that nobody has told of: it must not be saved as if it were sound.
        """
        check_payloads()
        check_headers()
        scale = self.loss_scale if loss_scale is None else loss_scale
        checkpoint.save(Path(folder), self.channels, scale, self._layout(), references)

    def load(
        self, folder: str | Path, loss_scale: float | None = None, step: int | None = None
    ) -> None:
        """Take over what ``save`` wrote, of this version or the one before.

        ``loss_scale``: the factor on the gradients from now on; None: what it was when saved.
        ``step``: the engine's own count; it then looks after the references of parameter deltas,
        too. On another number of ranks the sum of the residuals is kept.
        """
        self.take_over(self.read(folder), loss_scale, step)

    def read(self, folder: str | Path) -> Saved:
        """Read and check what ``save`` wrote, for ``take_over``; changes nothing. A collective.

        Raises CheckpointError, on every rank, where a file of any is damaged.
        """
        folder = Path(folder)
        state = checkpoint.read_state(folder)
        known = state is None or state.groups == dict(self._layout())
        return Saved(folder, state, checkpoint.read(folder, self.channels) if known else None)

    def take_over(
        self, found: Saved, loss_scale: float | None = None, step: int | None = None
    ) -> None:
        """Go on from what ``read`` has found; arguments as for ``load``. A collective."""
        channels, state, folder = self.channels, found.state, found.folder
        self.loaded = True
        channels.residuals.drop()
        stored = 1.0 if state is None else state.loss_scale
        self.loss_scale = stored if loss_scale is None else loss_scale
        if step is not None:
            channels.step = step
        else:
            channels.resync()
            if state is None:
                self.say(f"{folder} holds no state; step and residuals start at zero")
                return
            channels.step = state.step
        if found.kept is None:
            assert state is not None
            self.say(f"{folder} is of another layout, {state.groups}; residuals start at zero")
            return
        checkpoint.take_over(found.kept, channels, self.loss_scale, self.device)

    def close(self) -> None:
        """Write the totals; the channels carry no message afterwards."""
        if self.reporter is not None:
            self.reporter.close()
