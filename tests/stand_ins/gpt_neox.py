"""Stand-in for GPT-NeoX: a package ``megatron`` with the seams' functions, on real groups.

It is written to a folder, so that it is located and checked like a checkout.
"""

from __future__ import annotations

from pathlib import Path

MAPPINGS = """
import torch


def _world():
    return torch.distributed.get_world_size()


def _reduce(input_):
    torch.distributed.all_reduce(input_)
    return input_


def _parts(input_):
    parts = [torch.empty_like(input_) for _ in range(_world())]
    parts[torch.distributed.get_rank()] = input_
    return parts


def _gather(input_):
    parts = _parts(input_)
    torch.distributed.all_gather(parts, input_)
    return torch.cat(parts, dim=-1)


def _reduce_scatter_along_seq_dim(input_, seq_dim):
    parts = list(torch.split(input_, input_.shape[seq_dim] // _world(), seq_dim))
    output = torch.empty_like(parts[0])
    if seq_dim == 0:
        torch.distributed.reduce_scatter_tensor(output, input_.contiguous())
    else:
        torch.distributed.reduce_scatter(output, parts)
    return output


def _gather_along_seq_dim(input_, seq_dim):
    if seq_dim == 0:
        output = input_.new_empty(input_.shape[0] * _world(), *input_.shape[1:])
        torch.distributed.all_gather_into_tensor(output, input_.contiguous())
        return output
    parts = _parts(input_)
    torch.distributed.all_gather(parts, input_)
    return torch.cat(parts, dim=seq_dim)


def _dmoe_reduce(input_, tokens_per_expert):
    torch.distributed.all_reduce(input_)
    return input_


def _dmoe_gather(input_, tokens_per_expert):
    parts = [input_.new_empty(int(rows), input_.shape[-1]) for rows in tokens_per_expert]
    parts[torch.distributed.get_rank()] = input_
    torch.distributed.all_gather(parts, input_)
    return torch.cat(parts, dim=0)


class _CopyToModelParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input_):
        return input_.clone()

    @staticmethod
    def backward(ctx, grad_output):
        return _reduce(grad_output)


class _ReduceFromModelParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input_):
        return _reduce(input_.clone())

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output
"""
REGION = """

class {name}(torch.autograd.Function):
    @staticmethod
    def backward(ctx, grad_output):
        return grad_output
"""
OTHERS = (
    "_CopyToExpertModelParallelRegion",
    "_ScatterToModelParallelRegion",
    "_ReduceScatterToSequenceParallelRegion",
    "_GatherFromSequenceParallelRegion",
    "_ScatterToSequenceParallelRegion",
)
TRAINING = """
from megatron.logging import training_log
"""
LOGGING = """
WRITTEN = []


def training_log(neox_args, timers, loss_dict, total_loss_dict, learning_rate, iteration,
                 loss_scale, report_memory_flag, skipped_iter, model, optimizer,
                 noise_scale_logger):
    WRITTEN.append(("lr", learning_rate, iteration))
    return False


def tb_wandb_log(key, value, iteration_no, use_wandb, tensorboard_writer=None,
                 comet_experiment=None, all_ranks=False):
    WRITTEN.append((key, value, iteration_no, use_wandb, tensorboard_writer, comet_experiment))
"""


def write(folder: Path, *, mappings: str | None = None, neox: bool = True) -> None:
    """Write the package into ``folder``; ``mappings`` replaces its module if given."""
    home = folder / "megatron"
    own = MAPPINGS + "".join(REGION.format(name=name) for name in OTHERS)
    files = {
        "__init__.py": "",
        "mpu/__init__.py": "from . import mappings\n",
        "mpu/mappings.py": own if mappings is None else mappings,
        "training.py": TRAINING,
        "logging.py": LOGGING,
    }
    if neox:
        files["neox_arguments/__init__.py"] = ""
    for name, text in files.items():
        file = home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
