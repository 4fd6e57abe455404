"""Finished runs held against a baseline: ``hybridcomp compare``.

runs        what is compared
json_lines  trainings from logs in JSON lines and hybridcomp's ledger
trainer_state  those of Hugging Face's Trainer, from the state that it saves
wandb_files trainings from W&B's offline folders
reading     which files, and whether they may be compared
statistics  one axis for all, gaps and their intervals
report      tables, Markdown, JSON
draw        the picture (extra ``plot``)
chart       the run in W&B (extra ``wandb``)
launch      training what is to be compared
command     the command line

Needs no torch. matplotlib and W&B are imported when something is drawn or read with them.
"""

from __future__ import annotations

from hybridcomp.compare.command import Wishes, compare_runs, compared
from hybridcomp.compare.runs import CompareError

__all__ = ["CompareError", "Wishes", "compare_runs", "compared"]
