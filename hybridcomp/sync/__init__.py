"""Islands: groups of ranks that train alone and meet every few optimizer steps.

1. ``islands`` cuts the job into islands and makes the process groups inside and between them.
2. An engine's adapter (``patches/``) lists the weights that this rank's optimizer changes
   (``Masters``).
3. ``IslandMeetings`` follows the optimizer steps: it sends each fragment's weight change through
   the channel of ``sync``, and applies the mean by the ``recurrence``.

Islands that are separate jobs need no groups: ``JobMeetings`` sends through a store that outlives
them (``rendezvous``), in which islands come and go.
"""

from __future__ import annotations

from hybridcomp.sync.islands import Islands, islands_of
from hybridcomp.sync.job_meetings import JobMeetings
from hybridcomp.sync.master_weights import Masters
from hybridcomp.sync.meetings import IslandMeetings
from hybridcomp.sync.recurrence import Fragment, OuterRule

__all__ = [
    "Fragment",
    "IslandMeetings",
    "Islands",
    "JobMeetings",
    "Masters",
    "OuterRule",
    "islands_of",
]
