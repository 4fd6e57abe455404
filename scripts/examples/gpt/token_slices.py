"""Run the example as a pipeline over token slices (hybridcomp.nn.slices). Used with --slices.

A single long sequence has no micro-batches to fill a pipeline, but its slices can (TeraPipe, ICML
2021). Every rank is a stage under a plain DeepSpeed engine, which sees the whole pass as one
operation; the rank order is that of DeepSpeed's pipelines.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from gpt.errors import ParallelismError
from gpt.loop import PlainTrainer
from gpt.model import Block, kinds, loss_of
from gpt.weights import ModelConfig
from hybridcomp.nn.slices import KVCache, SlicedStage, chosen_slices


class Layers(nn.Module):
    """Layers of a stage: tokens or hidden states of a slice to hidden states or logits."""

    def __init__(self, config: ModelConfig, cuts: Sequence[int], stage: int) -> None:
        """``cuts``: number of blocks of each stage."""
        super().__init__()
        every = kinds(config)
        stops = [0, *(1 + stop for stop in accumulate(cuts))]  # the first stage has the embedding
        stops[-1] = len(every)  # the last stage has norm and output
        first, last = list(pairwise(stops))[stage]
        self.layers = nn.ModuleList(every[n](config, n) for n in range(first, last))

    def forward(self, values: Tensor, past: KVCache) -> Tensor:
        """Run a slice whose preceding tokens are ``past``."""
        for layer in self.layers:
            values = layer(values, past) if isinstance(layer, Block) else layer(values)
        return values


def build(config: ModelConfig, arguments: argparse.Namespace, topology: Any) -> tuple[Any, Any]:
    """Return this rank's stage, with sequences unsliced until ``cut_tokens``, and DeepSpeed's grid.

    ``topology``: DeepSpeed's topology with --tp, else None.
    """
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

    stages, length = arguments.pp, arguments.length
    if topology is None:
        replicas = dist.get_world_size() // stages
        topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=1, num_dp=replicas)
    grid = PipelineParallelGrid(topology=topology)
    stage = grid.get_stage_id()
    each, rest = divmod(config.layers, stages)
    blocks = arguments.cuts or [each + (number < rest) for number in range(stages)]
    layers = Layers(config, blocks, stage)
    if stage and config.tp == 1:  # otherwise DeepSpeed's gradient norm (ZeRO 0) skips them
        for parameter in layers.parameters():
            parameter.model_parallel = True  # type: ignore[attr-defined]
    group = grid.get_pipe_parallel_group()
    return SlicedStage(layers, (length,), config.width, loss_of(config), group=group), grid


def trainer(engine: Any, arguments: argparse.Namespace) -> SliceTrainer:
    """Return the trainer of a stage with the slices of --slices. Raises ParallelismError."""
    found = SliceTrainer(engine, engine.module.pipeline.loss)
    cut_tokens(engine.module, arguments.slices, arguments.length, found.share.micro_batch)
    return found


def cut_tokens(stage: SlicedStage, asked: str, length: int, batch: int) -> None:
    """Set the slices of ``stage``: ``asked`` is ``auto``, a number of slices, or their lengths.

    Raises ParallelismError if they do not add up to ``length`` tokens.
    """
    if asked == "auto":
        found, granule = chosen_slices(stage, length, batch)
        stage.slices = found.lengths(granule)
        if dist.get_rank() == 0:
            took = f"{found.seconds(stage.count):.3g} s a micro-batch, by times of this moment"
            print(f"slices {','.join(map(str, stage.slices))}: {took}", flush=True)
        return
    stage.slices = lengths_of(asked, length)


def lengths_of(asked: str, length: int) -> tuple[int, ...]:
    """Return the tokens per slice; a single number is a count of slices. Raises ParallelismError.

    ``auto`` gives a single slice until it is tuned.
    """
    if asked == "auto":
        return (length,)
    try:
        numbers = tuple(map(int, asked.split(",")))
    except ValueError:
        numbers = ()
    if len(numbers) == 1 and 1 <= numbers[0] <= length:
        stops = [length * n // numbers[0] for n in range(numbers[0] + 1)]
        return tuple(stop - start for start, stop in pairwise(stops))
    if not numbers or min(numbers) < 1 or sum(numbers) != length:
        raise ParallelismError(
            f"--slices {asked}: expected auto, how many slices (1 to {length}), or their tokens "
            f"with commas between, {length} together"
        )
    return numbers


class SliceTrainer(PlainTrainer):
    """DeepSpeedEngine around a stage; the module returns a loss on the last stage only."""

    def _forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.engine(tokens, labels)
        return loss

    def _mean(self, losses: list[Tensor]) -> float:
        """Average over replicas; only the last stage contributes."""
        return super()._mean(losses) * int(self.engine.module.count)
