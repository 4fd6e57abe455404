"""Imports of every rank, done once in the fork server. Nothing here may touch the GPU."""

import contextlib
import importlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # scripts/, as all imports here
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))  # gpt, train_gpt

#: environment variable: 1 if ranks will need Megatron-core too
TENSOR_PARALLEL = "TRAINING_BENCH_TENSOR_PARALLEL"
NAMES = [
    "numpy", "torch.distributed", "deepspeed", "deepspeed.runtime.pipe.engine", "gpt.model",
    "gpt.loop", "train_gpt", "benchmarks.train_peer", "benchmarks.peers.trainer", "hybridcomp",
    # imports of an engine and its first step, 4 s per rank
    "torch._dynamo", "torch._inductor.codegen.triton",
]  # fmt: skip
MEGATRON = ["megatron.core.tensor_parallel", "gpt.tensor_parallel"]


def load() -> None:
    """Import everything; the arm that needs a missing package reports it."""
    for name in [*NAMES, *(MEGATRON if os.environ.get(TENSOR_PARALLEL) == "1" else [])]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


if os.environ.get(TENSOR_PARALLEL) is not None:
    load()
