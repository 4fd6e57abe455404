"""One rank of a training, whose steps are asked for line by line.

hybridcomp comes from the checkout that PYTHONPATH names, which may be an older one: nothing is used
here but ``install``, the block and ``make_codec``, and nothing is imported from this folder.
Answers begin with ``ANSWER``, as DeepSpeed prints as well.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

ANSWER = "ANSWER "
#: values of a message of tensor or pipeline parallelism of a small model, whose coding is cheap
NUMEL = 4096
CODECS: dict[str, dict[str, Any]] = {"blockint": {"bits": 4}, "bf16": {}, "expcode": {}}


def block_of(kind: str, stage: int) -> dict[str, Any]:
    """Return the block of a kind of training: nothing encoded, or everything."""
    if kind == "identity":
        codecs: dict[str, Any] = {"dp": "none", "zero": "none"}
    else:
        codecs = {
            "dp": {"codec": "blockint", "bits": 4, "error_feedback": True},
            "zero": {"codec": "blockint", "bits": 8},
        }
    if not stage:
        del codecs["zero"]
    return {**codecs, "min_bytes": 0}


def training(kind: str, stage: int, width: int) -> Callable[[], None]:
    """Return a step of a small transformer; fp32, since many CPUs only emulate bf16."""
    import deepspeed
    import deepspeed.ops
    import torch

    import hybridcomp

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    hybridcomp.install()
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    zero: dict[str, Any] = {"stage": stage}
    if kind == "small messages":
        zero |= {"reduce_bucket_size": 4 * width, "allgather_bucket_size": 4 * width}
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
            "zero_optimization": zero,
            "steps_per_print": 1000000,
            "compression": block_of(kind, stage),
        },
    )
    values = torch.randn(4, 16, width)

    def step() -> None:
        engine.backward(engine(values).float().square().mean())
        engine.step()

    return step


def coding() -> Callable[[], None]:
    """Code a hundred short messages and back with each codec, which is the host's time."""
    import torch

    from hybridcomp.codecs import make_codec

    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    out = torch.empty_like(values)
    codecs = [make_codec(name, **settings) for name, settings in CODECS.items()]
    rooms = [torch.empty(c.wire_nbytes(NUMEL, values.dtype), dtype=torch.uint8) for c in codecs]

    def step() -> None:
        for codec, room in zip(codecs, rooms, strict=True):
            for _ in range(100):
                codec.decode(room[: codec.encode(values, room)], out)

    return step


def main(rank: int, ranks: int, kind: str, stage: int, width: int, folder: str) -> None:
    """Answer every line, a number of steps, with their seconds."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_SIZE=str(ranks),
        DS_ACCELERATOR="cpu", TORCH_EXTENSIONS_DIR=f"{folder}/ext",
    )  # fmt: skip
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    step = coding() if kind == "codecs" else training(kind, stage, width)
    import hybridcomp

    print(ANSWER + json.dumps(hybridcomp.__file__), flush=True)
    for line in sys.stdin:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(int(line)):
            step()
        dist.barrier()
        print(ANSWER + json.dumps(time.perf_counter() - start), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*(int(word) if word.isdigit() else word for word in sys.argv[1:]))  # type: ignore[arg-type]
