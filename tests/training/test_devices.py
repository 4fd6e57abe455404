"""DeepSpeed and megatron-core end to end on one GPU, the ranks sharing it over gloo.

``pytest -m gpu`` runs everything on a GPU. The rows of ``EVERYWHERE`` also run on a CPU, which
tests the setup before it reaches a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

from tests.selection import by_day
from tests.training import mcore_trainer, pipe_trainer, trainer
from tests.training.devices import run_on
from tests.training.test_offload import BLOCKINT, offloading, with_block

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GRADIENTS = {"codec": "blockint", "bits": 4, "error_feedback": True}
LOSSLESS, LOSSY = {"dp": "expcode", "zero": "expcode"}, {"dp": GRADIENTS, "zero": "blockint"}


def zero_jobs(stage: int, steps: int) -> list[trainer.Job]:
    """Unpatched, lossless, lossy."""
    plain = trainer.Job(stage, "bf16", steps=steps)
    blocks: list[dict[str, Any]] = [{**found, "min_bytes": 0} for found in (LOSSLESS, LOSSY)]
    return [plain, *(replace(plain, block=block) for block in blocks)]


def check_zero(device: str, stage: int, steps: int) -> None:
    ranks = run_on(device, 2, trainer.run, zero_jobs(stage, steps))
    for plain, lossless, lossy in ranks:
        assert lossless.losses == plain.losses
        assert lossless.digests == plain.digests
        assert lossy.losses != plain.losses
        assert lossy.ledger["dp"][1] == 0
        assert lossy.ledger["dp"][2] > 3.5 * lossy.ledger["dp"][3]
        assert lossy.losses[-1] == pytest.approx(plain.losses[-1], rel=0.1)
    assert ranks[0][2].digests == ranks[1][2].digests


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [1, 3])
def test_zero(stage: int) -> None:
    check_zero("cuda", stage, 20)


@pytest.mark.parametrize("stage", by_day([1, 3], [3]))
def test_zero_through_staged_tensors_on_a_cpu(stage: int) -> None:
    check_zero("cpu", stage, 5)


def check_pipeline(device: str, steps: int) -> None:
    """Check two stages with encoded activations and gradients."""
    plain = pipe_trainer.Job(steps=steps)
    both = {"pp": "expcode", "min_bytes": 0}, {"pp": BLOCKINT, "min_bytes": 0}
    jobs = [plain, *(replace(plain, block=block) for block in both)]
    ranks = run_on(device, 2, pipe_trainer.run, jobs)
    for base, lossless, lossy in ranks:
        assert lossless.losses == base.losses
        assert lossless.parameters == base.parameters
        assert lossy.losses[-1] == pytest.approx(base.losses[-1], rel=0.1)
        rows = [row for row in lossy.messages if row[0] == "pp" and row[3]]
        assert rows and all(raw > 2.5 * wire for *_, raw, wire in rows)


@pytest.mark.parametrize("device", DEVICES)
def test_pipeline(device: str) -> None:
    check_pipeline(device, 20 if device == "cuda" else 3)


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload(stage: int) -> None:
    """One rank with real bus copies: bytes fall by the codec's ratio."""
    cases = [(1, "device"), (2, "device"), (2, "host"), (6, "device"), (6, "host")]
    check_offload("cuda", stage, 20, cases)


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [2, 3])
def test_offload_with_overlap(stage: int) -> None:
    """Gradients are encoded on the stream that reduces them."""
    zero = {"offload_optimizer": {"device": "cpu"}, "overlap_comm": True}
    plain = offloading(stage, steps=20, zero=zero)
    ((base, lossy),) = run_on("cuda", 1, trainer.run, [plain, with_block(plain, BLOCKINT)])
    assert lossy.losses[-1] == pytest.approx(base.losses[-1], rel=0.1)


@pytest.mark.nightly
def test_offload_in_a_process_of_its_own_on_a_cpu() -> None:
    check_offload("cpu", 2, 4, [(2, "host")])


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [2, 3])
def test_offload_with_auto(stage: int) -> None:
    """Native and encoded steps alternate, losslessly and thus invisibly."""
    plain = offloading(stage, steps=30, accumulation=2)
    auto = with_block(plain, {"codec": "expcode", "when": "auto"})
    ((base, found),) = run_on("cuda", 1, trainer.run, [plain, auto])
    assert found.losses == base.losses and found.digests == base.digests


def check_offload(device: str, stage: int, steps: int, cases: list[tuple[int, str]]) -> None:
    """``cases``: micro-batches per step, and where they are accumulated; all in one process."""
    zero = {"offload_optimizer": {"device": "cpu"}}  # in pinned memory if available
    jobs = []
    for accumulation, sums in cases:
        plain = offloading(stage, steps=steps, accumulation=accumulation, zero=zero)
        blocks = "none", {"codec": "expcode", "sums": sums}, {**BLOCKINT, "sums": sums}
        jobs += [plain, *(with_block(plain, block) for block in blocks)]
    (outcomes,) = run_on(device, 1, trainer.run, jobs)
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
def test_megatron_tensor_parallel() -> None:
    """TP2 of megatron-core, if installed."""
    pytest.importorskip("megatron.core")
    plain = mcore_trainer.Job(tp=2, steps=20)
    blocks = [{"tp": codec, "min_bytes": 0} for codec in ("none", BLOCKINT)]
    jobs = [plain, *(replace(plain, block=block) for block in blocks)]
    for base, none, lossy in run_on("cuda", 2, mcore_trainer.run, jobs):
        assert not isinstance(base, str) and not isinstance(none, str), (base, none)
        assert not isinstance(lossy, str), lossy
        assert none.losses == base.losses
        assert lossy.losses[-1] == pytest.approx(base.losses[-1], rel=0.1)
        _, native, raw, wire = lossy.ledger["tp", "forward"]
        assert native == 0 and raw > 3 * wire
