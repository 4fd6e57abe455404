"""List what the loader for SGLang relies on, with the signatures of the version ``SGLANG``."""

from __future__ import annotations

from hybridcomp.inference.upstream import SGLANG
from hybridcomp.seams.patching import Seam

ENGINE = "sglang.srt.entrypoints.engine"
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"

#: seams in the process that drives the engine
SEAMS = (
    Seam(SGLANG, ENGINE, "Engine.begin_weight_update", ("self", "selector")),
    Seam(SGLANG, ENGINE, "Engine.update_weights_from_tensor",
         ("self", "named_tensors", "load_format", "flush_cache")),
    Seam(SGLANG, ENGINE, "Engine.end_weight_update", ("self",)),
)  # fmt: skip
#: seams in the worker, which calls the loader with the model and the named tensors
WORKER_SEAMS = (
    Seam(SGLANG, UPDATER, "WeightUpdater.update_weights_from_tensor",
         ("self", "named_tensors", "load_format")),
)  # fmt: skip
