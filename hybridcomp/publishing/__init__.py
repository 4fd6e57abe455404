"""Publish weights from a training job to inference engines: exact deltas, version by version.

1. An engine's adapter (``patches/``) says which stretches of which parameters this rank holds
   (``EngineWeights``).
2. ``Publisher`` divides them among the ranks that hold the same values, compares each with the
   previous version, encodes the changes and passes them to a destination: a folder, a stream, a
   process group.
3. ``WeightReceiver`` checks a version and applies it to its mirror of the weights.

The formats of manifest, part and stream are in ``docs/published_format.md``.
"""

from __future__ import annotations

from hybridcomp.publishing.applied import AppliedVersion
from hybridcomp.publishing.publisher import Publisher
from hybridcomp.publishing.receiver import WeightReceiver
from hybridcomp.publishing.summaries import StartedVersion, VersionSummary
from hybridcomp.publishing.weight_ranges import WeightRange, stretch_of_block
from hybridcomp.publishing.weights import DTYPES, EngineWeights, Held, unless_refused

__all__ = [
    "DTYPES",
    "AppliedVersion",
    "EngineWeights",
    "Held",
    "Publisher",
    "StartedVersion",
    "WeightRange",
    "VersionSummary",
    "WeightReceiver",
    "stretch_of_block",
    "unless_refused",
]
