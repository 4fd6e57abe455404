#!/usr/bin/env python3
"""Write docs/results/ anew from finished measurements: tables, pictures, and the commands.

results.py --speed runs/training_bench

Each chapter is made from the folder that its own script left, and no chapter measures anything. A
chapter whose measurements are missing keeps what is committed, and is named.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from hybridcomp.errors import install_hint
from hybridcomp.tools.compare import CompareError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))  # gpt, train_gpt

from benchmarks import count_bytes
from benchmarks.training_bench import chapters, gpu_chapter, gpu_loss_chapter

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Chapter:
    """One file of docs/results/ and what it is made of."""

    name: str
    title: str
    #: (folder of the measurements, folder to write into) -> the chapter in Markdown
    write: Callable[[Path, Path], str]
    measured_by: str


def gpu_chapter_of(source: Path, out: Path) -> str:
    """Write the chapter of one GPU: *.jsonl of bench_gpu_training.py, losses/ of gpu_losses.py.

    Raises FileNotFoundError where there is neither.
    """
    rows = gpu_chapter.speed_rows(source)
    with tempfile.TemporaryDirectory() as scratch:
        loss = gpu_loss_chapter.section(source, Path(scratch), out)
    if not rows and not loss.seeds:
        raise FileNotFoundError(f"{source}: neither *.jsonl nor losses of a baseline")
    parts = [gpu_chapter.head(rows), *gpu_chapter.speed(rows, out), *loss.parts]
    parts += [gpu_chapter.missing(rows, loss.trained), gpu_chapter.notes(source)]
    figures = {"speed": rows, **loss.figures}
    (out / "gpu.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return "\n".join([*parts, gpu_chapter.commands(loss.seeds, loss.options)])


BENCH = "scripts/benchmarks/bench_training.py"
CHAPTERS = (
    Chapter(
        "bytes", "Bytes on the link", count_bytes.chapter, "scripts/benchmarks/count_bytes.py --out"
    ),
    Chapter("speed", "Tokens a second against the network", chapters.speed_chapter, BENCH),
    Chapter(
        "equal_bytes",
        "Losses at equal or fewer bytes",
        chapters.equal_bytes_chapter,
        f"{BENCH} --losses",
    ),
    Chapter(
        "gpu", "On a GPU", gpu_chapter_of, "scripts/benchmarks/bench_gpu_training.py, gpu_losses.py"
    ),
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line: one folder for each chapter."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for chapter in CHAPTERS:
        flag = f"--{chapter.name.replace('_', '-')}"
        parser.add_argument(flag, type=Path, metavar="FOLDER", help=f"of {chapter.measured_by}")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", metavar="FOLDER")
    found = parser.parse_args(arguments)
    if find_spec("matplotlib") is None:
        parser.error(f"the pictures need matplotlib: {install_hint('plot')}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 where a chapter that was asked for cannot be made."""
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    status = 0
    for chapter in CHAPTERS:
        source = getattr(options, chapter.name)
        file = options.out / f"{chapter.name}.md"
        if source is None:
            kept = "the committed one stays" if file.is_file() else "missing"
            print(f"{chapter.name}: no measurements given ({chapter.measured_by}); {kept}")
            continue
        try:
            text = chapter.write(source.resolve(), options.out)
        except (CompareError, FileNotFoundError) as error:
            print(f"{chapter.name}: {error}; run {chapter.measured_by}", file=sys.stderr)
            status = 1
            continue
        file.write_text(f"# {chapter.title}\n\n{text}\n", encoding="utf-8")
        print(f"{chapter.name}: {file}")
    return status


if __name__ == "__main__":
    sys.exit(main())
