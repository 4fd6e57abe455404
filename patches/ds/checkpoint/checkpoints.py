"""Save and load residuals beside DeepSpeed's checkpoints, and save exact weights in them.

The seam is ``DeepSpeedEngine.save_checkpoint`` and not ``_save_checkpoint``: it is public, the
pipeline engine does not override it, and on its return the ``latest`` file points to the
checkpoint, so residuals must be on disk before. ``save_16bit_model`` saves weights without a
checkpoint; it is wrapped too, since gathered weights may be inexact.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hybridcomp.channels import channels_of
from hybridcomp.channels.checkpoint import checkpoint_note
from hybridcomp.errors import CheckpointError
from hybridcomp.job.gates import gate
from hybridcomp.job.saved_together import files_together
from hybridcomp.job.together import together
from hybridcomp.log import say
from hybridcomp.patches.ds import island_unit, step_begins
from hybridcomp.patches.ds.checkpoint import exact_weights, universal
from hybridcomp.patches.ds.job_facts import loss_scale
from hybridcomp.patches.ds.offload import saved_states
from hybridcomp.patches.ds.pipeline.pipe import drain
from hybridcomp.patches.ds.requirement import REQUIREMENT
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam
from hybridcomp.session import saved_session
from hybridcomp.session.engine_session import session_of

MODULE = "deepspeed.runtime.engine"

SAVE = Seam(
    requirement=REQUIREMENT,
    module=MODULE,
    qualname="DeepSpeedEngine.save_checkpoint",
    parameters=(
        "self", "save_dir", "tag", "client_state", "save_latest", "exclude_frozen_parameters",
    ),
)  # fmt: skip
SAVE_16BIT = Seam(
    requirement=REQUIREMENT,
    module=MODULE,
    qualname="DeepSpeedEngine.save_16bit_model",
    parameters=("self", "save_dir", "save_filename", "exclude_frozen_parameters"),
)
LOAD = Seam(
    requirement=REQUIREMENT,
    module=MODULE,
    qualname="DeepSpeedEngine.load_checkpoint",
    parameters=(
        "self", "load_dir", "tag", "load_module_strict", "load_optimizer_states",
        "load_lr_scheduler_states", "load_module_only", "custom_load_fn",
    ),
)  # fmt: skip


@around
def make_save_checkpoint(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Save exact weights, and this rank's residuals before upstream updates its ``latest`` file."""
    session = session_of(self)
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    bound.apply_defaults()
    with ExitStack() as exact:
        # without a save_dir nothing is written, and upstream reports the error
        if session is None or not bound.arguments["save_dir"]:
            drain(self, "for a checkpoint")
        else:
            with files_together(exact_weights.WHAT):
                drain(self, "for a checkpoint")
                tag, save_dir = bound.arguments["tag"], bound.arguments["save_dir"]
                tag = f"global_step{self.global_steps}" if tag is None else tag
                folder = Path(save_dir) / str(tag)
                references = exact_weights.save(folder, self, session.channels)
                saved_states.save(folder, self.optimizer)
                session.save(folder, loss_scale(self), references)
                bound.arguments["save_dir"] = island_unit.folder_of(self, save_dir)
                bound.arguments["tag"] = tag
                gate()  # its gathers begin and end on all ranks
                weights = exact_weights.exact_parameters(self, session.channels, waits=True)
                exact.enter_context(weights)
        return original(*bound.args, **bound.kwargs)


@around
def make_save_16bit_model(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Make upstream save exact weights."""
    with exact_weights.exact_parameters(self, channels_of(self)):
        return original(self, *args, **kwargs)


@around
def make_load_checkpoint(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Load step and residuals when upstream loads the optimizer's state."""
    session = session_of(self)
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    bound.apply_defaults()
    loads, undo = bound.arguments, ExitStack()
    load_dir, tag = loads["load_dir"], loads["tag"]
    whole = loads["load_optimizer_states"] and not loads["load_module_only"]
    if session is None:
        tag = universal.newest(self, load_dir) if tag is None else tag
        if whole and tag is not None:
            folder = universal.beside(self, Path(load_dir) / str(tag))
            saved_states.refuse(folder)
            say(*checkpoint_note.dropped(folder, None))
        return original(self, *args, **kwargs)
    found = None
    # raises for damaged files before upstream changes any weights
    with together(exact_weights.WHAT, undo.close, error=CheckpointError):
        drain(self, "for the weights of a checkpoint")
        tag = universal.newest(self, load_dir) if tag is None else tag
        folder = Path(load_dir) / str(tag)
        if tag is not None and whole:
            bring = universal.bring(self, folder)
            folder = universal.folder_of_state(self, folder)
            found = saved_session.read(session, folder)
            exact_weights.check(folder, session.channels)
            measured = session.channels.config.measured()
        if tag is not None:
            saved_states.read(Path(load_dir) / str(tag), self)
        if tag is not None and load_dir:
            loads["load_dir"] = island_unit.saved_folder(self, load_dir, str(tag))
            loads["tag"] = str(tag)
        put_back = exact_weights.forget(self)
        undo.callback(put_back)
    result: Any = (None, None)
    has_returned = False
    try:
        result = original(*bound.args, **bound.kwargs)
        has_returned = True
    finally:
        if result[0] is None and (has_returned or not folder.is_dir()):
            put_back()  # upstream found no checkpoint
    if result[0] is None:
        return result
    if found is None:
        session.channels.continue_from(self.global_steps)
        session.channels.residuals.clear()
    else:
        saved_session.take_over(session, found, loss_scale(self), self.global_steps, bring)
        with together(exact_weights.WHAT, error=CheckpointError):
            exact_weights.resume(folder, self, session.channels)
        if measured:  # the checkpoint may be of a comparison of steps
            step_begins.watch(self, session)
    session.channels.node_sums.drop()
    return result


PATCHES = (
    (SAVE, make_save_checkpoint),
    (SAVE_16BIT, make_save_16bit_model),
    (LOAD, make_load_checkpoint),
)
