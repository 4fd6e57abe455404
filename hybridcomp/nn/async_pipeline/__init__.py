"""Weights and updates of pipelines without a flush at a batch's end; independent of upstream.

``passes`` orders the passes of a stage, ``versions`` keeps the weights that pending micro-batches
need, and ``corrections`` adapt an optimizer's update to late gradients.
``patches/ds/pipeline/async_pipeline.py`` uses these modules.
"""

from hybridcomp.nn.async_pipeline.corrections import UpdateCorrection, make_correction
from hybridcomp.nn.async_pipeline.passes import PassOrder
from hybridcomp.nn.async_pipeline.versions import WeightVersions

__all__ = ["PassOrder", "UpdateCorrection", "WeightVersions", "make_correction"]
