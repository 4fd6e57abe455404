"""Compare finished runs with a baseline: ``hybridcomp compare``.

runs        data types: trainings, grouped into runs
json_lines  trainings from logs in JSON lines and hybridcomp's ledger
trainer_state  trainings from the state that Hugging Face's Trainer saves
wandb_files trainings from W&B's offline folders
reading     finds the files of runs, and checks that they may be compared
statistics  a common axis, gaps and their intervals
report      tables, Markdown, JSON
draw        the picture (extra ``plot``)
page        report.html (extra ``report``)
chart       the run in W&B (extra ``wandb``)
launch      trains the runs to compare; ``trained`` tells how far they are
command     the command line

Needs no torch. matplotlib, Plotly and W&B are imported only where they are used.
"""

from __future__ import annotations

from hybridcomp.tools.compare.command import Wishes, compare_runs, compared
from hybridcomp.tools.compare.runs import CompareError

__all__ = ["CompareError", "Wishes", "compare_runs", "compared"]
