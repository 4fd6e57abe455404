"""Chapters of docs/results about error feedback and rounding, from scripts/bench/loss_study.py."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.loss_chapters import Missing, Study, study_chapter
from bench.loss_layouts import LAYOUTS
from bench.loss_study import BASELINE, COMMANDS
from hybridcomp.compare import Wishes, compared
from hybridcomp.compare.report import markdown_rows, mean_gap

#: the ways of sending gradients that trainings have in common
WAYS = ("4 bits", "4 bits, feedback 8", "4 bits, gaussian", "5 bits", "8 bits", "recommended")
DIFFERENCE = "feedback - none"
FEEDBACK_HEAD = """\
As in [loss](loss.md): the example GPT, 0.85 M parameters, fp32, two CPU ranks, every run of a seed
on the weights and the data of the baseline's run of that seed, gaps paired by seed with the 95%
interval of their mean. Only gradients are encoded, by `blockint`; "feedback 32, 8, 4" keeps what an
encoding left out in residuals of so many bits and adds it to the next message
(`"error_feedback": {"bits": 8}`), the others give it up.
"""
ROUNDING_HEAD = """\
As in [error feedback and the loss](feedback.md); "random" is `blockint` with
`"rounding": "random"`, the others round to the nearest level; "gaussian" has
`"levels": "gaussian"`, "rotated" `"rotate": true`.
"""
UNSENT = """
## What a codec does to a gradient

The gradients of {steps} steps of one native training of 4 samples a step, after clipping, encoded
in many ways beside it. never: the share of the values that were sent in no step although they were
not zero in all; missing: the norm of what the sum of all steps lacks over that of the sum; error:
the norm of the errors of all steps over that of the gradients; second: the root of Adam's second
moment over that without a codec. Kinds that are not listed (norms, biases) have nothing that was
never sent. Sampling alone, half the difference between the gradients of a batch's halves, has this
norm over that of the gradients: {noise}.
"""
OTHERS = """
## In other trainings

Gaps to native's loss in percent, as above; "gaussian" has `"levels": "gaussian"`, and `recommended`
encodes parameters too where they are sent (8 bits). The last column is the gap of 4 bits with
feedback less that without, paired by seed: above 0, feedback makes the loss worse.
"""


def feedback_chapter(source: Path, out: Path) -> str:
    """Write the chapter of gradients with and without error feedback. Raises Missing.

    ``source`` may have a folder ``also`` with further studies, each named for how it trains.
    """
    text = study_chapter("feedback", FEEDBACK_HEAD, source, out, picture="feedback")
    return "\n".join([text, *other_trainings(source, out)])


def other_trainings(source: Path, out: Path) -> list[str]:
    """Return the table of gaps over all studies, and the commands of those in ``also``.

    Writes the gaps to feedback_others.json, by training, layout and way.
    """
    found = [("as above", source), *((f.name, f) for f in sorted(source.glob("also/*")))]
    rows = [["training", "layout", "seeds", "native loss", *WAYS, DIFFERENCE]]
    figures: dict[str, dict[str, dict[str, str]]] = {}
    for name, folder in found:
        for layout in [f.name for f in sorted(folder.iterdir()) if f.name in LAYOUTS]:
            study = Study.of(folder / layout)
            if len(study.seeds) > 1:
                native, gaps = gaps_of(study)
                figures.setdefault(name, {})[layout] = gaps
                cells = [gaps.get(way, "-") for way in (*WAYS, DIFFERENCE)]
                rows.append([name, layout, str(len(study.seeds)), f"{native:.3f}", *cells])
    if len(rows) < 2 or len(found) < 2:
        return []
    (out / "feedback_others.json").write_text(json.dumps(figures, indent=1) + "\n")
    made = [line for _, folder in found[1:] for line in (folder / COMMANDS).read_text().split("\n")]
    commands = ["```", *dict.fromkeys(filter(None, made)), "```"]
    return [OTHERS, *markdown_rows(rows), "", *commands]


def gaps_of(study: Study) -> tuple[float, dict[str, str]]:
    """Return native's loss, the gaps of WAYS to it, and what feedback adds to that at 4 bits."""
    names = [name for name in (BASELINE, *WAYS) if name in study.whole]
    result = compared([f"{name}={study.paths(name)}" for name in names], Wishes())
    gaps = {one.label: np.array(one.gaps) for one in result.comparisons if one.label in WAYS}
    if all(way in gaps for way in WAYS[:2]):
        gaps[DIFFERENCE] = gaps[WAYS[1]] - gaps[WAYS[0]]
    return result.comparisons[0].final_loss, {way: gap_of(found) for way, found in gaps.items()}


def gap_of(gaps: NDArray[np.float64]) -> str:
    """Format the mean of gaps of the seeds, in percent, with its interval."""
    return mean_gap(gaps)


def rounding_chapter(source: Path, out: Path) -> str:
    """Write the chapter of gradients rounded at random, and what codecs do to Adam's moments.

    ``source`` has unsent.json of scripts/bench/unsent_values.py as well. Raises Missing.
    """
    file = source / "unsent.json"
    if not file.is_file():
        raise Missing(f"{file}: missing; scripts/bench/unsent_values.py writes it")
    text = study_chapter("rounding", ROUNDING_HEAD, source, out, picture="rounding")
    counted = json.loads(file.read_text())
    (out / "rounding_unsent.json").write_text(json.dumps(counted, indent=1) + "\n")
    names = ("never", "missing", "error", "second")
    rows = [["way", "kind", *names]] + [
        [way, kind, *(f"{figures[name]:.4f}" for name in names)]
        for way, kinds in counted["ways"].items()
        for kind, figures in kinds.items()
        if kind in ("embeddings", "matrices") or figures["never"]
    ]
    noise = ", ".join(f"{kind} {share:.2f}" for kind, share in counted["noise"].items())
    command = (
        f"scripts/bench/unsent_values.py --steps {counted['steps']} --bits 4 --out unsent.json"
    )
    told = UNSENT.format(steps=counted["steps"], noise=noise)
    return "\n".join([text, told, *markdown_rows(rows), f"\n```\n{command}\n```"])
