"""Raise errors of the work after an optimizer step only once DeepSpeed has counted the step.

``_take_model_step`` is called in the middle of ``DeepSpeedEngine.step``, which counts micro-steps
after it, and of ``PipelineEngine.train_batch``. Otherwise, if a script caught an error about a
version or a meeting and trained on, the next micro-batch would count as the last of a step.
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
#: attribute of an engine inside these calls: the error to raise at their end
LATE = "_hybridcomp_late"


def at_the_end(engine: Any, work: Callable[[], object]) -> None:
    """Do ``work`` inside a step of ``engine``; raise its error at the end of the step."""
    if LATE not in vars(engine):  # called from code that would not raise it
        work()
        return
    try:
        work()
    # also BaseException: an interrupt would shift the accumulation as well
    except BaseException as error:
        setattr(engine, LATE, vars(engine)[LATE] or error)


@around
def make_step(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise the error stored by ``at_the_end``, after calling ``original``."""
    setattr(self, LATE, None)
    result, later = None, None
    try:
        result = original(self, *args, **kwargs)
    except BaseException as problem:  # for example the error of a message without connections
        later = problem
    error: BaseException | None = vars(self).pop(LATE, None) or later
    if error is not None:
        raise error
    return result


PATCHES = ((STEP, make_step), (TRAIN_BATCH, make_step))
