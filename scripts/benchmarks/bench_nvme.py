"""Step two models whose states are on a drive in turns: ZeRO-Infinity's swapper, and encoded files.

    python scripts/benchmarks/bench_nvme.py FOLDER GBYTES_PER_SECOND

Both read and write through DeepSpeed's own libaio handle; bytes are those that it is given. A rate
other than 0 makes the handle wait as a drive with one queue of that speed would.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from torch import Tensor, nn

FOLDER, RATE = sys.argv[1], 1e9 * float(sys.argv[2])
WIDTH, LAYERS, STEPS = 1536, 6, 6
MOVED = [0, 0.0]


class Drive:
    """DeepSpeed's handle, with the bytes counted and the speed limited."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.until = inner, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _count(self, buffer: Tensor) -> None:
        MOVED[0] += buffer.nbytes
        if RATE:
            self.until = max(self.until, time.perf_counter()) + buffer.nbytes / RATE

    def async_pread(self, buffer: Tensor, *rest: Any) -> Any:
        self._count(buffer)
        return self.inner.async_pread(buffer, *rest)

    def async_pwrite(self, buffer: Tensor, *rest: Any) -> Any:
        self._count(buffer)
        return self.inner.async_pwrite(buffer, *rest)

    def wait(self) -> Any:
        found = self.inner.wait()
        time.sleep(max(0.0, self.until - time.perf_counter()))
        return found


class Loaded:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def aio_handle(self, *args: Any, **kwargs: Any) -> Any:
        return Drive(self.inner.aio_handle(*args, **kwargs))


def engine(block: Any, pipelined: bool) -> Any:
    import deepspeed

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    nvme = {"device": "nvme", "nvme_path": tempfile.mkdtemp(dir=FOLDER), "buffer_count": 12,
            "pipeline_read": pipelined, "pipeline_write": pipelined}
    config = {
        "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "steps_per_print": 10_000,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, "sub_group_size": WIDTH * WIDTH, "offload_optimizer": nvme,
                              "stage3_param_persistence_threshold": 0},
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": 1},
    }
    if block:
        config["compression"] = block
    made, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()),
                                    config=config)
    return made


def step(made: Any, number: int) -> float:
    values = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)).bfloat16()
    loss = made(values).float().square().mean()
    made.backward(loss)
    made.step()
    return float(loss)


def main() -> None:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                      MASTER_PORT="29537")
    import deepspeed
    from deepspeed.ops.op_builder import AsyncIOBuilder

    import hybridcomp

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    load = AsyncIOBuilder.load
    AsyncIOBuilder.load = lambda self, verbose=True: Loaded(load(self, verbose))
    deepspeed.init_distributed("gloo")
    hybridcomp.install()
    for pipelined in (False, True):
        ways = {"ZeRO-Infinity": engine(None, pipelined),
                "states expcode": engine({"offload": {"states": "expcode"}}, pipelined)}
        figures: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
        for number in range(STEPS + 1):
            for name, made in ways.items():
                MOVED[0], start = 0, time.perf_counter()
                loss = step(made, number)
                figures[name].append((MOVED[0], time.perf_counter() - start, loss))
        both = list(figures.values())
        assert [one[2] for one in both[0]] == [one[2] for one in both[1]], "equal losses"
        for name, every in figures.items():
            nbytes, seconds, _ = zip(*every[1:], strict=True)
            print(json.dumps({"rate": RATE, "pipelined": pipelined, "way": name,
                              "MB": statistics.median(nbytes) / 1e6,
                              "s": statistics.median(seconds), "least": min(seconds)}), flush=True)
        ratios = [b[1] / a[1] for a, b in zip(*both, strict=True)][1:]
        print("ratio of seconds", sorted(round(one, 3) for one in ratios), flush=True)
        for made in ways.values():
            made.destroy()


main()
