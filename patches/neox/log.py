"""Write the ledger's figures to GPT-NeoX's W&B run, TensorBoard and Comet.

The seam is ``training_log``, which runs once an iteration, after the engine's step, and gets the
engine, the writers and GPT-NeoX's iteration number. The figures need GPT-NeoX's number, since W&B
refuses decreasing numbers and the DeepSpeed engine's number differs after ``finetune``. GPT-NeoX
does not enable DeepSpeed's monitors, so without this seam the figures would be in the log only.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from hybridcomp.patches.neox.checkout import REQUIREMENT, source
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam
from hybridcomp.session.engine_session import session_of

TRAINING_LOG = Seam(
    REQUIREMENT,
    "megatron.training",
    "training_log",
    (
        "neox_args", "timers", "loss_dict", "total_loss_dict", "learning_rate", "iteration",
        "loss_scale", "report_memory_flag", "skipped_iter", "model", "optimizer",
        "noise_scale_logger",
    ),
    source,
)  # fmt: skip


@around
def make_training_log(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Log the figures that the engine reported since the last iteration, on rank 0."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    result = original(*args, **kwargs)
    session, neox_args = session_of(given["model"]), given["neox_args"]
    write = importlib.import_module("megatron.logging").tb_wandb_log
    for name, value in () if session is None else session.take_events():
        write(
            name,
            value,
            given["iteration"],
            use_wandb=neox_args.use_wandb,
            tensorboard_writer=neox_args.tensorboard_writer,
            comet_experiment=getattr(neox_args, "comet_experiment", None),
        )
    return result


PATCHES = ((TRAINING_LOG, make_training_log),)
