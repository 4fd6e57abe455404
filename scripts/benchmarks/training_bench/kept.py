"""Store cells on disk, so that nothing is measured twice."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.training_bench import cells
from benchmarks.training_bench.cells import LAYOUTS, Arm, Sizes
from benchmarks.training_bench.report import Record
from lab.layout import BURST_S

#: bumped when the measuring method changes, which makes earlier cells invalid
METHOD = "side by side, who waits is stopped"


class Kept:
    """Cells under a folder, measured with given settings by this and earlier calls.

    Cells of other settings count as missing.
    """

    def __init__(self, folder: Path, sizes: Sizes, loopback: bool) -> None:
        self._folder, self._sizes, self._loopback = folder, sizes, loopback

    def everything(self) -> list[Record]:
        """Return all cells by layout, ratio (unlimited network first), repetition and arm.

        Includes cells with other numbers of steps: eight ranks on few cores run fewer.
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
        """Return the arms to measure: a kept cell counts if it failed or has enough steps."""

        def there(arm: Arm) -> bool:
            one = self._one(layout, arm, ratio, repetition)
            return one is not None and ("failed" in one or len(one["steps"]) >= self._sizes.steps)

        return [arm for arm in arms if not there(arm)]

    def add(
        self, layout: str, arm: Arm, ratio: float | None, repetition: int, record: Record
    ) -> None:
        """Write a cell, replacing an earlier one."""
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
        """Hash everything that a cell's result depends on except the number of steps."""
        sizes = replace(self._sizes, warm=0, steps=0)
        settings = cells.settings_of(layout, arm, sizes, Path("ledger.jsonl"))
        link = None if ratio is None else (ratio, BURST_S)
        parts = METHOD, settings, asdict(arm), asdict(sizes), link, self._loopback
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def name_of(ratio: float | None) -> str:
    """Return the name of a ratio in paths and progress lines."""
    return "unshaped" if ratio is None else f"r{ratio:g}"


def _place(folder: Path) -> tuple[float, int]:
    """Return ratio (0: no limit) and repetition of a folder of cells such as ``r0.25/1``."""
    name = folder.parent.name
    return 0.0 if name == "unshaped" else float(name.removeprefix("r")), int(folder.name)
