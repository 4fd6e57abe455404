#!/usr/bin/env python3
"""Train on any number of ranks, and continue when nodes leave or return.

torchrun --nnodes=2:4 --nproc-per-node 2 --max-restarts 100 --rdzv-backend c10d \\
    --rdzv-endpoint HOST:29400 scripts/examples/train_elastic.py --checkpoints FOLDER

torchrun restarts all ranks whenever the number of nodes changes; ``hybridcomp.resume`` makes them
continue from the newest complete checkpoint. A step always has --samples samples.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import hybridcomp

WIDTH = 32


class Waves(Dataset[tuple[int, Tensor, Tensor]]):
    """Samples by number: random inputs, and the outputs to learn."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        values = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return index, values, torch.sin(values.roll(1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--local_rank", type=int, help="set by some launchers")
    add("--checkpoints", type=Path, required=True, metavar="FOLDER", help="that all nodes see")
    add("--block", default='{"dp": {"codec": "blockint", "bits": 4, "error_feedback": true}}',
        help='a "compression" block')  # fmt: skip
    add("--steps", type=int, default=100)
    add("--samples", type=int, default=32, help="of a step, on all ranks together")
    add("--micro-batch", type=int, default=8, help="samples of a rank at once, at most")
    add("--length", type=int, default=1000, help="samples of the data set")
    add("--save-every", type=int, default=5, metavar="N")
    add("--pause", type=float, default=0.0, metavar="S", help="seconds to wait in each step")
    add("--losses", type=Path, metavar="FILE", help="JSON lines: samples and loss of each step")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))
    model = DistributedDataParallel(layers.to(device))
    hybridcomp.attach(model, json.loads(arguments.block))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = hybridcomp.ElasticSampler(arguments.length, arguments.samples, tail="keep")
    hybridcomp.resume(model, arguments.checkpoints, optimizer=optimizer, sampler=sampler)
    micro, accumulation = sampler.micro_batches(arguments.micro_batch)
    while sampler.steps < arguments.steps:  # one epoch per iteration
        batches = iter(DataLoader(Waves(arguments.length), batch_size=micro, sampler=sampler))
        for _ in range(len(sampler) // (micro * accumulation)):
            if sampler.steps == arguments.steps:
                break
            loss, drawn = torch.zeros((), device=device), []
            for number in range(accumulation):
                indices, values, wanted = next(batches)
                model.require_backward_grad_sync = number == accumulation - 1
                found = (model(values.to(device)) - wanted.to(device)).square().mean()
                (found / accumulation).backward()
                loss += found.detach() / accumulation
                drawn += indices.tolist()
            optimizer.step()
            optimizer.zero_grad()
            sampler.stepped()
            report(arguments.losses, sampler.steps, drawn, loss)
            time.sleep(arguments.pause)
            if sampler.steps % arguments.save_every == 0:
                save(arguments.checkpoints / f"step{sampler.steps}", model, optimizer, sampler)
    dist.destroy_process_group()


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, sampler: object) -> None:
    """Save what ``hybridcomp.resume`` reads, on any number of ranks."""
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states, "sampler": sampler}
    state["hybridcomp"] = hybridcomp.stateful(model)
    save_sharded(state, checkpoint_id=folder)


def report(log: Path | None, step: int, drawn: list[int], loss: Tensor) -> None:
    """Append all ranks' sample numbers and mean loss in a step to ``log``, on rank 0."""
    if log is None:
        return
    every: list[tuple[list[int], float]] = [([], 0.0)] * dist.get_world_size()
    dist.all_gather_object(every, (drawn, loss.item()))
    if dist.get_rank() == 0:
        samples = sorted(index for own, _ in every for index in own)
        mean = sum(one for _, one in every) / len(every)
        line = {"step": step, "ranks": len(every), "loss": mean, "samples": samples}
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
