"""The ledger's bytes against the kernel's own counters of the interface used.

The ranks run in a network namespace of their own, whose loopback carries nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT
from tests.ranks import run_ranks

STEPS, WARMUP, WIDTH = 6, 2, 512
#: ZeRO stage -> how many times fewer bytes 4 bits have to move
STAGES = {0: 3.5, 1: 6.0, 2: 6.0}
BLOCKS: dict[str, dict[str, Any]] = {
    "native": {"dp": "none"},
    "4 bits": {"dp": {"codec": "blockint", "bits": 4}, "min_bytes": 0},
}


def loopback_nbytes() -> int:
    """Bytes that left through ``lo`` since boot of this namespace."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "lo":
            return int(figures.split()[8])
    raise AssertionError("no loopback interface")


def train_each(ds_configs: list[dict[str, Any]]) -> list[dict[str, float]]:
    """``train`` with one after the other: most of a launch is imports."""
    return [train(ds_config) for ds_config in ds_configs]


def train(ds_config: dict[str, Any]) -> dict[str, float]:
    """NIC bytes of all ranks and the ledger's bytes of this rank over STEPS steps."""
    import deepspeed
    import deepspeed.ops
    import torch
    import torch.distributed as dist

    import hybridcomp
    from hybridcomp.channels import channels_of

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    hybridcomp.install()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=ds_config
    )
    dtype = next(engine.module.parameters()).dtype
    start = 0
    totals = {"raw": 0.0, "wire": 0.0}
    for step in range(WARMUP + STEPS):
        if step == WARMUP:
            dist.barrier()
            start = loopback_nbytes()
            dist.barrier()
            if (channels := channels_of(engine)) is not None:
                channels.ledger.restart()
        values = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
        loss = engine(values).float().square().mean()
        engine.backward(loss)
        engine.step()
    dist.barrier()
    nic = loopback_nbytes() - start
    dist.barrier()
    if (channels := channels_of(engine)) is not None:
        for entry in channels.ledger.interval.values():
            totals["raw"] += entry.raw_nbytes
            totals["wire"] += entry.wire_nbytes
    return {"nic": nic, **totals}


def config(stage: int, block: dict[str, Any] | None) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000,
    }
    return plain if block is None else {**plain, "compression": block}


@pytest.fixture(scope="module")
def namespace() -> list[str]:
    """The command that enters a fresh network namespace."""
    for command in (["unshare", "--net"], ["unshare", "--map-root-user", "--net"]):
        if (
            shutil.which("unshare")
            and not subprocess.run([*command, "true"], check=False).returncode
        ):
            return command
    pytest.skip("network namespaces are not permitted here")


@pytest.fixture(scope="module")
def measured(namespace: list[str]) -> dict[tuple[int, str], list[dict[str, float]]]:
    """Stage and name of the block -> what every rank found."""
    cases = [(stage, name) for stage in STAGES for name in BLOCKS]
    arguments = json.dumps([config(stage, BLOCKS[name]) for stage, name in cases])
    result = subprocess.run(
        [*namespace, sys.executable, "-m", "tests.training.test_wire", arguments],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    by_rank: list[list[dict[str, float]]] = json.loads(result.stdout.splitlines()[-1])
    return {case: [found[i] for found in by_rank] for i, case in enumerate(cases)}


@pytest.mark.parametrize(("stage", "target"), STAGES.items())
def test_gradient_bytes(
    measured: dict[tuple[int, str], list[dict[str, float]]], stage: int, target: float
) -> None:
    """Ledger equals NIC within 3%; 4 bits move at most 1/target of native bf16 gradients."""
    native, coded = measured[stage, "native"], measured[stage, "4 bits"]
    for ranks in (native, coded):
        wire = sum(rank["wire"] for rank in ranks)
        assert wire == pytest.approx(ranks[0]["nic"], rel=0.03)
    assert native[0]["raw"] == native[0]["wire"]
    raw = sum(rank["raw"] for rank in coded)
    assert raw == sum(rank["raw"] for rank in native)
    gathered = sum(rank["wire"] for rank in native) - raw_of_gradients(native, stage)
    saved = (raw - gathered) / (sum(rank["wire"] for rank in coded) - gathered)
    assert saved >= target


def raw_of_gradients(ranks: list[dict[str, float]], stage: int) -> float:
    """Closed form: a ring all-reduce of bf16 gradients on two ranks, both ranks, STEPS steps."""
    numel = 6 * (WIDTH * WIDTH + WIDTH)
    return float(len(ranks) * numel * 2 * STEPS)


def lo_up() -> None:
    """Switch the loopback of a fresh namespace on (SIOCSIFFLAGS; needs no iproute2)."""
    import fcntl
    import socket
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))


if __name__ == "__main__":
    lo_up()
    print(json.dumps(run_ranks(2, train_each, json.loads(sys.argv[1]))))
