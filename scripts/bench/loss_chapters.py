"""Chapters of docs/results about losses: what scripts/bench/loss_study.py left, as Markdown."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import loss_study
from bench.loss_layouts import LAYOUTS
from hybridcomp.compare import CompareError, Wishes, compared
from hybridcomp.compare.draw import draw
from hybridcomp.compare.reading import differences
from hybridcomp.compare.report import Result, as_json, bytes_of, losses, markdown_rows


class Missing(Exception):
    """The measurements of a chapter are not there; the message says which and how to make them."""


#: names of islands in a study: steps between meetings, and how they send
ISLANDS = re.compile(r"H(\d+) (.+)")
#: DeepSpeed's scheduler -> what it does after the warm-up
AFTERWARDS = {
    "WarmupDecayLR": "falling to 0", "WarmupCosineLR": "falling to 0 along a cosine",
    "WarmupLR": "without an end",
}  # fmt: skip
#: chapter -> the layouts that it holds
SHOWN = {
    "loss": [
        name
        for name, at in LAYOUTS.items()
        if at.engine == "deepspeed" and name not in ("dp2z0", "dp4")
    ],
    "loss_torch": [name for name, at in LAYOUTS.items() if at.engine != "deepspeed"],
    "feedback": ["dp2", "ddp2"],
    "rounding": ["dp2", "ddp2"],
}


def loss_chapter(source: Path, out: Path) -> str:
    """Write the chapter of presets and error bounds from loss_study.py's runs. Raises Missing."""
    return study_chapter("loss", LOSS_HEAD, source, out)


def torch_chapter(source: Path, out: Path) -> str:
    """Write the same chapter under torch's engines, beside torch's methods. Raises Missing."""
    return study_chapter("loss_torch", TORCH_HEAD, source, out, least=1)


def study_chapter(
    stem: str, head: str, source: Path, out: Path, least: int = 2, picture: str = "loss"
) -> str:
    """Write the chapter of layouts with ``least`` seeds of a finished baseline. Raises Missing.

    ``picture``: the first word of the pictures' names.
    """
    found = {name: Study.of(source / name) for name in SHOWN[stem]}
    studies = {name: study for name, study in found.items() if len(study.seeds) >= least}
    if not studies:
        seeds = "two seeds" if least > 1 else "one seed"
        raise Missing(f"{source}: {seeds} of a baseline are finished in no layout")
    parts, figures, blocks = [], {}, {}
    for layout, study in studies.items():
        words = [f"{name}={study.paths(name)}" for name in study.whole]
        result = untimed(compared(words, Wishes(need_ledger=True)))
        drawn = f"{picture}_{layout}.png"
        draw(result, out / drawn, 0, f"{TITLES[layout]}, {study.say_seeds()}")
        parts += study.section(layout, result, drawn)
        figures[layout] = json.loads(as_json(result))
        if further := study.further_blocks():
            blocks[layout] = further
    (out / f"{stem}.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    (out / f"{stem}_blocks.json").write_text(json.dumps(blocks, indent=1) + "\n", encoding="utf-8")
    missing = [name for name in SHOWN[stem] if len(found[name].seeds) < 2]
    if missing:
        parts.append(f"\nNot measured yet with several seeds: {', '.join(missing)}.")
    return "\n".join([head, *parts, *commands(studies, stem)])


def untimed(result: Result) -> Result:
    """Drop the clocks of a machine that did other work, and columns without figures."""
    return replace(
        result,
        runs=[
            replace(run, trainings=[replace(training, speeds=None) for training in run.trainings])
            for run in result.runs
        ],
        aligned=replace(result.aligned, seconds=None),
        comparisons=[
            replace(found, seconds=None, clock_gap=None, clock_gap_interval=None, clock_gaps=None)
            for found in result.comparisons
        ],
    )


LOSS_HEAD = """\
The example GPT (`scripts/train_gpt.py`, 0.85 M parameters, text: the standard library's sources),
fp32, two CPU ranks. Every run of a seed has the weights and the order of the data of the baseline's
run of that seed. The final loss is the mean of the last 20 steps; gaps are in percent of it, paired
by seed, with the 95% interval of their mean (Student's t). The validation loss is that of text that
no run trained on. Speeds and curves over wall clock are left out: the machine did other work beside
it, and two ranks of one machine have no network to save time on. The same under torch's own FSDP2
and DDP: [loss_torch.md](loss_torch.md).
"""
TORCH_HEAD = """\
As in [loss](loss.md), under torch's own engines (`scripts/train_gpt.py --engine`): the example GPT,
0.85 M parameters, fp32, two CPU ranks, every run of a seed on the weights and the data of the
baseline's run of that seed. "peer" is what torch itself has: hooks of DDP (fp16, bf16, PowerSGD,
native for its first tenth, as it is documented), and FSDP2 with `reduce_dtype=torch.bfloat16`. Ours
sends fewer bytes than each of them. The final loss is the mean of the last 20 steps; gaps are in
percent of it, paired by seed, with the 95% interval of their mean (Student's t). Speeds are left
out: the machine did other work beside it.
"""
TITLES = {
    "dp2": "ZeRO 1 on two ranks: gradients (dp) and parameters (zero)",
    "pp2": "Two pipeline stages: activations and their gradients (pp)",
    "pp2dp2": "Two pipeline stages by two replicas",
    "3d": "Two tensor ranks by two pipeline stages by two replicas",
    "ddp2": "DistributedDataParallel: gradients (dp)",
    "fsdp2": "FSDP2: gradients (dp) and parameters (zero)",
}


@dataclass(frozen=True)
class Study:
    """The finished runs of one layout."""

    folder: Path
    done: dict[str, dict[int, dict[str, Any]]]  # name -> seed -> the DeepSpeed settings

    @classmethod
    def of(cls, folder: Path) -> Study:
        """Return the study of the runs that are finished in ``folder``."""
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
            self.check(name)
        return sorted(names, key=lambda name: (order.index(name) if name in order else 99, name))

    def check(self, name: str) -> None:
        """Raise CompareError where a seed's settings are not those of the baseline's run of it."""
        for seed, settings in self.done[name].items():
            wrong = differences(settings, self.done[loss_study.BASELINE][seed])
            if wrong:
                raise CompareError(f"{name} seed {seed}: other settings: {', '.join(wrong)}")

    def paths(self, name: str, seeds: Sequence[int] | None = None) -> str:
        """Return the paths of the logs of ``seeds``, or of all, with commas between."""
        return ",".join(
            str(self.folder / name / f"seed{seed}" / "loss.jsonl")
            for seed in (self.seeds if seeds is None else seeds)
        )

    def block(self, name: str) -> dict[str, Any] | None:
        """Return the block of a run, without the ledger's file; a peer has none."""
        block = next(iter(self.done[name].values())).get("compression")
        return None if block is None else {key: block[key] for key in block if key != "ledger"}

    def scale(self, layout: str) -> tuple[int, float]:
        """Return by what the committed file's batch is divided, and the learning rate."""
        settings = self.done[loss_study.BASELINE][self.seeds[0]]
        file = loss_study.CONFIGS / LAYOUTS[layout].config
        batch = "train_micro_batch_size_per_gpu"
        divisor = json.loads(file.read_text())[batch] // settings[batch]
        return divisor, float(settings["optimizer"]["params"]["lr"])

    def say_seeds(self) -> str:
        """``seeds 0, 1, 2``."""
        return f"seeds {', '.join(map(str, self.seeds))}"

    def further_blocks(self) -> dict[str, Any]:
        """Return blocks that are no preset, without the ledger's file."""
        found = {}
        for name in self.whole:
            known = name in (loss_study.BASELINE, *loss_study.PRESETS)
            if not known and (block := self.block(name)) is not None:
                found[name] = block
        return found

    def section(self, layout: str, result: Result, picture: str = "") -> list[str]:
        """Return tables and picture of a layout, and the runs that were left out."""
        settings = self.done[loss_study.BASELINE][self.seeds[0]]
        rate = settings["optimizer"]["params"]["lr"]
        then = AFTERWARDS[settings["scheduler"]["type"]]
        left = {name: seeds for name, seeds in self.done.items() if name not in self.whole}
        return [
            f"\n## {TITLES.get(layout, '')}\n",
            f"{result.aligned.axis[-1]:,.0f} tokens in {len(result.aligned.axis)} steps, "
            f"{self.say_seeds()}; learning rate {rate:g} after the warm-up, {then}.\n",
            f"![loss curves, {layout}]({picture or f'loss_{layout}.png'})\n",
            *markdown_rows(losses(result)),
            "\nBytes of all ranks over the whole run of one seed:\n",
            *markdown_rows([row[:-1] for row in bytes_of(result.runs)]),
            *(
                f"\nLeft out: {name}, of which {len(seeds)} of {len(self.seeds)} seeds finished."
                for name, seeds in left.items()
            ),
        ]


def commands(studies: Mapping[str, Study], stem: str = "loss") -> list[str]:
    """Return the commands that make the chapter again, from the settings of its runs."""
    layout, study = next(iter(studies.items()))
    settings = study.done[loss_study.BASELINE][study.seeds[0]]
    committed = json.loads((loss_study.CONFIGS / LAYOUTS[layout].config).read_text())
    divisor, rate = study.scale(layout)
    trained = dict.fromkeys(name for found in studies.values() for name in found.whole)
    peers = [name.removeprefix("peer ") for name in trained if name.startswith("peer ")]
    presets = [name for name in loss_study.PRESETS if name in trained]
    words = [
        "--steps", settings["scheduler"]["params"]["total_num_steps"], "--seeds", *study.seeds,
        "--layouts", *studies, "--divide-batch", divisor,
        *(["--lr", f"{rate:g}"] if rate != committed["optimizer"]["params"]["lr"] else []),
        *(["--presets", *presets] if stem != "loss" else []),
        *(["--peers", *peers] if peers else []), "--blocks", f"docs/results/{stem}_blocks.json",
    ]  # fmt: skip
    return command_section(
        words, f"scripts/bench/results.py --{stem.replace('_', '-')} runs/loss_study"
    )


def command_section(words: Sequence[object], *more: str) -> list[str]:
    """Return the section with the commands of a chapter: data, loss_study.py, and ``more``.

    ``words``: the arguments of loss_study.py.
    """
    return [
        "\n## Commands\n",
        "```",
        "scripts/prepare_data.py --output data/text",
        f"scripts/bench/loss_study.py {shlex.join(map(str, words))}",
        *more,
        "```",
    ]
