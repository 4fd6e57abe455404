"""Tensor-parallel layers of the example, built on megatron-core. Used from --tp 2 on.

Every weight is drawn whole and then sharded, so initial weights do not depend on the number of
ranks. Attention heads, MLP and the vocabulary of embedding, output and loss are sharded over the
ranks (arXiv 1909.08053, section 3). Megatron's layers run on CPUs; its optimizers and pipeline do
not, but here these are DeepSpeed's.

Needs megatron-core: ``pip install -e '.[megatron]'`` in the clone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from megatron.core import parallel_state, tensor_parallel
from megatron.core.model_parallel_config import ModelParallelConfig
from torch import Tensor, nn
from torch.nn import functional as F

from gpt.weights import Draw, ModelConfig

#: initializes a whole weight, fp32, in place
Fill = Callable[[Tensor], None]


def start(tp: int, pp: int) -> Any:
    """Create megatron-core's groups, and DeepSpeed's topology over the same ranks.

    Raises ValueError if the number of ranks does not fit. Megatron's default order "tp-cp-ep-dp-pp"
    and DeepSpeed's axes pipe, data, model agree: tensor ranks vary fastest, then data, then stages.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp
    )
    replicas = dist.get_world_size() // (tp * pp)
    return PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=replicas)


def grid(topology: Any) -> Any:
    """Return the ``mpu`` of ``deepspeed.initialize`` for a model other than a PipelineModule."""
    return PipelineParallelGrid(topology=topology)


def check_groups(mpu: Any) -> None:
    """Raise RuntimeError if DeepSpeed and megatron-core would send to different ranks."""
    pairs = {
        "tensor": (
            mpu.get_slice_parallel_group(),
            parallel_state.get_tensor_model_parallel_group(),
        ),
        "data": (mpu.get_data_parallel_group(), parallel_state.get_data_parallel_group()),
        "pipeline": (
            mpu.get_pipe_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
        ),
        "model": (mpu.get_model_parallel_group(), parallel_state.get_model_parallel_group()),
    }
    for name, groups in pairs.items():
        theirs, megatrons = (dist.get_process_group_ranks(group) for group in groups)
        if theirs != megatrons:
            raise RuntimeError(
                f"rank {dist.get_rank()}: its {name} group is {theirs} for DeepSpeed and "
                f"{megatrons} for megatron-core; both must count ranks in one order"
            )


def _settings() -> Any:
    return ModelParallelConfig(
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        use_cpu_initialization=True,  # our generator draws whole weights; DeepSpeed moves them
        params_dtype=torch.float32,
        gradient_accumulation_fusion=False,  # needs apex and Megatron's optimizers
    )


class Column(nn.Module):
    """Linear layer without a bias, outputs sharded over the ranks.

    The weight stacks ``parts`` matrices that are sharded separately, so query, key and value of a
    rank belong to the same heads.
    """

    def __init__(self, inputs: int, outputs: int, draw: Fill, parts: int = 1) -> None:
        super().__init__()
        self.linear = tensor_parallel.ColumnParallelLinear(
            inputs, outputs, config=_settings(), init_method=draw, bias=False,
            gather_output=False, stride=parts,
        )  # fmt: skip

    def forward(self, values: Tensor) -> Tensor:
        """Map (..., inputs) to (..., outputs / ranks)."""
        out: Tensor = self.linear(values)[0]
        return out


class Row(nn.Module):
    """Linear layer without a bias, inputs sharded over the ranks."""

    def __init__(self, inputs: int, outputs: int, draw: Fill) -> None:
        super().__init__()
        self.linear = tensor_parallel.RowParallelLinear(
            inputs, outputs, config=_settings(), init_method=draw, bias=False,
            input_is_parallel=True, skip_bias_add=True,
        )  # fmt: skip

    def forward(self, values: Tensor) -> Tensor:
        """Map (..., inputs / ranks) to (..., outputs), summed over the ranks."""
        out: Tensor = self.linear(values)[0]
        return out


class _Vocabulary(nn.Module):
    """Weight (V / ranks, C) with this rank's rows; the last rank's are zero-padded."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        rows = -(-config.vocabulary // config.tp)
        self.start = rows * parallel_state.get_tensor_model_parallel_rank()
        whole = torch.zeros(rows * config.tp, config.width)
        Draw(config, number)(whole[: config.vocabulary])
        self.weight = nn.Parameter(whole[self.start : self.start + rows].clone())
        tensor_parallel.set_tensor_model_parallel_attributes(self.weight, True, 0, 1)
        self.vocabulary = config.vocabulary


class Embedding(_Vocabulary):
    """Map tokens (B, T) to hidden states (B, T, C)."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up local rows and sum over the ranks."""
        local = tokens - self.start
        elsewhere = (local < 0) | (local >= len(self.weight))
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        out: Tensor = tensor_parallel.reduce_from_tensor_model_parallel_region(found)
        return out


class Output(_Vocabulary):
    """Map hidden states (B, T, C) to this rank's logits (B, T, V / ranks)."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Project."""
        return project(self, hidden)


def project(layer: nn.Module, hidden: Tensor) -> Tensor:
    """Return this rank's logits with the weight of ``layer``, which may be the embedding."""
    assert isinstance(layer, _Vocabulary)
    hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
    logits = F.linear(hidden, layer.weight)
    beyond = torch.arange(len(layer.weight), device=logits.device) + layer.start >= layer.vocabulary
    return logits.masked_fill(beyond, torch.finfo(logits.dtype).min)


def lm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return mean cross-entropy in nats, fp32, of this rank's logits (B, T, V / ranks)."""
    losses: Tensor = tensor_parallel.vocab_parallel_cross_entropy(logits.float(), labels)
    return losses.mean()
