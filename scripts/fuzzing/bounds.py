"""Hostile values against the bounds that codecs, moved messages and sums promise.

Values are counted; every finite one is compared in float64. Sums are put together here as the
two-hop collectives do it: ranks encode, an owner adds what it decodes to its own values in fp32,
encodes the sum, and all decode that.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridcomp.codecs import VALUE_DTYPES, Bounded, Codec, make_codec
from hybridcomp.codecs.budget import FLOOR, ROUNDING

NUMEL = 1 << 19
BOUNDS = (0.5, 0.1, 0.05, 0.02, 0.006, 1e-2, 1e-3, 1e-4, 1e-5, 3e-7)
SEGMENTS = (64, 256, 1024, 4096)
CODECS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bf16", {}), ("fp16", {}), ("fp8", {"format": "e4m3"}), ("fp8", {"format": "e5m2"}),
    *(("blockint", {"bits": bits}) for bits in range(2, 9)),
    *(("blockint", {"bits": bits, "rotate": True}) for bits in (2, 3, 4)),
    ("blockint", {"bits": 4, "levels": "gaussian"}),
    *(("zfp", {"rate": rate}) for rate in (2.5, 4, 8, 13.75, 16, 24)),
    *(("radix", {"error_bound": bound, "segment": segment})
      for bound in (0.3, 1e-2, 1e-4, 1e-6) for segment in (64, 4096)),
    ("mpc", {}), ("expcode", {}),
)  # fmt: skip


@dataclass
class Result:
    """How many values were compared, by part; what was outside."""

    tried: dict[str, int] = field(default_factory=dict)
    outside: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    def count(self, part: str, numel: int) -> None:
        """``numel`` more values of ``part``."""
        self.tried[part] = self.tried.get(part, 0) + numel


def hostile(generator: torch.Generator, choose: random.Random, dtype: torch.dtype) -> Tensor:
    """NUMEL values of one of nine kinds."""
    info = torch.finfo(dtype)
    kind = choose.randrange(9)
    values = torch.randn(NUMEL, generator=generator)
    largest = math.log2(info.max) - 6
    least = math.log2(info.smallest_normal) - (10 if dtype == torch.float16 else 7)
    if kind == 0:  # one power of two for all
        values *= 2.0 ** choose.uniform(max(least, -126), largest)
    elif kind == 1:  # another for every 16 values
        powers = torch.empty(NUMEL // 16).uniform_(-14, 0, generator=generator).exp()
        values *= powers.repeat_interleave(16) * 2.0 ** choose.randint(-24, 4)
    elif kind == 2:  # an outlier in every stretch
        values[:: choose.choice([61, 997, 4096])] *= 2.0 ** choose.randint(5, 14)
    elif kind == 3:  # any bits
        bits = torch.randint(-(2**31), 2**31, (NUMEL,), generator=generator, dtype=torch.int64)
        if dtype == torch.float32:
            return bits.to(torch.int32).view(dtype)
        return bits.to(torch.int16).view(dtype)
    elif kind == 4:  # subnormal, with a normal one here and there
        steps = torch.randint(-1023, 1024, (NUMEL,), generator=generator).double()
        tiny = steps * (info.smallest_normal * info.eps)
        tiny[:: choose.choice([3000, 10**9])] = info.smallest_normal * choose.uniform(0, 8)
        return tiny.to(dtype)
    elif kind == 5:  # edges of levels
        levels = choose.choice([1, 3, 7, 15, 31, 63, 127])
        edges = torch.randint(-2 * levels, 2 * levels + 1, (NUMEL,), generator=generator) / 2
        values = edges / levels * 2.0 ** choose.randint(-20, 12) * (1 + choose.choice([0, 2**-23]))
    elif kind == 6:  # near the largest
        values = torch.empty(NUMEL).uniform_(-1, 1, generator=generator) * info.max
    elif kind == 7:  # mostly zeros
        values *= torch.rand(NUMEL, generator=generator) < 0.02
    else:
        values[torch.randint(NUMEL, (50,), generator=generator)] = float("nan")
        values[torch.randint(NUMEL, (50,), generator=generator)] = float("inf")
    return values.to(dtype)


def absmax_of(values: Tensor, block: int) -> Tensor:
    """Largest finite magnitude of each aligned stretch of ``block`` values, float64, of each."""
    finite = torch.where(values.isfinite(), values.double().abs(), 0.0)
    if block == 1:
        return finite
    short = -len(finite) % block
    padded = torch.nn.functional.pad(finite, (0, short)).view(-1, block)
    return padded.amax(1).repeat_interleave(block)[: len(finite)]


def bound_of(codec: Codec, absmax: Tensor, dtype: torch.dtype) -> Tensor:
    """``element_bound`` for every entry of ``absmax``; asked once for each that differs."""
    unique, where = torch.unique(absmax, return_inverse=True)
    limits = [codec.element_bound(value, dtype) for value in unique.tolist()]
    return torch.tensor(limits, dtype=torch.float64)[where]


def through(codec: Codec, values: Tensor, dtype: torch.dtype) -> Tensor:
    """``values`` encoded, and decoded to ``dtype``."""
    room = torch.empty(codec.wire_nbytes(values.numel(), values.dtype), dtype=torch.uint8)
    used = codec.encode(values, room)
    out = torch.empty(values.numel(), dtype=values.dtype if codec.lossless else dtype)
    codec.decode(room[:used], out)
    return out.to(dtype)


def try_codec(values: Tensor, choose: random.Random) -> tuple[str, Tensor, Tensor]:
    """A codec's own bound: its name, the errors, what they may be."""
    name, settings = choose.choice(CODECS)
    codec = make_codec(name, **settings)
    target = values.dtype if codec.lossless else torch.float32
    out = through(codec, values, target)
    block = codec.segment if name == "radix" else codec.span
    block = {"zfp": 4}.get(name, block)
    limit = bound_of(codec, absmax_of(values, block), values.dtype)
    return str(codec), (out.double() - values.double()).abs(), limit


def try_moved(values: Tensor, choose: random.Random) -> tuple[str, Tensor, Tensor]:
    """A message that is moved within ``error_bound``."""
    bound, numel = choose.choice(BOUNDS), choose.choice([NUMEL, 70_001, 4097])
    family = choose.choice(["auto", "auto", "auto", "radix", "blockint", "zfp", "fp8"])
    fixed = family in ("blockint", "zfp", "fp8")
    segment = 4096 if fixed else choose.choice(SEGMENTS)
    mode = "rel" if fixed else choose.choice(["rel", "rel", "rel", "abs"])
    promise = Bounded(bound, mode, segment, family)  # type: ignore[arg-type]
    codec = promise.for_message(numel, values.dtype, 1)
    errors, absmaxes = [], absmax_of(values[: NUMEL - NUMEL % numel], 1)
    for start in range(0, NUMEL - numel + 1, numel):
        part = values[start : start + numel]
        errors.append((through(codec, part, values.dtype).double() - part.double()).abs())
        absmaxes[start : start + numel] = absmax_of(part, segment)
    if fixed:
        absmaxes = absmaxes.clamp(min=FLOOR)
    u = ROUNDING[values.dtype]
    limit = bound * absmaxes if mode == "rel" else bound + (absmaxes + bound) * u
    return f"{promise} as {codec}, {numel} values", torch.cat(errors), limit


def try_sum(values: Tensor, choose: random.Random) -> tuple[str, Tensor, Tensor]:
    """The sum of two to eight ranks in two hops, each with its own values."""
    ranks, bound = choose.randint(2, 8), choose.choice(BOUNDS[:8])
    segment, dtype = choose.choice(SEGMENTS), values.dtype
    share = NUMEL // ranks // segment * segment
    parts = [values[rank * share : (rank + 1) * share] for rank in range(ranks)]
    scales = [2.0 ** choose.randint(-8, 0) for _ in parts]
    parts = [(part.float() * scale).to(dtype) for part, scale in zip(parts, scales, strict=True)]
    promise = Bounded(bound, "rel", segment, choose.choice(["auto", "radix"]))
    codec = promise.for_message(share * ranks, dtype, ranks)
    first, second = codec.hops(2, ranks, result=dtype, exact=1)
    total = torch.zeros(share)
    for rank, part in enumerate(parts):
        total += part.float() if rank == 0 else through(first, part, torch.float32)
    result = through(second, total, dtype)
    exact = torch.stack([part.double() for part in parts]).sum(0)
    amount = torch.stack([absmax_of(part, segment) for part in parts]).sum(0)
    fits = (amount * (1 + bound) < torch.finfo(dtype).max) & exact.isfinite()
    info = torch.finfo(dtype)
    grid = 0.0 if dtype == torch.float32 else info.smallest_normal * info.eps / 2
    native = ROUNDING[dtype] * amount if second.lossless and ROUNDING[dtype] > bound else 0.0
    limit = torch.where(fits, bound * amount + grid + native, math.inf)
    return f"sum of {ranks}, {promise} as {first}", (result.double() - exact).abs(), limit


PARTS: dict[str, Callable[[Tensor, random.Random], tuple[str, Tensor, Tensor]]] = {
    "codec": try_codec, "moved": try_moved, "sum": try_sum,
}  # fmt: skip


def hunt(
    count: int, seed: int, keep: Path, say: Callable[[str], None] = lambda text: None
) -> Result:
    """Compare ``count`` values. What is outside is kept: the values, and the seed of the turn."""
    result, turn, told = Result(), 0, time.monotonic()
    while sum(result.tried.values()) < count:
        part = list(PARTS)[turn % 3]
        name, values, error, limit = one(seed, turn, part)
        if bool(outside(part, values, error, limit).any()):
            result.outside.append(f"{part} {name}: turn {turn}")
            keep.mkdir(parents=True, exist_ok=True)
            path = keep / f"bounds-{seed}-{turn}.pt"
            torch.save({"seed": seed, "turn": turn, "part": part, "values": values}, path)
            result.files.append(path)
        result.count(f"{part} {str(values.dtype).removeprefix('torch.')}", len(error))
        turn += 1
        if time.monotonic() - told > 20:
            told = time.monotonic()
            say(f"bounds: {sum(result.tried.values()):,} of {count:,}")
    return result


def outside(part: str, values: Tensor, error: Tensor, limit: Tensor) -> Tensor:
    """Which values are wrong. A NaN is, unless one stood within 63 values: of its block."""
    if part == "sum":  # limits are infinite where a rank has no number
        return error > limit
    finite = values[: len(error)].isfinite()
    bad = (~finite).float().view(1, 1, -1)
    near = torch.nn.functional.max_pool1d(bad, 127, stride=1, padding=63).view(-1) > 0
    return finite & ((error > limit) | (error.isnan() & ~near))


def one(seed: int, turn: int, part: str) -> tuple[str, Tensor, Tensor, Tensor]:
    """Turn ``turn``: what was tried, the values, errors and limits."""
    choose = random.Random(f"{seed} {turn}")
    generator = torch.Generator().manual_seed(seed * 1_000_003 + turn)
    dtype = VALUE_DTYPES[turn // 3 % 3]
    values = hostile(generator, choose, dtype)
    name, error, limit = PARTS[part](values, choose)
    return name, values, error, limit


def replay(path: Path) -> int:
    """Try a kept turn again; 1 where a value is still outside."""
    kept = torch.load(path, weights_only=True)
    name, values, error, limit = one(kept["seed"], kept["turn"], kept["part"])
    wrong = torch.nonzero(outside(kept["part"], values, error, limit)).flatten()
    print(f"{name}: {len(wrong)} values outside")
    for at in wrong[:5].tolist():
        print(f"  [{at}] {float(values[at])!r}: off by {float(error[at])}, may {float(limit[at])}")
    return int(len(wrong) > 0)
