"""Imports of every rank, done once in the fork server. Nothing here may touch the GPU."""

import contextlib
import importlib
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1]
if str(SCRIPTS) not in sys.path:
    sys.path.insert(0, str(SCRIPTS))

for name in (
    "numpy", "torch.distributed", "deepspeed", "deepspeed.runtime.pipe.engine",
    "megatron.core.tensor_parallel", "gpt.model", "gpt.loop", "gpt.tensor_parallel", "train_gpt",
    "train_peer", "peers.trainer", "hybridcomp", "training_bench.gpu_rank",
    # what an engine and the first step import, 4 s a rank
    "torch._dynamo", "torch._inductor.codegen.triton",
):  # fmt: skip
    # a package that is not installed is missed by the arm that needs it, with its own message
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
