"""Hashed data: payloads, collectives through channels with their bytes, blocks.

Values are made of integers and powers of two, so that they have the same bits on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import Channels
from hybridcomp.channels.residuals.pieces import Piece
from hybridcomp.codecs import make_codec
from hybridcomp.codecs.base import VALUE_DTYPES
from hybridcomp.collectives import OwnedRange
from hybridcomp.config import CompressionConfig, load_config
from tests.channels import sent

ROOT = Path(__file__).resolve().parent.parent.parent
CODECS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bf16", {}),
    ("fp16", {}),
    ("fp8", {}),
    ("fp8", {"format": "e5m2"}),
    *(("blockint", {"bits": bits}) for bits in (2, 3, 4, 5, 6, 8)),
    ("blockint", {"bits": 4, "rotate": True}),
    ("blockint", {"bits": 4, "rotate": True, "levels": "gaussian"}),
    ("blockint", {"bits": 4, "levels": "lloyd"}),
    ("blockint", {"bits": 4, "rounding": "random"}),
    ("radix", {"error_bound": 1e-2}),
    ("radix", {"error_bound": 1e-3, "segment": 256, "mode": "abs"}),
    ("zfp", {"rate": 8.0}),
    ("zfp", {"rate": 16.0}),
    ("mpc", {}),
    ("mpc", {"dim": 3}),
    ("expcode", {}),
)
NUMELS = (0, 1, 255, 4096, 70_001)
BLOCKS: dict[str, dict[str, Any]] = {
    "lossless": {"dp": "expcode", "zero": "mpc", "ep": "expcode"},
    "blockint": {"dp": {"codec": "blockint", "bits": 4}, "zero": "blockint", "ep": "fp8"},
    "feedback": {"dp": {"codec": "blockint", "bits": 4, "error_feedback": True}},
    "bound": {"dp": {"error_bound": 1e-2, "error_feedback": True}, "zero": {"error_bound": 1e-3}},
    "variable": {"dp": {"codec": "radix", "error_bound": 1e-2}, "zero": "expcode", "ep": "mpc"},
}
#: sizes of a bucket's parameters
SHAPES = ((40, 61), (1, 61), (33, 40), (977,))


def values(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return 1-D values of many magnitudes, the same bits everywhere."""
    generator = torch.Generator().manual_seed(seed)
    mantissa = torch.randint(-(1 << 22), 1 << 22, (numel,), generator=generator)
    exponent = torch.randint(-26, -18, (numel,), generator=generator)
    return torch.ldexp(mantissa.float(), exponent).to(dtype)


def sha(*tensors: Tensor) -> str:
    """Hash the bytes of ``tensors``."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def payloads() -> Iterator[tuple[str, str]]:
    """Return every codec's payloads and their decoded values, by codec and dtype."""
    for name, settings in CODECS:
        codec = make_codec(name, **settings)
        for dtype in VALUE_DTYPES:
            found = []
            for numel in NUMELS:
                source = values(numel, dtype, numel)
                out = torch.zeros(codec.wire_nbytes(numel, dtype), dtype=torch.uint8)
                used = codec.encode(source, out)
                back = torch.empty_like(source)
                codec.decode(out[:used], back)
                found += [out[:used], back]
            yield f"{codec.spec} {dtype}", sha(*found)


def blocks() -> Iterator[tuple[str, str]]:
    """Return the digest of every block under configs/."""
    for path in sorted((ROOT / "configs").glob("ds_*.json")):
        config = load_config(path)
        if config is not None:
            yield path.name, config.digest()


def _pieces() -> list[Piece]:
    return [Piece(f"p{index}", 0, torch.Size(shape).numel()) for index, shape in enumerate(SHAPES)]


def collectives(block: dict[str, Any], dtype: torch.dtype, per_node: int) -> dict[str, Any]:
    """Run two steps of every collective of ``dp``, ``zero`` and ``ep`` on this rank.

    ``per_node``: 0 for one level. Returns digests and the ledger's bytes.
    """
    whole = {**block, "min_bytes": 0, **({"hierarchy": per_node} if per_node else {})}
    channels = Channels(CompressionConfig.parse(whole))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if per_node:
        channels.place([tuple(range(ranks))])
    pieces = _pieces()
    numel = sum(piece.numel for piece in pieces)
    found: list[Tensor] = []
    for step in range(2):
        source = values(numel, dtype, 100 * step + rank)
        found += _reductions(channels, source, pieces)
        found += _moves(channels, source)
        channels.step += 1
    ledger = {
        " ".join(key): [int(entry.messages), int(entry.raw_nbytes), int(entry.wire_nbytes)]
        for key, entry in channels.ledger.interval.items()
        if entry.messages
    }
    return {"values": sha(*found), "ledger": ledger}


def _reductions(channels: Channels, source: Tensor, pieces: list[Piece]) -> list[Tensor]:
    channel, ranks = channels["dp"], dist.get_world_size()
    codec = channel.codec(source.numel(), source.dtype, None)
    if codec is None:
        return []
    whole = source.clone()
    sent.all_reduce(channel, whole, codec, None, pieces=pieces).wait()
    half = pieces[0].numel
    ranges = [OwnedRange(0, half, (0,)), OwnedRange(half, source.numel(), (ranks - 1,))]
    owned = sent.reduce_to_owners(
        channel, source.clone(), ranges, codec, None, pieces=_named("o", pieces)
    )
    cut = source.numel() // ranks
    shards = [source[cut * rank : cut * (rank + 1)].clone() for rank in range(ranks)]
    sides = [[Piece(f"s{index}", 0, cut)] for index in range(ranks)]
    mine = sent.reduce_scatter(channel, shards, codec, None, pieces=sides).wait()
    return [whole, *owned, mine]


def _named(prefix: str, pieces: list[Piece]) -> list[Piece]:
    return [Piece(prefix + piece.name, piece.offset, piece.numel) for piece in pieces]


def _moves(channels: Channels, source: Tensor) -> list[Tensor]:
    found, ranks = [], dist.get_world_size()
    codec = channels["zero"].codec(source.numel(), source.dtype, None)
    if codec is not None:
        out = source.new_empty(ranks * source.numel())
        sent.all_gather(channels["zero"], source, out, codec, None).wait()
        found.append(out)
    codec = channels["ep"].codec(source.numel(), source.dtype, None)
    if codec is not None:
        cut = source[: source.numel() // ranks * ranks]
        out = torch.empty_like(cut)
        sent.all_to_all(channels["ep"], out, cut, codec, None).wait()
        found.append(out)
    return found
