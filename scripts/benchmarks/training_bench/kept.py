"""Cells on disk, so that nothing is measured twice."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.training_bench import cells
from benchmarks.training_bench.cells import LAYOUTS, Arm, Sizes
from benchmarks.training_bench.report import Record
from lab.layout import BURST_S

#: changes when cells are measured in another way: those of before are measured again
METHOD = "side by side, who waits is stopped"


class Kept:
    """Cells under a folder that were measured with some settings, by this and earlier calls.

    Cells of other settings count as missing.
    """

    def __init__(self, folder: Path, sizes: Sizes, loopback: bool) -> None:
        self._folder, self._sizes, self._loopback = folder, sizes, loopback

    def everything(self) -> list[Record]:
        """Yield all cells by layout, ratio (the network without limit first), repetition and arm.

        Cells with other numbers of steps too, as eight ranks on few cores get fewer.
        """
        found = []
        for layout in LAYOUTS:
            for folder in sorted((self._folder / layout).glob("*/*"), key=_place):
                ratio, repetition = _place(folder)
                found += self.of(layout, cells.arms_of(layout), ratio or None, repetition)
        return found

    def of(
        self, layout: str, arms: list[Arm], ratio: float | None, repetition: int
    ) -> list[Record]:
        """Return the kept cells of these arms."""
        found = (self._one(layout, arm, ratio, repetition) for arm in arms)
        return [record for record in found if record is not None]

    def missing(
        self, layout: str, arms: list[Arm], ratio: float | None, repetition: int
    ) -> list[Arm]:
        """Arms without a cell of at least as many steps as are wanted; one that failed is one."""

        def there(arm: Arm) -> bool:
            one = self._one(layout, arm, ratio, repetition)
            return one is not None and ("failed" in one or len(one["steps"]) >= self._sizes.steps)

        return [arm for arm in arms if not there(arm)]

    def add(
        self, layout: str, arm: Arm, ratio: float | None, repetition: int, record: Record
    ) -> None:
        """Write a cell down, in the place of one that there was."""
        file = self._file(layout, arm, ratio, repetition)
        file.parent.mkdir(parents=True, exist_ok=True)
        key = self._key(layout, arm, ratio)
        file.write_text(json.dumps({"key": key, **record}, indent=1))

    def _one(self, layout: str, arm: Arm, ratio: float | None, repetition: int) -> Record | None:
        file = self._file(layout, arm, ratio, repetition)
        if not file.is_file():
            return None
        record: Record = json.loads(file.read_text())
        return record if record["key"] == self._key(layout, arm, ratio) else None

    def _file(self, layout: str, arm: Arm, ratio: float | None, repetition: int) -> Path:
        folder = self._folder / layout / name_of(ratio) / str(repetition)
        return folder / f"{arm.stem}.json"

    def _key(self, layout: str, arm: Arm, ratio: float | None) -> str:
        """The digest of everything that a cell's result depends on, but for how many steps."""
        sizes = replace(self._sizes, warm=0, steps=0)
        settings = cells.settings_of(layout, arm, sizes, Path("ledger.jsonl"))
        link = None if ratio is None else (ratio, BURST_S)
        parts = METHOD, settings, asdict(arm), asdict(sizes), link, self._loopback
        return cells.digest(*parts)


def name_of(ratio: float | None) -> str:
    """Return the name of a ratio in paths and progress lines."""
    return "unshaped" if ratio is None else f"r{ratio:g}"


def _place(folder: Path) -> tuple[float, int]:
    """Return the ratio (0: no limit) and repetition of a folder of cells such as ``r0.25/1``."""
    name = folder.parent.name
    return 0.0 if name == "unshaped" else float(name.removeprefix("r")), int(folder.name)
