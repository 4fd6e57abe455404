"""Join the folders that the starts of a W&B run leave where it is resumed without a network.

The folders have the same run id. Offline, W&B does not know the run's progress: each part counts
seconds from 0 again, and also rows, unless the trainer numbers the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridcomp.metric_names import TOKENS

History = dict[int, dict[str, Any]]
#: W&B's clock, in seconds since the start of a part
RUNTIME = "_runtime"
#: optimizer steps where W&B numbers the rows itself (Hugging Face's Trainer)
TRAINER_STEP = "train/global_step"
#: figures that say where in the run a row is, however rows are numbered
PLACES = (TRAINER_STEP, TOKENS)


def by_run(places: Sequence[Path]) -> list[tuple[Path, ...]]:
    """Group the folders and files of one run, each group by the time of its start.

    A folder is named ``offline-run-TIME-ID``, and its file ``run-ID.wandb``; other logs are
    groups of their own.
    """
    groups: dict[object, list[Path]] = {}
    for place in places:
        found = [place] if place.suffix == ".wandb" else sorted(place.glob("run-*.wandb"))
        key = found[0].name if len(found) == 1 else place
        groups.setdefault(key, []).append(place)
    return [tuple(sorted(group, key=_started)) for group in groups.values()]


def _started(place: Path) -> str:
    return (place.parent if place.suffix == ".wandb" else place).name


def joined(parts: Sequence[History]) -> History:
    """Join the rows of a run's parts; where steps repeat, the later part's rows are kept."""
    whole: History = dict(parts[0])
    for part in parts[1:]:
        if part:
            whole = _continued(whole, part)
    return whole


def _continued(whole: History, part: History) -> History:
    """Return ``whole`` up to where ``part`` begins, followed by ``part``."""
    name = next((one for one in PLACES if _first(whole, one) and _first(part, one)), None)
    if name is not None:
        begin = part[_first(part, name)[0]][name]
        ends = [row for row in sorted(whole) if whole[row].get(name, -1) >= begin]
        kept = {row: values for row, values in whole.items() if not ends or row < ends[0]}
    elif min(part) == min(whole) == 0:
        kept = whole  # W&B numbered both parts, and nothing shows which steps repeat
    else:
        kept = {row: values for row, values in whole.items() if row < min(part)}
    if not kept:
        return part
    shift = max(0, max(kept) + 1 - min(part))
    since = _since(kept, part)
    return kept | {row + shift: _later(values, since) for row, values in part.items()}


def _first(history: History, name: str) -> list[int]:
    """Return the first row that has the figure ``name``, or none."""
    return [row for row in sorted(history) if name in history[row]][:1]


def _since(kept: History, part: History) -> float:
    """Return the seconds to add to W&B's clock in ``part``; 0 if that clock continues."""
    before = max((float(values.get(RUNTIME, 0.0)) for values in kept.values()), default=0.0)
    clock = sorted(float(values[RUNTIME]) for values in part.values() if RUNTIME in values)
    if not clock or clock[0] > before:
        return 0.0
    row = (clock[-1] - clock[0]) / max(1, len(clock) - 1)
    return before + row - clock[0]


def _later(values: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    own = dict(values)
    if RUNTIME in own:
        own[RUNTIME] = float(own[RUNTIME]) + seconds
    return own
