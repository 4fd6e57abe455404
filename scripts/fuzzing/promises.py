"""Check codecs, messages and sums of messages against their bounds on hostile values.

The kernels encode and decode every message; its bound is computed here in float64 from the values
alone. Sums repeat the steps of ``collectives`` without communication: ranks encode, an owner
decodes and adds to its values in fp32 and, with a second hop, encodes the sum for all to decode.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuzzing.hostile import NUMEL, absmax_of, spoilt_by, spread
from hybridcomp.codecs import Bounded, Codec, make_codec
from hybridcomp.codecs.budget import FLOOR, ROUNDING, Mode

BOUNDS = (0.5, 0.1, 0.05, 0.02, 0.006, 1e-2, 1e-3, 1e-4, 1e-5, 3e-7)
SEGMENTS = (64, 256, 1024, 4096)
#: values per message
NUMELS = (NUMEL, NUMEL, 70_001, 4097)
FIXED = ("blockint", "zfp", "fp8", "bf16", "fp16")
CODECS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bf16", {}), ("fp16", {}), ("fp8", {"format": "e4m3"}), ("fp8", {"format": "e5m2"}),
    *(("blockint", {"bits": bits}) for bits in range(2, 9)),
    *(("blockint", {"bits": bits, "rotate": True}) for bits in (2, 3, 4)),
    *(("blockint", {"bits": 4, "levels": levels}) for levels in ("gaussian", "lloyd")),
    *(("blockint", {"bits": bits, "rounding": "random"}) for bits in (2, 4, 8)),
    *(("zfp", {"rate": rate}) for rate in (2.5, 4, 8, 13.75, 16, 24)),
    *(("radix", {"error_bound": bound, "segment": segment})
      for bound in (0.3, 1e-2, 1e-4, 1e-6) for segment in (64, 4096)),
    ("mpc", {}), ("expcode", {}),
)  # fmt: skip


@dataclass
class Turn:
    """One comparison: result, exact value and limit of the difference."""

    name: str
    decoded: Tensor  # in its original dtype
    exact: Tensor  # float64
    limit: Tensor  # float64; infinite if nothing is promised
    spoilt: Tensor | None  # NaN is allowed, since the block held a NaN or Inf

    @property
    def error(self) -> Tensor:
        """Return the absolute error, NaN if either value is."""
        return (self.decoded.double() - self.exact).abs()

    def wrong(self) -> Tensor:
        """Mark violations: out of bounds, an unexpected NaN, or a lost NaN."""
        bad = ~(self.error <= self.limit) & self.limit.isfinite()
        if self.spoilt is None:
            return bad
        finite = self.exact.isfinite()
        bad &= finite & ~(self.decoded.isnan() & self.spoilt)
        return bad | (~finite & self.decoded.isfinite())


def spoils(codec: Codec) -> int:
    """Return the block size: a single NaN may turn all values of its block into NaN."""
    if codec.name == "blockint":
        return 64 if getattr(codec, "rotate", False) else 32
    return 4 if codec.name == "zfp" else 1


def through(codec: Codec, values: Tensor, dtype: torch.dtype, numel: int = 0) -> Tensor:
    """Encode ``values`` as messages of ``numel`` (0: a single one), and decode to ``dtype``."""
    numel = numel or values.numel()
    room = torch.empty(codec.wire_nbytes(numel, values.dtype), dtype=torch.uint8)
    out = torch.empty(values.numel(), dtype=values.dtype if codec.lossless else dtype)
    for start in range(0, values.numel(), numel):
        used = codec.encode(values[start : start + numel], room)
        codec.decode(room[:used], out[start : start + numel])
    return out.to(dtype)


def bound_of(codec: Codec, absmax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``element_bound`` for each entry of ``absmax``, evaluated once per distinct value."""
    unique, where = torch.unique(absmax, return_inverse=True)
    limits = [codec.element_bound(value, dtype) for value in unique.tolist()]
    return torch.tensor(limits, dtype=torch.float64)[where]


def try_codec(values: Tensor, choose: random.Random) -> Turn:
    """Check a codec against its bound."""
    name, settings = choose.choice(CODECS)
    numel = choose.choice(NUMELS)
    codec, values = make_codec(name, **settings), values[: NUMEL // numel * numel]
    own = codec.lossless or (name == "radix" and choose.random() < 0.5)
    decoded = through(codec, values, values.dtype if own else torch.float32, numel)
    block = codec.segment if name == "radix" else codec.block_size
    if codec.lossless:
        limit = torch.zeros(len(values), dtype=torch.float64)
    else:
        limit = bound_of(codec, absmax_of(values, numel, block), values.dtype)
        limit = spread(limit, numel, block)
    spoilt = spoilt_by(values, numel, spoils(codec))
    return Turn(f"{codec}, {numel} values", decoded, values.double(), limit, spoilt)


def _promise(choose: random.Random, families: tuple[str, ...], dtype: torch.dtype) -> Bounded:
    """Choose a bound, its mode and segments, and the codec that satisfies it."""
    bound, family = choose.choice(BOUNDS), choose.choice(families)
    if family in FIXED:
        return Bounded(bound, "rel", 4096, family)
    mode: Mode = choose.choice(("rel", "rel", "rel", "abs"))
    if mode == "abs" and choose.random() < 0.5:  # bounds as small as the smallest values too
        bound *= 2.0 ** choose.randint(-30 if dtype == torch.float32 else -14, 0)
    return Bounded(bound, mode, choose.choice(SEGMENTS), family)


def try_moved(values: Tensor, choose: random.Random) -> Turn:
    """Check a message that is only sent, not summed, against its ``error_bound``."""
    promise = _promise(choose, ("auto", "auto", "auto", "radix", "radix", *FIXED), values.dtype)
    numel, dtype = choose.choice(NUMELS), values.dtype
    values = values[: NUMEL // numel * numel]
    (codec,) = promise.for_message(numel, dtype, 1).split_error_budget(1, 1, result=dtype)
    decoded = through(codec, values, dtype, numel)
    absmax = absmax_of(values, numel, promise.segment)
    if promise.fixed_size:
        absmax = absmax.clamp(min=FLOOR)
    bound, limit = promise.error_bound, promise.error_bound * absmax
    if promise.mode == "abs":
        limit = bound + (absmax + bound) * ROUNDING[dtype]
    spoilt = spoilt_by(values, numel, spoils(codec))
    limit = spread(limit, numel, promise.segment)
    name = f"{promise} as {codec}, {numel} values"
    return Turn(name, decoded, values.double(), limit, spoilt)


def try_sum(values: Tensor, choose: random.Random) -> Turn:
    """Check a sum over two to eight ranks, by one of four algorithms, against its bound."""
    dtype = values.dtype
    way = choose.choice(("two hops", "two hops", "pair", "owner", "two levels"))
    ranks = {"pair": 2, "two levels": choose.choice((4, 6, 8))}.get(way, choose.randint(2, 8))
    promise = _promise(choose, ("auto", "auto", "radix", "radix", *FIXED), dtype)
    share = NUMEL // ranks
    numel = choose.choice((share, share, 4097, 70_001 // ranks))
    parts = list(values[: share // numel * numel * ranks].view(ranks, -1))
    scales = [2.0 ** choose.randint(-8, 0) for _ in parts]
    parts = [(part.float() * scale).to(dtype) for part, scale in zip(parts, scales, strict=True)]
    codec = promise.for_message(numel * ranks, dtype, ranks)
    decoded, used = _WAYS[way](codec, parts, numel)
    exact = torch.stack([part.double() for part in parts]).sum(0)
    limit = _limit_of_sum(promise, way, used, parts, numel, decoded.dtype)
    spoilt = _spoilt_sum(parts, numel, used)
    name = f"sum of {ranks} ({way}), {promise} as {', '.join(map(str, used))}, {numel} values"
    return Turn(name, decoded, exact, limit, spoilt)


def _added(codec: Codec, encoded: list[Tensor], own: Tensor, numel: int) -> Tensor:
    """Return ``own`` plus each rank's decoded values, added in fp32 in rank order."""
    total = own.to(torch.float32, copy=True)
    for part in encoded:
        total += through(codec, part, torch.float32, numel)
    return total


def _two_hops(codec: Codec, parts: list[Tensor], numel: int) -> tuple[Tensor, tuple[Codec, ...]]:
    """All-reduce over three or more ranks; return the chunk that the first rank owns."""
    dtype = parts[0].dtype
    used = codec.split_error_budget(2, len(parts), result=dtype, exact=1)
    total = _added(used[0], parts[1:], parts[0], numel)
    return through(used[1], total, dtype, numel), used


def _pair(codec: Codec, parts: list[Tensor], numel: int) -> tuple[Tensor, tuple[Codec, ...]]:
    """All-reduce over two ranks, each of which encodes all its values."""
    used = codec.split_error_budget(1, 2, result=parts[0].dtype)
    total = _added(used[0], parts, torch.zeros(len(parts[0])), numel)
    return total.to(parts[0].dtype), used


def _owner(codec: Codec, parts: list[Tensor], numel: int) -> tuple[Tensor, tuple[Codec, ...]]:
    """Reduce-scatter; the sums stay fp32."""
    used = codec.split_error_budget(1, len(parts), exact=1)
    return _added(used[0], parts[1:], parts[0], numel), used


def _two_levels(codec: Codec, parts: list[Tensor], numel: int) -> tuple[Tensor, tuple[Codec, ...]]:
    """All-reduce in two levels over nodes of two ranks, with native fp32 sums inside a node."""
    dtype = parts[0].dtype
    nodes = [one.float() + two.float() for one, two in zip(parts[::2], parts[1::2], strict=True)]
    between = codec.for_presummed(2, dtype)
    if between.split_error_budget(2, len(nodes), result=torch.float32, exact=1)[0].lossless:
        nodes = [node.to(dtype).float() for node in nodes] if dtype != torch.float32 else nodes
    decoded, used = _two_hops(between, nodes, numel)
    return decoded.to(dtype), used


_WAYS = {"two hops": _two_hops, "pair": _pair, "owner": _owner, "two levels": _two_levels}


def _limit_of_sum(
    promise: Bounded, way: str, used: tuple[Codec, ...], parts: list[Tensor], numel: int,
    result: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return the bound of ``codecs/bounded.py``; infinite if the sum overflows."""
    segment, bound = promise.segment, promise.error_bound
    absmaxes = [absmax_of(part, numel, segment) for part in parts]
    if any(not one.lossless and one.name != "radix" for one in used):
        absmaxes = [absmax.clamp(min=FLOOR) for absmax in absmaxes]
    amount = torch.stack(absmaxes).sum(0)
    info, u = torch.finfo(result), ROUNDING[result]
    limit = bound * amount
    if promise.mode == "abs":
        unit = (len(parts) + 2) * 2.0**-24
        limit = bound + (amount + bound) * ((1 + unit / (1 - unit)) * (1 + u) - 1)
    grid = 0.0 if result == torch.float32 else info.smallest_normal * info.eps / 2
    limit = limit + grid
    if used[-1].lossless:
        limit = torch.maximum(limit, _native(way, u, len(parts)) * amount + grid)
    fits = amount + limit < info.max
    return spread(torch.where(fits, limit, math.inf), numel, segment)


def _native(way: str, rounding: float, ranks: int) -> float:
    """Return a native sum's relative error: fp32 sums, rounded once, or twice in two levels."""
    roundings = 2 if way == "two levels" else 1
    return float((1 + rounding) ** roundings * (1 + (ranks + 2) * 2.0**-24) - 1)


def _spoilt_sum(parts: list[Tensor], numel: int, used: tuple[Codec, ...]) -> Tensor | None:
    """Mark where a NaN of any rank may have made the sum NaN; None if no rank has one."""
    block = max(spoils(one) for one in used)
    masks = [mask for part in parts if (mask := spoilt_by(part, numel, block)) is not None]
    return torch.stack(masks).any(0) if masks else None
