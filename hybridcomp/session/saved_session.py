"""Write a session's state next to the caller's checkpoint, and continue from such a state.

All ranks make all calls together. ``read`` checks the files of every rank before anything changes;
``take_over`` then cannot fail on one rank alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from hybridcomp.channels import Channels
from hybridcomp.channels.checkpoint import checkpoint_note, kept_state
from hybridcomp.channels.checkpoint import save_load as checkpoint
from hybridcomp.codecs import check_payloads
from hybridcomp.collectives import check_headers
from hybridcomp.errors import CheckpointError
from hybridcomp.job.saved_together import files_together
from hybridcomp.job.together import together
from hybridcomp.log import Once
from hybridcomp.session.followers import Followers


class SavedParts(Protocol):
    """The parts of an ``EngineSession`` (which imports this module) that checkpoints need."""

    channels: Channels
    loss_scale: float
    loaded: bool
    say: Once
    followers: Followers
    layout: Callable[[], Mapping[str, int]]

    @property
    def device(self) -> torch.device:
        """Return the device of this rank."""


@dataclass(frozen=True)
class Saved:
    """Contents of a checkpoint, from ``read``.

    Attributes:
        state: the job's state; None if the folder has none.
        kept: residuals of the ranks; None if the job's groups have changed.
        lost: states that restart because the folder lacks their files; only on rank 0.
        followed: for each stateful follower, in order, the state from which it continues.
    """

    folder: Path
    state: checkpoint.State | None
    kept: checkpoint.StoredState | None
    lost: list[str]
    followed: Sequence[Sequence[Mapping[str, Any]]]


#: advice on how to get files that a folder lacks
BRING = "To bring them: copy them from where they were saved; a run without hybridcomp saves none"
#: explanation if the job's file exists but others are missing
GONE = "They were removed, or the run that saved the others had none"


def save(
    session: SavedParts, folder: Path, loss_scale: float | None = None, references: bool = False
) -> None:
    """Write step and residuals of all ranks into ``folder``, which is complete afterwards.

    ``loss_scale``: the factor on the gradients; None: the last step's. ``references``: whether the
    caller has written the references of parameter deltas into the folder. Raises CodecError for a
    damaged payload that no report has raised yet, so that no wrong state is saved.
    """
    with files_together(checkpoint.WHAT):
        check_payloads()
        check_headers()
        scale = session.loss_scale if loss_scale is None else loss_scale
        checkpoint.save(folder, session.channels, scale, session.layout(), references)
        for follower in session.followers.stateful:
            follower.save(folder)


def read(session: SavedParts, folder: Path) -> Saved:
    """Read and check the files of ``save``, also of its previous version, for ``take_over``.

    Changes nothing. Raises CheckpointError on every rank if any rank's file is damaged.
    """
    with together(checkpoint.WHAT, error=CheckpointError):
        state = checkpoint.read_state(folder)
        known = state is None or state.groups == dict(session.layout())
        step = None if state is None else state.step
        kept = checkpoint.read(folder, session.channels, step) if known else None
        followed = [follower.read(folder) for follower in session.followers.stateful]
        return Saved(folder, state, kept, _lost(session, folder, kept), followed)


def _lost(session: SavedParts, folder: Path, kept: checkpoint.StoredState | None) -> list[str]:
    """Return the states that restart because ``folder`` lacks their files; no collective."""
    lost = [] if kept is None else list(kept.lost)
    channels = session.channels
    deltas, kind = channels["zero"].delta and channels.lossy("zero"), checkpoint_note.PARAMETERS
    wrote = any(folder.glob(f"{kind}_*"))
    if deltas and not wrote and not checkpoint_note.wrote_none(folder, kind):
        lost.append("deltas begin with an exact gather")
    names = [follower.name for follower in session.followers.stateful]
    return lost + [f"{n} begins anew" for n in names if not any(folder.glob(f"hybridcomp_{n}_*"))]


def take_over(
    session: SavedParts,
    parts: Saved,
    loss_scale: float | None = None,
    step: int | None = None,
    bring: str = BRING,
) -> None:
    """Continue from the result of ``read``; print one line on what restarts without its files.

    ``bring``: the end of that line. ``loss_scale``: the factor on the gradients from now on; None:
    the saved factor. ``step``: step count of an engine that has also restored the references of
    parameter deltas; None: the saved count, and deltas begin anew. A saved state of another step is
    ignored, with a message. If the number of ranks has changed, the residuals' sum is kept.
    """
    undo = ExitStack()
    with together(checkpoint.WHAT, undo.close, error=CheckpointError):
        undo.callback(kept_state.put_back(session.channels))
        undo.callback(_restore, session, session.loaded, session.loss_scale)
        _take_over(session, parts, loss_scale, step, bring)
    for follower, entries in zip(session.followers.stateful, parts.followed, strict=True):
        follower.resume(entries)


def _restore(session: SavedParts, loaded: bool, loss_scale: float) -> None:
    session.loaded, session.loss_scale = loaded, loss_scale


def _take_over(
    session: SavedParts, parts: Saved, loss_scale: float | None, step: int | None, bring: str
) -> None:
    channels, state, folder = session.channels, parts.state, parts.folder
    session.loaded = True
    channels.residuals.clear()
    stored = 1.0 if state is None else state.loss_scale
    session.say(*channels.will_freeze({} if state is None else state.frozen))
    session.loss_scale = stored if loss_scale is None else loss_scale
    if step is not None:
        channels.continue_from(step)
    else:
        channels.resync()
        if state is None:
            lost = ["steps count from zero", *parts.lost]
            session.say(*checkpoint_note.lacking(folder, lost, bring))
            return
        channels.continue_from(state.step)
    if state is not None and parts.lost:
        bring = GONE
    session.say(*checkpoint_note.lacking(folder, parts.lost, bring))
    if state is not None and state.step != channels.step:
        later = state.step > channels.step
        why = "as a later save did not end" if later else "saved again without hybridcomp"
        session.say(
            f"{folder / checkpoint.STATE} is of step {state.step}, and the checkpoint beside it of "
            f"step {channels.step}, {why}: residuals, and what guard and when: auto decided, begin "
            "anew"
        )
        return
    if parts.kept is None:
        assert state is not None
        session.say(f"{folder} is of another layout, {state.groups}; residuals start at zero")
        return
    checkpoint.take_over(parts.kept, channels, session.loss_scale, session.device)
