"""Read trainings of Hugging Face's Trainer from the ``trainer_state.json`` that it saves.

Its ``log_history`` has a record every ``logging_steps`` optimizer steps, whose ``loss`` is the mean
since the previous record, records of evaluations (``eval_loss``), and a closing record. A resumed
run continues the history of its checkpoint. ``HybridcompCallback`` adds records with the ledger's
figures, which are used if there is no ledger file. The file has neither seed nor clock: the
Trainer's W&B run has both.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from hybridcomp.escaping import parsed_json
from hybridcomp.metric_names import TRAINER_PREFIX
from hybridcomp.tools.compare.figures import errors_of, ledger_of, sent_until, wire_of
from hybridcomp.tools.compare.json_lines import figures_beside
from hybridcomp.tools.compare.runs import CompareError, Curve, LoggedTraining, check_curve

#: name of the file, in the output folder and in each of its checkpoints
FILE = "trainer_state.json"
LOSS, EVALUATION, TOKENS = "loss", "eval_loss", "num_input_tokens_seen"


def place_in(folder: Path) -> Path | None:
    """Return the file of ``folder``, else of its last checkpoint, else None."""
    if (folder / FILE).is_file():
        return folder / FILE
    found = {
        int(number[1]): path
        for path in folder.glob(f"checkpoint-*/{FILE}")
        if (number := re.fullmatch(r"checkpoint-(\d+)", path.parent.name))
    }
    return found[max(found)] if found else None


def read_training(path: Path, ledger: str) -> LoggedTraining:
    """Read one run, with the file ``ledger`` in its folder or in the folder of its checkpoints.

    Raises CompareError.
    """
    try:
        state = parsed_json(path.read_text(encoding="utf-8"))
        history = [dict(record) for record in state["log_history"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CompareError(f"{path}: expected a log_history of the Trainer ({error})") from None
    records = {record["step"]: record for record in history if {"step", LOSS} <= record.keys()}
    at = sorted(records)
    steps = np.array(at, dtype=np.float64)
    losses = np.array([records[step][LOSS] for step in at], dtype=np.float64)
    check_curve(path, steps, losses)
    evaluations = [record[EVALUATION] for record in history if EVALUATION in record]
    beside = next(
        (place / ledger for place in (path.parent, path.parent.parent) if _owns(place, ledger)),
        None,
    )
    batch = state.get("train_batch_size")
    return LoggedTraining(
        source=path,
        steps=steps,
        losses=losses,
        tokens=_tokens([records[step] for step in at]),
        seconds=None,
        speeds=None,
        identity={"data": {} if batch is None else {"train_batch_size": batch}},
        valid_loss=float(evaluations[-1]) if evaluations else None,
        **(_figures(history, steps) if beside is None else figures_beside(beside, steps)),
    )


def _figures(history: list[dict[str, Any]], steps: Curve) -> dict[str, Any]:
    """Return the fields of a training found in the figures of ``HybridcompCallback``."""
    reports = [(record["step"], wire_of(record, TRAINER_PREFIX)) for record in history]
    return {
        "ledger": ledger_of(history, {}, TRAINER_PREFIX),
        "sent": sent_until(reports, steps),
        "errors": errors_of(((one["step"], one) for one in history), TRAINER_PREFIX),
    }


def _owns(folder: Path, ledger: str) -> bool:
    """Return whether ``folder`` has the Trainer's file, or checkpoints with it, and a ledger."""
    own = (folder / FILE).is_file() or any(folder.glob(f"checkpoint-*/{FILE}"))
    return own and (folder / ledger).is_file()


def _tokens(records: list[dict[str, Any]]) -> Curve | None:
    """Return the tokens trained on at each record; None where the Trainer did not count them."""
    found = np.array([record.get(TOKENS, 0) for record in records], dtype=np.float64)
    return found if (np.diff(found, prepend=0.0) > 0).all() else None
