"""Check codecs, messages and sums of messages against their promised bounds on hostile values.

Every value is compared in float64. A stored failure consists of the turn's seed and number.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fuzzing.hostile import hostile, subnormals
from fuzzing.promises import Turn, try_codec, try_moved, try_sum
from hybridcomp.codecs import VALUE_DTYPES

PARTS: dict[str, Callable[[Tensor, random.Random], Turn]] = {
    "codec": try_codec, "moved": try_moved, "sum": try_sum,
}  # fmt: skip
#: checks in turn; sums get two turns, since a sum of several ranks compares few values
ORDER = ("codec", "moved", "sum", "sum")


@dataclass
class Result:
    """Numbers of compared values, by check and dtype, and the turns that were out of bounds."""

    tried: dict[str, int] = field(default_factory=dict)
    subnormal: dict[str, int] = field(default_factory=dict)  # among the values sent
    outside: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Return the number of all compared values."""
        return sum(self.tried.values())

    def count(self, part: str, dtype: torch.dtype, numel: int, tiny: int) -> None:
        """Count ``numel`` compared values of ``part``, and ``tiny`` subnormals among those sent."""
        word = str(dtype).removeprefix("torch.")
        key = f"{part} {word}"
        self.tried[key] = self.tried.get(key, 0) + numel
        self.subnormal[word] = self.subnormal.get(word, 0) + tiny

    def lines(self) -> list[str]:
        """Format the counts."""
        found = [f"bounds {part}: {count:,} values" for part, count in sorted(self.tried.items())]
        tiny = ", ".join(f"{word} {count:,}" for word, count in sorted(self.subnormal.items()))
        outside = f"{self.total:,} values, {len(self.outside)} turns outside"
        return [*found, f"bounds subnormal among them: {tiny}", f"bounds: {outside}"]


def hunt(
    count: int, seed: int, keep: Path, say: Callable[[str], None] = lambda text: None
) -> Result:
    """Compare ``count`` values; store failing turns with values and seed."""
    result, turn, told = Result(), 0, time.monotonic()
    while result.total < count:
        part = ORDER[turn % len(ORDER)]
        values, found = one(seed, turn, part)
        if bool(found.wrong().any()):
            result.outside.append(f"{part} {values.dtype} {found.name}: turn {turn}")
            keep.mkdir(parents=True, exist_ok=True)
            path = keep / f"bounds-{seed}-{turn}.pt"
            torch.save({"seed": seed, "turn": turn, "part": part, "values": values}, path)
            result.files.append(path)
        result.count(part, values.dtype, len(found.exact), subnormals(values))
        turn += 1
        if time.monotonic() - told > 20:
            told = time.monotonic()
            outside = f"{len(result.outside)} turns outside"
            say(f"bounds: {result.total:,} of {count:,}, {turn:,} turns, {outside}")
    return result


def one(seed: int, turn: int, part: str) -> tuple[Tensor, Turn]:
    """Run turn ``turn``; return its values and the comparison."""
    choose = random.Random(f"{seed} {turn}")
    generator = torch.Generator().manual_seed(seed * 1_000_003 + turn)
    values = hostile(generator, choose, VALUE_DTYPES[turn // len(ORDER) % 3])
    return values, PARTS[part](values, choose)


def replay(path: Path) -> int:
    """Repeat a stored turn; return 1 if a value is still out of bounds."""
    kept = torch.load(path, weights_only=True)
    _, found = one(kept["seed"], kept["turn"], kept["part"])
    wrong = torch.nonzero(found.wrong()).flatten()
    print(f"{found.name}: {len(wrong)} values outside")
    error = found.error
    for at in wrong[:5].tolist():
        print(
            f"  [{at}] {float(found.decoded[at])!r} for {float(found.exact[at])!r}: "
            f"off by {float(error[at])}, may {float(found.limit[at])}"
        )
    return int(len(wrong) > 0)
