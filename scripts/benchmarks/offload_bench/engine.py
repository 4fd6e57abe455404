"""Build the engine of ``bench_offload.py``: model, host optimizer, compression block."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.offload_bench import say
from fuzzing.private_folder import private_folder

DEVICE = "DS_ACCELERATOR"
BUILD = "from deepspeed.ops.op_builder import CPUAdamBuilder as B; B().load(verbose=False)"


class Block(nn.Module):
    """MLP block with 8 x width^2 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (tokens, width) to (tokens, width)."""
        result: Tensor = hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))
        return result


def builds_cpu_adam(limit: float) -> bool:
    """Build DeepSpeed's CPUAdam once, in a process that can be killed.

    It builds in a separate folder: a killed build leaves a lock that blocks all later ones.
    """
    folder = private_folder(f"hybridcomp-bench-{os.environ[DEVICE]}")
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    say(f"CPUAdam, built within {limit:.0f} s or not at all ...")
    start, pipe = time.perf_counter(), subprocess.PIPE
    command = [sys.executable, "-c", BUILD]
    done = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        _, errors = done.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(done.pid, signal.SIGKILL)  # also kills the compilers that it started
        done.communicate()
        shutil.rmtree(folder, ignore_errors=True)
        say(f"CPUAdam was not built within {limit:.0f} s: torch's AdamW steps")
        return False
    if done.returncode:
        why = errors.strip().splitlines()[-1:] or ["no reason given"]
        say(f"CPUAdam does not build ({why[0]}): torch's AdamW steps")
        return False
    say(f"CPUAdam took {time.perf_counter() - start:.0f} s to build and load")
    return True


def optimizer_of(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer, which runs on the host."""
    if name == "cpuadam":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        found: torch.optim.Optimizer = DeepSpeedCPUAdam(parameters, 1e-4)
        return found
    return torch.optim.AdamW(parameters, 1e-4, fused=True)


def build(arguments: argparse.Namespace, **more: Any) -> Any:
    """Return an engine with a host optimizer; ``more``: keys of the offload dimension."""
    import deepspeed
    import deepspeed.ops

    import hybridcomp

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    hybridcomp.install()
    torch.manual_seed(0)
    with torch.device(arguments.device):
        model = nn.Sequential(*(Block(arguments.width) for _ in range(arguments.layers)))
    model.bfloat16()
    offload = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": arguments.accumulation,
        "zero_optimization": {
            "stage": arguments.stage, "offload_optimizer": offload,
            "overlap_comm": arguments.overlap,
        },
        "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True}, "steps_per_print": 10**9,
        "compression": {
            "offload": {**json.loads(arguments.codec), **more}, "ledger": {"sample_every": 0},
        },
    }  # fmt: skip
    optimizer = optimizer_of(arguments.optimizer, list(model.parameters()))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine
