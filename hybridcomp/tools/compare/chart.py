"""Log a comparison as a separate run in W&B, in the group of the runs that it compares."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

from hybridcomp.errors import install_hint
from hybridcomp.tools.compare.report import Result, losses
from hybridcomp.tools.compare.runs import CompareError
from hybridcomp.tools.compare.statistics import running_mean, thin


def log(
    result: Result, folder: Path, project: str, group: str, title: str, picture: Path | None
) -> str:
    """Log charts, table and final figures; return where the run is and how to view it.

    Without WANDB_MODE in the environment the run is written offline into ``folder/wandb``. Raises
    CompareError when W&B is not installed.
    """
    try:
        import wandb
    except ImportError:
        raise CompareError(f"the W&B chart needs W&B: {install_hint('wandb')}") from None
    mode: Any = os.environ.get("WANDB_MODE", "offline")
    run = wandb.init(
        project=project,
        group=group or None,
        job_type="comparison",
        name=title,
        dir=str(folder),
        mode=mode,
        config={"runs": {r.label: [str(t.source) for t in r.trainings] for r in result.runs}},
        settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
    )
    head, *rows = losses(result)
    logged: dict[str, Any] = {"comparison": wandb.Table(columns=head, data=rows)}
    labels = [found.label for found in result.runs]
    window = max(1, len(result.aligned.axis) // 20)
    curves = [running_mean(found, window).mean(axis=0) for found in result.aligned.losses]
    axes = {result.aligned.unit: [result.aligned.axis] * len(labels)}
    if result.aligned.seconds is not None:
        axes["seconds"] = [found.mean(axis=0) for found in result.aligned.seconds]
    for name, xs in axes.items():
        logged[f"loss over {name}"] = wandb.plot.line_series(
            xs=[thin(x) for x in xs],
            ys=[thin(y) for y in curves],
            keys=labels,
            title=f"loss over {name} ({title})",
            xname=name,
        )
    if picture is not None:
        logged["curves"] = wandb.Image(str(picture))
    run.log(logged)
    run.summary.update(final_figures(result))
    place, address = Path(run.dir).parent, run.url
    run.finish()
    return address or f"{place}; upload it with: wandb sync {shlex.quote(str(place))}"


def final_figures(result: Result) -> dict[str, float]:
    """Return the summary: ``final/<label>/loss``, ``gap_percent`` and more, where known."""
    found: dict[str, float | None] = {}
    for number, (run, row) in enumerate(zip(result.runs, result.comparisons, strict=True)):
        name = f"final/{run.label}"
        found[f"{name}/loss"] = row.final_loss
        found[f"{name}/valid_loss"] = row.valid_loss
        found[f"{name}/tokens_per_second"] = run.speed()
        if number:
            found[f"{name}/gap_percent"] = row.gap
            found[f"{name}/gap_interval_percent"] = row.gap_interval
            found[f"{name}/clock_gap_percent"] = row.clock_gap
            found[f"{name}/byte_gap_percent"] = row.byte_gap
        for dimension, ways in run.ledger().items():
            for way, figures in ways.items():
                found[f"{name}/{dimension}/{way}/wire_MB"] = figures["wire_MB"]
                found[f"{name}/{dimension}/{way}/ratio"] = figures["ratio"]
    return {key: value for key, value in found.items() if value is not None}
