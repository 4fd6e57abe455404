"""Read the finished trainings of one layout, and show their losses and bytes as Markdown."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import loss_study
from hybridcomp.tools.compare import CompareError
from hybridcomp.tools.compare.reading import differences
from hybridcomp.tools.compare.report import Result, bytes_of, losses, markdown_rows

#: DeepSpeed's scheduler -> what it does after the warm-up
AFTERWARDS = {
    "WarmupDecayLR": "falling to 0", "WarmupCosineLR": "falling to 0 along a cosine",
    "WarmupLR": "without an end",
}  # fmt: skip


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
            replace(found, seconds=None, clock_gap=None, clock_gap_interval=None)
            for found in result.comparisons
        ],
    )


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

    def paths(self, name: str) -> str:
        """Return the paths of the logs of all seeds, with commas between."""
        return ",".join(
            str(self.folder / name / f"seed{seed}" / "loss.jsonl") for seed in self.seeds
        )

    def block(self, name: str) -> dict[str, Any] | None:
        """Return the block of a run, without the ledger's file; a peer has none."""
        block = next(iter(self.done[name].values())).get("compression")
        return None if block is None else {key: block[key] for key in block if key != "ledger"}

    def say_seeds(self) -> str:
        """``seeds 0, 1, 2``."""
        return f"seeds {', '.join(map(str, self.seeds))}"

    def section(self, result: Result, picture: str) -> list[str]:
        """Return tables and picture, and the runs that were left out."""
        settings = self.done[loss_study.BASELINE][self.seeds[0]]
        rate = settings["optimizer"]["params"]["lr"]
        then = AFTERWARDS[settings["scheduler"]["type"]]
        left = {name: seeds for name, seeds in self.done.items() if name not in self.whole}
        return [
            f"{result.aligned.axis[-1]:,.0f} tokens in {len(result.aligned.axis)} steps, "
            f"{self.say_seeds()}; learning rate {rate:g} after the warm-up, {then}.\n",
            f"![loss curves]({picture})\n",
            *markdown_rows(losses(result)),
            "\nBytes of all ranks over the whole run of one seed:\n",
            *markdown_rows([row[:-1] for row in bytes_of(result.runs)]),
            *(
                f"\nLeft out: {name}, of which {len(seeds)} of {len(self.seeds)} seeds finished."
                for name, seeds in left.items()
            ),
        ]
