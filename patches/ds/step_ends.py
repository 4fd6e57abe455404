"""Raise errors of the work after an optimizer step only once DeepSpeed has counted the step.

``_take_model_step`` is called in the middle of ``DeepSpeedEngine.step``, which counts micro-steps
after it, and of ``PipelineEngine.train_batch``. If an error (of a publication or a meeting) left
it there, and the script caught it, DeepSpeed would treat the next micro-batch as a step's last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridcomp.patches.ds.requirement import REQUIREMENT
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam

STEP = Seam(REQUIREMENT, "deepspeed.runtime.engine", "DeepSpeedEngine.step", ("self", "lr_kwargs"))
TRAIN_BATCH = Seam(
    REQUIREMENT, "deepspeed.runtime.pipe.engine", "PipelineEngine.train_batch",
    ("self", "data_iter"),
)  # fmt: skip
#: attribute of an engine during ``step`` and ``train_batch``: the error to raise at their end
LATE = "_hybridcomp_late"


def at_the_end(engine: Any, work: Callable[[], object]) -> None:
    """Do ``work`` inside a step of ``engine``; raise its error at the end of the step."""
    if LATE not in vars(engine):  # outside of ``make_step``, which raises stored errors
        work()
        return
    try:
        work()
    # BaseException, since an interrupt would make micro-steps miscounted, too
    except BaseException as error:
        setattr(engine, LATE, vars(engine)[LATE] or error)


@around
def make_step(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise the error stored by ``at_the_end``, after calling ``original``."""
    setattr(self, LATE, None)
    result, later = None, None
    try:
        result = original(self, *args, **kwargs)
    except BaseException as problem:  # a stored error may have closed the connections
        later = problem
    error: BaseException | None = vars(self).pop(LATE, None) or later
    if error is not None:
        raise error
    return result


PATCHES = ((STEP, make_step), (TRAIN_BATCH, make_step))
