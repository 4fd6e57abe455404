"""A torchtitan configuration: its Llama 3 with two layers, on generated sequences.

HYBRIDCOMP_CONFIG=scripts/examples/fsdp2.json torchrun --nproc-per-node 2 -m hybridcomp.run \\
    scripts/examples/train_torchtitan.py --module torchtitan_small --config small \\
    --override.imports hybridcomp.patches.trainers.torchtitan.ledger_metrics
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common import ScaledDotProductAttention
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

VOCABULARY = 2048  # as in torchtitan's debug model


class Counting(IterableDataset):  # type: ignore[type-arg]
    """Endless sequences that count up from a random number, different on every rank."""

    def __init__(self, rank: int, length: int) -> None:
        self.rank, self.length = rank, length

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        generator = torch.Generator().manual_seed(self.rank)
        places = torch.arange(self.length)
        while True:
            start = int(torch.randint(0, VOCABULARY, (), generator=generator))
            row = (start + torch.arange(self.length + 1)) % VOCABULARY
            yield {"input": row[:-1], "positions": places}, row[1:]


class CountingLoader(ParallelAwareDataloader):  # type: ignore[misc]
    """``Counting`` in batches."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):  # type: ignore[misc]
        """Configuration of the data loader."""

    def __init__(
        self, config: Any, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int,
        **_: Any,
    ) -> None:  # fmt: skip
        rows = Counting(dp_rank, seq_len)
        super().__init__(rows, dp_rank, dp_world_size, batch_size=local_batch_size)


class Numbers(BaseTokenizer):  # type: ignore[misc]
    """Tokenizer whose words are numbers."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        """Empty configuration."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **_: Any) -> list[int]:
        """Convert ``"3 4"`` to ``[3, 4]``."""
        return [int(word) for word in args[0].split()]

    def decode(self, *args: Any, **_: Any) -> str:
        """Convert ``[3, 4]`` to ``"3 4"``."""
        return " ".join(map(str, args[0]))

    def get_vocab_size(self) -> int:
        """Return the size of the vocabulary."""
        return VOCABULARY


def parallelize(model: Any, **given: Any) -> Any:
    """Parallelize as torchtitan does; on CPUs use plain sums, since gloo cannot average."""
    model = parallelize_llama(model, **given)
    for module in model.modules():
        if isinstance(module, FSDPModule) and not torch.cuda.is_available():
            module.set_force_sum_reduction_for_comms(True)
    return model


def small() -> Trainer.Config:
    """Return a smaller ``llama3_debugmodel`` with an attention that CPUs can train."""
    config = llama3_debugmodel()
    config.model_spec = replace(config.model_spec, parallelize_fn=parallelize)
    model = config.model_spec.model
    model.layers = model.layers[:2]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.dataloader, config.tokenizer = CountingLoader.Config(), Numbers.Config()
    config.training.local_batch_size, config.training.seq_len = 4, 128
    config.training.steps, config.training.disable_cuda_graphs = 20, True
    config.parallelism.spmd_backend = "partial_dtensor"  # other backends require DTensor parameters
    config.activation_checkpoint = None
    config.metrics.enable_tensorboard = True
    config.metrics.log_freq = 5
    config.dump_folder = "runs/torchtitan"
    return config
