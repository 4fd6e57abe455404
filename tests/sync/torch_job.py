"""Jobs with small models under DDP and FSDP2 whose ranks form islands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hybridcomp
from hybridcomp.job.devices import default_device
from hybridcomp.patches.torch.attached import Attached
from hybridcomp.session.followers import StepFollower
from hybridcomp.sync import IslandMeetings, JobMeetings

WIDTH = 12


class Tied(nn.Module):
    """An embedding and a head with a tied weight, which is in two places of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, WIDTH)
        self.up = nn.Linear(WIDTH, 31)
        self.down = nn.Linear(31, WIDTH)
        self.head = nn.Linear(WIDTH, 17, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        values = self.embedding(tokens)
        logits: Tensor = self.head(values + self.down(torch.tanh(self.up(values))))
        return logits


@dataclass
class Job:
    """A rank's model, optimizer and attachment; block None: a single native island.

    ``first``: first data rank of this job, for islands that are separate jobs.
    """

    block: dict[str, Any] | None
    engine: str = "ddp"
    seed: int = 0
    lr: float = 0.1
    dtype: torch.dtype = torch.float32
    model: Any = None
    optimizer: Any = None
    attached: Attached | None = None
    step: int = 0
    first: int = 0
    data: torch.Generator = field(default_factory=torch.Generator)

    def build(self) -> Job:
        torch.manual_seed(self.seed)
        device = default_device()
        model: Any = Tied().to(device, self.dtype)
        group = None if self.block is None else hybridcomp.island_group(self.block)
        if self.engine == "ddp":
            model = DistributedDataParallel(model, process_group=group)
        else:
            from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = (
                init_device_mesh(device.type, (dist.get_world_size(),))
                if group is None
                else DeviceMesh.from_group(group, device.type)
            )
            for layer in (model.up, model.down):
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=self.lr)
        if self.block is not None:
            self.attached = hybridcomp.attach(model, self.block)
        return self

    def train(self, steps: int, micro_batches: int = 1) -> Job:
        """Train on batches of this rank, which depend on rank and step only."""
        for _ in range(steps):
            for micro in range(micro_batches):
                self.data.manual_seed(
                    1000 * self.step + 10 * (self.first + dist.get_rank()) + micro
                )
                tokens = torch.randint(0, 17, (3, 5), generator=self.data, device="cpu")
                tokens = tokens.to(default_device())
                logits = self.model(tokens)
                loss = nn.functional.cross_entropy(logits.view(-1, 17), tokens.roll(1, 1).view(-1))
                torch.autograd.backward(loss / micro_batches)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
        return self

    @property
    def meetings(self) -> IslandMeetings:
        (found,) = (one for one in self._followers() if isinstance(one, IslandMeetings))
        return found

    @property
    def job_meetings(self) -> JobMeetings:
        (found,) = (one for one in self._followers() if isinstance(one, JobMeetings))
        return found

    def _followers(self) -> list[StepFollower]:
        assert self.attached is not None
        return self.attached.session.followers

    def weights(self) -> Tensor:
        """Return all weights of this rank, unsharded."""
        found = []
        for parameter in self.model.parameters():
            full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            found.append(full.detach().flatten())
        return torch.cat(found).clone()
