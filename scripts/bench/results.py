#!/usr/bin/env python3
"""Write docs/results/ anew from finished measurements: tables, pictures, and the commands.

results.py --loss runs/loss_study

Each chapter is made from the folder that its own script left, and no chapter measures anything. A
chapter whose measurements are missing keeps what is committed, and is named.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hybridcomp.compare import CompareError, Wishes, compared
from hybridcomp.compare.draw import draw
from hybridcomp.compare.reading import differences
from hybridcomp.compare.report import Result, as_json, bytes_of, losses, markdown_rows

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

from bench import loss_study
from bench.training_bench import chapters, gpu_chapter, gpu_losses, paper
from studies import segment_tables
from studies.projection import chapter as projection

ROOT = Path(__file__).resolve().parents[2]


class Missing(Exception):
    """The measurements of a chapter are not there; the message says which and how to make them."""


@dataclass(frozen=True)
class Chapter:
    """One file of docs/results/ and what it is made of."""

    name: str
    title: str
    #: (folder of the measurements, folder to write into) -> the chapter in Markdown
    write: Callable[[Path, Path], str]
    measured_by: str


def loss_chapter(source: Path, out: Path) -> str:
    """What presets and error bounds cost in loss: scripts/bench/loss_study.py. Raises Missing."""
    found = {name: Study.of(source / name) for name in loss_study.LAYOUTS}
    studies = {name: study for name, study in found.items() if len(study.seeds) > 1}
    if not studies:
        raise Missing(f"{source}: two seeds of a baseline are finished in no layout")
    parts, figures, blocks = [], {}, {}
    for layout, study in studies.items():
        words = [f"{name}={study.paths(name)}" for name in study.whole]
        result = untimed(compared(words, Wishes(need_ledger=True)))
        draw(result, out / f"loss_{layout}.png", 0, f"{TITLES[layout]}, {study.say_seeds()}")
        parts += study.section(layout, result)
        figures[layout] = json.loads(as_json(result))
        if further := study.further_blocks():
            blocks[layout] = further
    (out / "loss.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    (out / "loss_blocks.json").write_text(json.dumps(blocks, indent=1) + "\n", encoding="utf-8")
    missing = [name for name in loss_study.LAYOUTS if name not in studies]
    if missing:
        parts.append(f"\nNot measured yet with several seeds: {', '.join(missing)}.")
    return "\n".join([LOSS_HEAD, *parts, *commands(studies)])


def untimed(result: Result) -> Result:
    """Without the clocks of a machine that did other work; columns without figures are dropped."""
    return replace(
        result,
        runs=[
            replace(run, trainings=[replace(training, speeds=None) for training in run.trainings])
            for run in result.runs
        ],
        aligned=replace(result.aligned, seconds=None),
        comparisons=[
            replace(found, seconds=None, clock_gap=None, clock_gap_interval=None)
            for found in result.comparisons
        ],
    )


LOSS_HEAD = """\
The example GPT (`scripts/train_gpt.py`, 0.85 M parameters, text: the standard library's sources),
fp32, two CPU ranks. Every run of a seed has the weights and the order of the data of the baseline's
run of that seed. The final loss is the mean of the last 20 steps; gaps are in percent of it, paired
by seed, with the 95% interval of their mean (Student's t). The validation loss is that of text that
no run trained on. Speeds and curves over wall clock are left out: the machine did other work beside
it, and two ranks of one machine have no network to save time on.
"""
TITLES = {
    "dp2": "ZeRO 1 on two ranks: gradients (dp) and parameters (zero)",
    "pp2": "Two pipeline stages: activations and their gradients (pp)",
    "pp2dp2": "Two pipeline stages by two replicas",
    "3d": "Two tensor ranks by two pipeline stages by two replicas",
}


@dataclass(frozen=True)
class Study:
    """The finished runs of one layout."""

    folder: Path
    done: dict[str, dict[int, dict[str, Any]]]  # name -> seed -> the DeepSpeed settings

    @classmethod
    def of(cls, folder: Path) -> Study:
        """What is finished there."""
        done: dict[str, dict[int, dict[str, Any]]] = {}
        for file in sorted(folder.glob("*/seed*/done.json")):
            seed = int(file.parent.name.removeprefix("seed"))
            done.setdefault(file.parent.parent.name, {})[seed] = json.loads(file.read_text())
        return cls(folder, done)

    @property
    def seeds(self) -> list[int]:
        """Those of the baseline."""
        return sorted(self.done.get(loss_study.BASELINE, {}))

    @property
    def whole(self) -> list[str]:
        """Runs with all seeds, in the order of the presets. Their settings are the baseline's."""
        order = [loss_study.BASELINE, *loss_study.PRESETS]
        names = [name for name in self.done if sorted(self.done[name]) == self.seeds]
        for name in names:
            for seed, settings in self.done[name].items():
                wrong = differences(settings, self.done[loss_study.BASELINE][seed])
                if wrong:
                    raise CompareError(f"{name} seed {seed}: other settings: {', '.join(wrong)}")
        return sorted(names, key=lambda name: (order.index(name) if name in order else 99, name))

    def paths(self, name: str) -> str:
        """Of the logs of all seeds."""
        return ",".join(
            str(self.folder / name / f"seed{seed}" / "loss.jsonl") for seed in self.seeds
        )

    def say_seeds(self) -> str:
        """``seeds 0, 1, 2``."""
        return f"seeds {', '.join(map(str, self.seeds))}"

    def further_blocks(self) -> dict[str, Any]:
        """Blocks that are no preset, without the ledger's file."""
        found = {}
        for name in self.whole:
            if name not in (loss_study.BASELINE, *loss_study.PRESETS):
                block = self.done[name][self.seeds[0]].get("compression")
                if block is not None:  # a peer has none
                    found[name] = {key: block[key] for key in block if key != "ledger"}
        return found

    def section(self, layout: str, result: Result, picture: str = "") -> list[str]:
        """Tables and picture of this layout, and what was left out."""
        settings = self.done[loss_study.BASELINE][self.seeds[0]]
        rate = settings["optimizer"]["params"]["lr"]
        left = {name: seeds for name, seeds in self.done.items() if name not in self.whole}
        return [
            f"\n## {TITLES.get(layout, '')}\n",
            f"{result.aligned.axis[-1]:,.0f} tokens in {len(result.aligned.axis)} steps, "
            f"{self.say_seeds()}; learning rate {rate:g} after the warm-up, falling to 0.\n",
            *markdown_rows(losses(result)),
            f"\n![loss curves, {layout}]({picture or f'loss_{layout}.png'})\n",
            "Bytes of all ranks over the whole run of one seed:\n",
            *markdown_rows([row[:-1] for row in bytes_of(result.runs)]),
            *(
                f"\nLeft out: {name}, of which {len(seeds)} of {len(self.seeds)} seeds finished."
                for name, seeds in left.items()
            ),
        ]


def commands(studies: Mapping[str, Study]) -> list[str]:
    """What made the chapter, from what the settings say."""
    layout, study = next(iter(studies.items()))
    settings = study.done[loss_study.BASELINE][study.seeds[0]]
    committed = json.loads((loss_study.CONFIGS / loss_study.LAYOUTS[layout].config).read_text())
    batch = "train_micro_batch_size_per_gpu"
    peers = [name.removeprefix("peer ") for name in study.whole if name.startswith("peer ")]
    rates = [found["optimizer"]["params"]["lr"] for found in (settings, committed)]
    words = [
        "--steps", settings["scheduler"]["params"]["total_num_steps"], "--seeds", *study.seeds,
        "--layouts", *studies, "--divide-batch", committed[batch] // settings[batch],
        *(["--lr", f"{rates[0]:g}"] if rates[0] != rates[1] else []),
        *(["--peers", *peers] if peers else []), "--blocks", "docs/results/loss_blocks.json",
    ]  # fmt: skip
    return [
        "\n## Commands\n",
        "```",
        "scripts/prepare_data.py --output data/text",
        f"scripts/bench/loss_study.py {shlex.join(map(str, words))}",
        "scripts/bench/results.py --loss runs/loss_study",
        "```",
    ]


def gpu_chapter_of(source: Path, out: Path) -> str:
    """Speed and losses on one GPU: *.jsonl of bench_gpu_training.py, losses/ of gpu_losses.py.

    Raises Missing where there is neither.
    """
    rows = gpu_chapter.speed_rows(source)
    folder = source / "losses" / gpu_losses.LAYOUT
    for place in (folder, source / "losses_nccl" / gpu_losses.LAYOUT):
        gpu_chapter.unpack(place)
    study = Study.of(folder)
    if not rows and not study.seeds:
        raise Missing(f"{source}: neither *.jsonl nor losses of a baseline")
    parts, figures = [gpu_chapter.HEAD, *gpu_chapter.speed(rows, out)], {"speed": rows}
    parts.append(gpu_chapter.LOSS.format(identity=gpu_chapter.identity(source)))
    steps = 0
    if study.seeds:
        words = [f"{name}={study.paths(name)}" for name in study.whole]
        result = untimed(compared(words, Wishes(need_ledger=True)))
        draw(result, out / "gpu_loss.png", 0, f"GPT-2 small, bf16, ZeRO 1, {study.say_seeds()}")
        figures["loss"] = json.loads(as_json(result))
        parts += study.section("gpu", result, "gpu_loss.png")[1:]
        steps = len(result.aligned.axis)
    parts += [gpu_chapter.missing(rows, list(study.done)), gpu_chapter.notes(source)]
    (out / "gpu.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return "\n".join([*parts, gpu_chapter.commands(study.seeds, steps)])


BENCH = "scripts/bench/bench_training.py"
CHAPTERS = (
    Chapter("loss", "What compression costs in loss", loss_chapter, "scripts/bench/loss_study.py"),
    Chapter(
        "segments",
        "What the length of a segment costs in loss",
        segment_tables.chapter,
        "scripts/studies/segment_study.py",
    ),
    Chapter("speed", "Tokens a second against the network", chapters.speed_chapter, BENCH),
    Chapter(
        "equal_bytes",
        "Losses at equal or fewer bytes",
        chapters.equal_bytes_chapter,
        f"{BENCH} --losses",
    ),
    Chapter(
        "gpu", "On a GPU", gpu_chapter_of, "scripts/bench/bench_gpu_training.py, gpu_losses.py"
    ),
    Chapter("paper", "The paper's schemes", paper.paper_chapter, f"{BENCH} --layouts 3d"),
    Chapter(
        "projection",
        "Projected: GPT-NeoX-20B",
        projection.chapter,
        "scripts/studies/project_scale.py",
    ),
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line: one folder for each chapter."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for chapter in CHAPTERS:
        flag = f"--{chapter.name.replace('_', '-')}"
        parser.add_argument(flag, type=Path, metavar="FOLDER", help=f"of {chapter.measured_by}")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", metavar="FOLDER")
    found = parser.parse_args(arguments)
    if find_spec("matplotlib") is None:
        parser.error("the pictures need matplotlib: pip install 'hybridcomp[plot]'")
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
        except (Missing, CompareError, FileNotFoundError) as error:
            print(f"{chapter.name}: {error}; run {chapter.measured_by}", file=sys.stderr)
            status = 1
            continue
        file.write_text(f"# {chapter.title}\n\n{text}\n", encoding="utf-8")
        print(f"{chapter.name}: {file}")
    return status


if __name__ == "__main__":
    sys.exit(main())
