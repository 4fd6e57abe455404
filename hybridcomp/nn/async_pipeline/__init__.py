"""Weights and updates of pipelines that do not wait for a batch's end; upstream-independent.

``versions`` keeps the weights with which pending micro-batches were computed; ``corrections``
change what an optimizer does with late gradients. ``patches/ds/pipeline/async_pipeline.py`` runs
them.
"""

from hybridcomp.nn.async_pipeline.corrections import UpdateCorrection, make_correction
from hybridcomp.nn.async_pipeline.passes import PassOrder
from hybridcomp.nn.async_pipeline.versions import WeightVersions

__all__ = ["PassOrder", "UpdateCorrection", "WeightVersions", "make_correction"]
