"""Shared by tests on the fake GPU: the GPU, tensors and channels on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridcomp.channels import Channels
from hybridcomp.config import CompressionConfig
from tests.stand_ins.gpu.machine import DEVICE, Gpu
from tests.stand_ins.gpu.pretended import pretended

RANKS, RANK, NUMEL = 4, 1, 9001
cuda: Any = torch.cuda  # partly untyped

#: torch's warning about addresses of fake tensors
QUIET = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    """Yield a GPU as rank 1 of four."""
    with torch.no_grad(), pretended(RANKS, RANK) as found:
        yield found


def chain(gpu: Gpu) -> list[str]:
    """Return the GPU's work since the last call: a line for each run of work on one stream."""
    lines: list[tuple[str, list[str]]] = []
    for stream, what in gpu.did:
        if what and (not lines or lines[-1][0] != stream):
            lines.append((stream, []))
        if what:
            lines[-1][1].append(what)
    gpu.did.clear()
    return [f"{stream}: {', '.join(what)}" for stream, what in lines]


def computing(lines: list[str]) -> tuple[int, int]:
    """Count the default stream's encodings, decodings and waits for messages in a ``chain``."""
    own = [line.split(": ", 1)[1].split(", ") for line in lines if line.startswith("the default")]
    every = [what for work in own for what in work]
    coded = sum(what.startswith(("blockint_", "expcode_", "pieces_")) for what in every)
    return coded, every.count("waits for a message")


def channels(**block: Any) -> Channels:
    """Return a block's channels without sampling, which would make the host wait."""
    every = {"ledger": {"sample_every": 0}, "min_bytes": 0, "start_step": 0}
    return Channels(CompressionConfig.parse({**every, **block}))


def values_of(numel: int = NUMEL, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return values on the GPU."""
    return torch.zeros(numel, dtype=dtype, device=DEVICE)
