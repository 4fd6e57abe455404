"""List what the checkpoint engine calls or overrides in verl, with signatures of ``VERL``."""

from __future__ import annotations

from hybridcomp.inference.upstream import VERL
from hybridcomp.seams.patching import Seam

BASE = "verl.checkpoint_engine.base"

SEAMS = (
    Seam(VERL, BASE, "CheckpointEngineRegistry.register", ("backend",)),
    Seam(VERL, BASE, "CheckpointEngineRegistry.new", ("cls", "backend", "args", "kwargs")),
    Seam(VERL, BASE, "CheckpointEngine.prepare", ("self",)),
    Seam(VERL, BASE, "CheckpointEngine.build_topology",
         ("cls", "actor_wg_world_size", "rollout_world_size", "metadata")),
    Seam(VERL, BASE, "CheckpointEngine.init_process_group", ("self", "kwargs")),
    Seam(VERL, BASE, "CheckpointEngine.finalize", ("self",)),
    Seam(VERL, BASE, "CheckpointEngine.send_weights", ("self", "weights", "global_steps")),
    Seam(VERL, BASE, "CheckpointEngine.receive_weights", ("self", "global_steps")),
)  # fmt: skip
