"""ZeRO-Offload on one GPU with real bus copies; ``tests.nccl`` trains on several ranks."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

from tests.nccl.pool import NcclPool
from tests.training import trainer
from tests.training.test_offload import BLOCKINT, offloading, with_block


def trained(device: str, jobs: list[trainer.Job]) -> list[trainer.Outcome]:
    """Train in a new process: the fork server of ``tests.ranks`` has DeepSpeed for the CPU."""
    with NcclPool(1, device=device, backend="gloo") as pool:
        found: list[trainer.Outcome] = pool.run(trainer.run, jobs, timeout=280.0)[0]
    return found


def check_offload(device: str, stage: int, steps: int, cases: list[tuple[int, str]]) -> None:
    """``cases``: micro-batches per step, and where they are accumulated; all in one process."""
    zero = {"offload_optimizer": {"device": "cpu"}}  # in pinned memory if available
    jobs = []
    for accumulation, sums in cases:
        plain = offloading(stage, steps=steps, accumulation=accumulation, zero=zero)
        blocks = "none", {"codec": "expcode", "sums": sums}, {**BLOCKINT, "sums": sums}
        jobs += [plain, *(with_block(plain, block) for block in blocks)]
    outcomes = trained(device, jobs)
    for index, (accumulation, sums) in enumerate(cases):
        base, none, lossless, lossy = outcomes[4 * index : 4 * index + 4]
        assert none.losses == base.losses and none.digests == base.digests
        if accumulation == 1 or device == "cpu" or sums == "device":
            assert lossless.losses == base.losses and lossless.digests == base.digests
        else:  # the host computes the norm in another order
            assert lossless.losses == pytest.approx(base.losses, rel=1e-3)
        assert lossy.losses[-1] == pytest.approx(base.losses[-1], rel=0.1)
        for way, least in (("forward", 1.8), ("backward", 3.5)):
            messages, native, raw, wire = lossy.ledger[f"offload.{way}"]
            assert messages > 0 and native == 0
            assert raw == none.ledger[f"offload.{way}"][2]
            assert raw > least * wire


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload(stage: int) -> None:
    """Bytes fall by the codec's ratio."""
    cases = [(1, "device"), (2, "device"), (2, "host"), (6, "device"), (6, "host")]
    check_offload("cuda", stage, 20, cases)


@pytest.mark.nightly
def test_offload_on_a_cpu() -> None:
    check_offload("cpu", 2, 4, [(2, "host")])


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [2, 3])
def test_offload_with_overlap(stage: int) -> None:
    """Gradients are encoded on the stream that reduces them."""
    zero = {"offload_optimizer": {"device": "cpu"}, "overlap_comm": True}
    plain = offloading(stage, steps=20, zero=zero)
    base, lossy = trained("cuda", [plain, with_block(plain, BLOCKINT)])
    assert lossy.losses[-1] == pytest.approx(base.losses[-1], rel=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [2, 3])
def test_offload_with_auto(stage: int) -> None:
    """Native and encoded steps alternate, losslessly and thus invisibly."""
    plain = offloading(stage, steps=30, accumulation=2)
    auto: Any = {"codec": "expcode", "when": "auto"}
    base, found = trained("cuda", [plain, with_block(plain, auto)])
    assert found.losses == base.losses and found.digests == base.digests
