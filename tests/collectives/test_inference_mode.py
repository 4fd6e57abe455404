"""Collectives in ``torch.inference_mode``, as in an evaluation, and in training after it."""

from __future__ import annotations

import torch

from hybridcomp import collectives
from hybridcomp.codecs import LOSSLESS, Codec, make_codec
from hybridcomp.collectives import Group, Meter, OwnedRange, Reduction, Transfer
from hybridcomp.collectives.wire.encoding import POOL
from tests.ranks import run_ranks

NUMEL = 5001
CODECS: tuple[Codec, ...] = (
    make_codec("blockint", bits=4), LOSSLESS, make_codec("radix", error_bound=1e-2),
)  # fmt: skip


def evaluated_and_trained() -> list[float]:
    """Return collectives' values in an evaluation, and sums with residuals after it."""
    group, found = Group.of(None), []
    for codec in CODECS:
        for dtype in (torch.bfloat16, torch.float32):
            POOL.clear()
            with torch.inference_mode():
                values = torch.ones(NUMEL).to(dtype)
                collectives.all_reduce(values, Reduction(codec, group, Meter()))
                out = values.new_empty(2 * NUMEL)
                collectives.all_gather(values, out, Transfer(codec, group, Meter()))
                found += [float(values[-1]), float(out[-1])]
            values, left = torch.ones(NUMEL).to(dtype), torch.zeros(NUMEL)
            collectives.all_reduce(values, Reduction(codec, group, Meter(), residual=left))
            shards, kept = [torch.ones(1000).to(dtype)] * 2, list(torch.zeros(2, 1000))
            how = Reduction(codec, group, Meter())
            total = collectives.reduce_scatter(shards, how, kept).wait()
            (whole,) = collectives.reduce_to_owners(
                torch.ones(NUMEL).to(dtype),
                [OwnedRange(0, NUMEL, (0, 1))],
                Reduction(codec, group, Meter(), residual=left),
            )
            found += [float(values[-1]), float(total[-1]), float(whole[-1])]
    return found


def test_buffers_of_an_evaluation_serve_the_training_behind_it() -> None:
    for found in run_ranks(2, evaluated_and_trained):
        assert len(found) == 30 and all(abs(value - 2) < 0.05 for value in found)
