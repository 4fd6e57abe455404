"""Training for chaos.py: a small compressed model with a checkpoint every few steps.

Runs as ``python -m hybridcomp.run trainer.py`` under DeepSpeed's launcher or torchrun, or as a
function under torchrun's agent. Each rank writes its step into ``CHAOS_FOLDER`` for the watcher,
and at a given step waits there until it may continue.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from lab.namespaces import started

STEPS = 8
WIDTH = 48
BLOCK: dict[str, Any] = {
    "dp": {"codec": "blockint", "bits": 4, "error_feedback": True},
    "zero": {"codec": "radix", "error_bound": 1e-2},
    "min_bytes": 0,
    "ledger": {"jsonl": "ledger.jsonl", "sample_every": 2},
}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
    "steps_per_print": 2,
    "compression": BLOCK,
}


def train(folder: Path, settings: dict[str, Any]) -> float:
    """Train, or resume from the checkpoint in ``folder``; return this rank's last loss.

    ``settings``: ``timeout`` of the process group in seconds; ``pause`` before every step;
    ``steps``; ``save_every``; ``stage`` of ZeRO. By rank: ``block``, changes of its compression
    block; ``version``, a fake version of hybridcomp; ``room``, a file size limit in bytes, as on a
    full disk.
    """
    import deepspeed
    import deepspeed.ops
    import torch

    # avoids an unneeded JIT build
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    rank = int(os.environ["RANK"])
    (folder / f"pid{rank}").write_text(f"{os.getpid()} {started(os.getpid())}")
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=settings["timeout"]))
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH + 5), torch.nn.ReLU(), torch.nn.Linear(WIDTH + 5, WIDTH)
    )
    config = json.loads(json.dumps(CONFIG))
    config["zero_optimization"]["stage"] = settings.get("stage", 2)
    config["compression"].update(settings.get("block", {}).get(str(rank), {}))
    config["compression"]["ledger"]["jsonl"] = str(folder / "ledger.jsonl")
    _pretend(settings, str(rank))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    checkpoints = folder / "checkpoints"
    if (checkpoints / "latest").is_file():
        path, _ = engine.load_checkpoint(str(checkpoints))
        print(f"rank {rank} goes on from step {engine.global_steps}: {path}", flush=True)
    loss = torch.zeros(())
    for step in range(engine.global_steps, settings.get("steps", STEPS)):
        (folder / f"step{rank}").write_text(str(step))
        time.sleep(settings.get("pause", 0.0))
        generator = torch.Generator().manual_seed(2 * step + rank)
        values = torch.randn(2, WIDTH, generator=generator)
        loss = (engine(values) - values).square().mean()
        engine.backward(loss)
        loss = loss.detach()
        engine.step()
        every = settings.get("save_every", 0)
        if every and engine.global_steps % every == 0:
            engine.save_checkpoint(str(checkpoints))
    print(f"FINISHED rank {rank} step {engine.global_steps} loss {float(loss):.6f}", flush=True)
    return float(loss)


def _pretend(settings: dict[str, Any], rank: str) -> None:
    """Simulate another version of hybridcomp, or a nearly full disk."""
    agreement: Any = importlib.import_module("hybridcomp.job.agreement")

    if rank in settings.get("version", {}):
        real, claimed = agreement.version, settings["version"][rank]
        agreement.version = lambda name: claimed if name == "hybridcomp" else real(name)
    if rank in settings.get("room", {}):
        limit = settings["room"][rank]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def main() -> None:
    """Train as a rank under a launcher."""
    folder = Path(os.environ["CHAOS_FOLDER"])
    train(folder, json.loads(os.environ["CHAOS_SETTINGS"]))


if __name__ == "__main__":
    main()
