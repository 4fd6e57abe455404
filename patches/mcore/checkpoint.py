"""What a job on megatron-core keeps of hybridcomp beside its checkpoints.

Megatron's trainers save in several formats, each through functions of its own, and none of them has
room for what differs on every rank. So the two calls are the user's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybridcomp import process, saved
from hybridcomp.channels import Channels, checkpoint
from hybridcomp.config import BLOCK
from hybridcomp.config.error_messages import NOTHING
from hybridcomp.errors import ConfigError

WHAT = "the state that save_state keeps"
FILE = "hybridcomp_state.json"


def save_state(folder: str | Path, loss_scale: float | None = None) -> None:
    """See ``hybridcomp.save_state``."""
    channels, folder = _channels("save_state"), Path(folder)
    if process.borrowed() is not None:
        process.say("save_state: DeepSpeed's checkpoints hold this already; nothing is written")
        return
    scale = process.loss_scale() if loss_scale is None else loss_scale
    if checkpoint.needed(channels):
        checkpoint.save(folder, channels, scale)
    problem = None
    if dist.get_rank() == 0:
        state = {
            "format": saved.FORMAT, "step": channels.step, "loss_scale": scale, "groups": _groups(),
        }  # fmt: skip
        _, problem = saved.attempt(lambda: saved.write_json(folder / FILE, state))
    # waits for all ranks: nobody may take the folder for whole before it is
    saved.all_well(problem, WHAT)


def load_state(folder: str | Path, loss_scale: float | None = None) -> None:
    """See ``hybridcomp.load_state``."""
    channels, folder = _channels("load_state"), Path(folder)
    if process.borrowed() is not None:
        process.say("load_state: DeepSpeed's checkpoints hold this already; nothing is read")
        return
    found, problem = None, None
    if dist.get_rank() == 0:
        found, problem = saved.attempt(lambda: _read(folder))
    saved.all_well(problem, WHAT)
    box: list[dict[str, Any] | None] = [found]
    dist.broadcast_object_list(box, src=0)  # the step decides on codecs: one reader, no dissent
    state = box[0]
    scale = float(state["loss_scale"]) if state and loss_scale is None else loss_scale or 1.0
    process.note_state_loaded(scale)
    channels.residuals.drop()
    channels.resync()
    if state is None:
        process.say(f"{folder} holds no state; step and residuals start at zero")
        return
    channels.step = int(state["step"])
    if state["groups"] != _groups():
        process.say(f"{folder} is of another layout, {state['groups']}; residuals start at zero")
        return
    checkpoint.load(folder, channels, scale)


def _channels(call: str) -> Channels:
    channels = process.current()
    if channels is None:
        todo = f"this process has no block, or torch.distributed is not up; do not call {call} here"
        raise ConfigError(BLOCK, NOTHING, todo)
    return channels


def _read(folder: Path) -> dict[str, Any] | None:
    path = folder / FILE
    if not path.is_file():
        return None
    state = saved.read_json(path)
    saved.expect(path, state, "step", saved.is_count)
    saved.expect(path, state, "loss_scale", saved.is_scale)
    saved.expect(path, state, "groups", lambda value: isinstance(value, dict))
    return state


def _groups() -> dict[str, int]:
    """Ranks in each group whose coordinates stand in the names of parameters."""
    if "megatron.core" not in sys.modules:
        return {}
    from hybridcomp.patches.mcore.groups import sizes

    return {name: size for name, size in sizes().items() if name in ("tp", "pp", "ep")}
