"""Damaged payloads through the CUDA decoders, on the host with exact-size buffers.

An access beyond an array crashes. The device must report damage where the CPU rejects a payload,
and else decode the same values; otherwise the back ends of a job would diverge.
"""

from __future__ import annotations

import os
import random

import pytest
import torch
from torch import Tensor

from fuzzing.mutate import mutate
from hybridcomp.codecs import VALUE_DTYPES, Codec
from hybridcomp.errors import CodecError
from hybridcomp.kernels.cuda import CudaKernels
from tests.codecs import arrays, guarded
from tests.kernels.cuda.common import CODECS, bits_but_nan, kernels_replaced, payload_of
from tests.kernels.cuda.emulated import EmulatedLauncher

KERNELS = CudaKernels(EmulatedLauncher())
#: cases per codec; the long version has more
CASES = int(os.environ.get("HYBRIDCOMP_FUZZ_CASES", "20"))
#: codecs whose garbage may differ: a GPU reads past the flag of zfp's zero block, where every
#: encoder writes zeros
OWN_GARBAGE = ("zfp",)
KINDS = ("normal", "outliers", "sparse", "nonfinite", "wide", "subnormal", "bits")


def decoded(codec: Codec, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor | None:
    """Return the values, None if the payload was rejected."""
    out = guarded.empty(numel * dtype.itemsize, dtype)
    try:
        codec.decode(payload, out)
        KERNELS.check()  # a GPU reports damage here
    except CodecError:
        return None
    return out


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_damage_is_what_the_cpu_takes_for_damage(codec: Codec) -> None:
    choose = random.Random(f"21 {codec}")
    refused = 0
    for case in range(CASES):
        dtype, numel = choose.choice(VALUE_DTYPES), choose.choice((1, 31, 1025, 2531, 5000))
        values, other = (
            arrays.make(choose.choice(KINDS), numel, choose.randrange(1000), dtype)
            for _ in range(2)
        )
        whole, second = (bytes(payload_of(codec, one).tolist()) for one in (values, other))
        broken = mutate(choose, whole, second, multiple=16)
        payload = (
            guarded.copy(torch.frombuffer(bytearray(broken), dtype=torch.uint8))
            if broken
            else torch.empty(0, dtype=torch.uint8)
        )
        expected = decoded(codec, payload, numel, dtype)
        with kernels_replaced(KERNELS):
            found = decoded(codec, payload, numel, dtype)
        refused += expected is None
        assert (found is None) == (expected is None), (case, numel, dtype, expected is None)
        if expected is not None and found is not None and codec.name not in OWN_GARBAGE:
            assert torch.equal(bits_but_nan(found), bits_but_nan(expected)), (case, numel, dtype)
    assert refused < CASES
