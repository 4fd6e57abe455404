"""Report an asynchronous pipeline's figures in addition to those of the session's messages."""

from __future__ import annotations

import weakref

from hybridcomp.patches.ds.pipeline.async_pipeline import AsyncPipeline
from hybridcomp.session.followers import FollowerBase


class PipelineRow(FollowerBase):
    """Report a pipeline, which is held weakly: the session outlives engines."""

    name = "pipeline"

    def __init__(self, pipeline: AsyncPipeline) -> None:
        self._known = weakref.ref(pipeline)

    def row(self) -> dict[str, float] | None:
        """Return the figures of this stage; rank 0 has the first stage, whose gradients are the
        most delayed.
        """
        pipeline = self._known()
        return None if pipeline is None else pipeline.row()
