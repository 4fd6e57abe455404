"""Read the runs named on a command line, and check that they may be compared."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridcomp.foreign import one_line
from hybridcomp.tools.compare import json_lines, trainer_state, wandb_files
from hybridcomp.tools.compare.runs import CompareError, LoggedTraining, Run
from hybridcomp.tools.compare.wandb_parts import by_run

#: sections of DeepSpeed's settings that may differ between the runs of a comparison
APART = frozenset(
    {"compression", "wandb", "tensorboard", "csv_monitor", "comet", "steps_per_print"}
)
ABSENT = "nothing"
EXPECTED = (
    f"a log ({json_lines.LOG}; HYBRIDCOMP_RECORD=FILE writes one of any DeepSpeed job under "
    f"hybridcomp.run), W&B's offline-run-* or the Trainer's {trainer_state.FILE}, or the folder of "
    "one"
)
#: exceptions raised on reading a file that only looks like a log
DAMAGED = (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError)


def read_runs(texts: Sequence[str], ledger: str) -> list[Run]:
    """Read the runs of ``[LABEL=]PATHS`` words, baseline first. Raises CompareError."""
    runs = [read_run(*split_label(text), ledger) for text in texts]
    labels = [run.label for run in runs]
    for label in labels:
        if labels.count(label) > 1:
            raise CompareError(f"{label}: two runs have this label; write LABEL=FILE")
    return runs


def split_label(text: str) -> tuple[str, str]:
    """Split ``LABEL=PATHS``; without a label it is the folder's or the file's name."""
    label, equals, paths = text.partition("=")
    if equals:
        return label, paths
    path = Path(text)
    own = path.name in (json_lines.LOG, trainer_state.FILE)
    return (path.parent.name if own else path.stem) or text, text


def read_run(label: str, paths: str, ledger: str) -> Run:
    """Read the trainings at ``paths`` (files, folders and globs, with commas between).

    A folder is a W&B offline run, or holds a log ``loss.jsonl`` or the Trainer's
    ``trainer_state.json``, or one such folder for each seed.
    Raises CompareError.
    """
    found = [place for path in _split_paths(paths) for place in _places(path)]
    trainings = [_read(parts, ledger) for parts in by_run(found)]
    seeds = [training.seed for training in trainings]
    if len(set(seeds)) < len(seeds) and None not in seeds:
        raise CompareError(f"{label}: two logs have one seed, {seeds}; give one log for each seed")
    there = [bool(training.ledger) for training in trainings]
    if any(there) and not all(there):
        lacking = trainings[there.index(False)].source.with_name(ledger)
        raise CompareError(f"{lacking}: missing, while other seeds have one")
    return Run(label, trainings)


def _split_paths(paths: str) -> list[Path]:
    """Return the files and folders of ``paths``; names may have commas. Raises CompareError."""
    parts = paths.split(",")
    found = _in_fewest_names(parts)
    if found is None:
        lacking = next((part for part in parts if not _matches(part)), paths)
        raise CompareError(f"{lacking}: no such run; expected {EXPECTED}")
    return found


def _in_fewest_names(parts: list[str]) -> list[Path] | None:
    """Join ``parts`` into as few names as possible, each matching files, and return the matches.

    "4 bits, rotated" is then one run, beside a run "4 bits". None where some part matches nothing.
    """
    if not parts:
        return []
    for count in range(len(parts), 0, -1):
        some = _matches(",".join(parts[:count]))
        others = _in_fewest_names(parts[count:]) if some else None
        if others is not None:
            return some + others
    return None


def _matches(text: str) -> list[Path]:
    return [Path(text)] if Path(text).exists() else sorted(map(Path, glob.glob(text)))


def _places(path: Path) -> list[Path]:
    """Return the logs and W&B folders at a path. Raises CompareError if there are none."""
    if path.is_file():
        return [path]
    if (path / json_lines.LOG).is_file():
        return [path / json_lines.LOG]
    if any(path.glob("*.wandb")):
        return [path]
    if (state := trainer_state.place_in(path)) is not None:
        return [state]
    folders = sorted(place for place in path.iterdir() if place.is_dir())
    if seeds := [state for folder in folders if (state := trainer_state.place_in(folder))]:
        return seeds
    for pattern in (
        f"*/{json_lines.LOG}",
        "offline-run-*",
        "wandb/offline-run-*",
        "*/wandb/offline-run-*",
    ):
        if found := sorted(path.glob(pattern)):
            return found
    raise CompareError(f"{path}: found no run in this folder; expected {EXPECTED}")


def _read(parts: tuple[Path, ...], ledger: str) -> LoggedTraining:
    """Read one training. Raises CompareError, also for a damaged file or one that is no log."""
    path = parts[0]
    try:
        if path.is_dir() or path.suffix == ".wandb":
            folders = (part if part.is_dir() else part.parent for part in parts)
            return wandb_files.read_training(*folders)
        kind = trainer_state if path.suffix == ".json" else json_lines
        return kind.read_training(path, ledger)
    except CompareError:
        raise
    except DAMAGED as error:
        said = one_line(f"{type(error).__name__}: {error}")
        raise CompareError(f"{path}: damaged, or no log ({said}); expected {EXPECTED}") from None


def check_comparable(baseline: Run, run: Run) -> list[str]:
    """Return which settings differ. Raises CompareError for another model, data order or seed."""
    notes: dict[str, None] = {}
    for own, other in zip(
        run.trainings, (baseline.trainings[i] for i in pair(baseline, run)), strict=True
    ):
        for name, what in (("model", "model"), ("data", "data order")):
            found, expected = (dict(t.identity.get(name) or {}) for t in (own, other))
            both = [key for key in expected if key in found]
            wrong = [key for key in both if found[key] != expected[key]]
            if wrong:
                raise CompareError(
                    f"{run.label}: another {what} than {baseline.label}: {name}.{wrong[0]} is "
                    f"{found[wrong[0]]!r} to {expected[wrong[0]]!r} ({own.source}, "
                    f"{other.source}); compare runs that differ in compression only"
                )
            if not both:
                notes[f"{run.label}: its log does not say which {what}; nobody checked it"] = None
        for key, (mine, theirs) in differences(own.settings, other.settings).items():
            notes[f"{run.label}: {key} is {mine!r}, in {baseline.label} {theirs!r}"] = None
    return list(notes)


def pair(baseline: Run, run: Run) -> list[int]:
    """Return the baseline's index for each training. Raises CompareError.

    Pairs have the same seed, or without seeds the same place.
    """
    if None in run.seeds or None in baseline.seeds:
        if len(run.seeds) != len(baseline.seeds):
            raise CompareError(
                f"{run.label}: {len(run.seeds)} logs without seeds, the baseline has "
                f"{len(baseline.seeds)}; give one baseline for each"
            )
        return list(range(len(run.seeds)))
    lacking = [seed for seed in run.seeds if seed not in baseline.seeds]
    if lacking:
        raise CompareError(
            f"{run.label}: another seed: the baseline has no run of seed {lacking[0]}, only of "
            f"{baseline.seeds}; train it with that seed"
        )
    return [baseline.seeds.index(seed) for seed in run.seeds]


def differences(
    own: Mapping[str, Any] | None, other: Mapping[str, Any] | None, prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Return the dotted keys whose values differ, with both values; {} if one is None."""
    if own is None or other is None:
        return {}
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*own, *other} - (APART if not prefix else set())):
        mine, theirs = own.get(key, ABSENT), other.get(key, ABSENT)
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            found.update(differences(mine, theirs, f"{prefix}{key}."))
        elif mine != theirs:
            found[prefix + key] = (mine, theirs)
    return found
