"""Report an asynchronous pipeline's figures beside those of the session's messages."""

from __future__ import annotations

import weakref

from hybridcomp.patches.ds.async_pipeline import AsyncPipeline


class PipelineRow:
    """Report a pipeline as a ``StepFollower``; it is held weakly, since the session outlives
    engines.
    """

    name = "pipeline"

    def __init__(self, pipeline: AsyncPipeline) -> None:
        self._known = weakref.ref(pipeline)

    def before_step(self) -> None:
        """Do nothing."""

    def after_step(self, step: int) -> None:
        """Do nothing."""

    def after_skip(self) -> None:
        """Do nothing."""

    def row(self) -> dict[str, float] | None:
        """Return the figures of this stage; rank 0 has the first stage, whose gradients are
        latest.
        """
        pipeline = self._known()
        return None if pipeline is None else pipeline.row()

    def close(self) -> None:
        """Do nothing: the engine frees its pipeline."""
