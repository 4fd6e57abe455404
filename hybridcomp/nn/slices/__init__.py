"""Pipelines that work on slices of one sequence at once.

Stage i works on slice k while stage i + 1 works on slice k - 1 (TeraPipe, Li et al., ICML 2021).
``hybridcomp.nn.slices.lengths`` chooses the lengths of the slices.

kv_cache  keys and values of earlier slices, the state of a stage within a step
pipeline  the schedule, and the messages between neighbours, dimension ``pp``
stage     a stage as a module that an engine trains
times     predicted times of slices of any length, fitted to measured times; the fastest lengths
timing    measurements of slices and messages
trials    real steps with the lengths that are predicted to be fastest; takes the fastest
"""

from __future__ import annotations

from hybridcomp.nn.slices.kv_cache import KVCache, attend
from hybridcomp.nn.slices.pipeline import SlicePipeline
from hybridcomp.nn.slices.stage import SlicedStage
from hybridcomp.nn.slices.times import FittedTimes, SliceTimes
from hybridcomp.nn.slices.timing import slice_times
from hybridcomp.nn.slices.trials import TriedSlices, chosen_slices, tried_slices

#: for the support matrix
COVERS = ("pp",)

__all__ = [
    "COVERS", "KVCache", "SlicePipeline", "SliceTimes", "SlicedStage", "FittedTimes", "TriedSlices",
    "attend", "chosen_slices", "slice_times", "tried_slices",
]  # fmt: skip
