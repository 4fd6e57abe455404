"""A small training that is an island of ``chaos_islands.py``: one rank under DDP, for strikes.

A student of two layers learns a teacher of the same kind. After each meeting a line of JSON says
which meeting it was, whom this island is called, who was present, a digest of the weights that all
agreed on, and the losses of these and of the island's own on data that nobody trains on.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, HIDDEN, BATCH = 16, 64, 32
CODED = {"codec": "blockint", "bits": 4, "error_feedback": True}
#: keys of ``sync`` by preset
RULES: dict[str, dict[str, Any]] = {
    "diloco": {**CODED, "every": 4, "outer": {"lr": 0.5, "momentum": 0.5}},
    "streaming": {"every": 8, "delay": 5, "outer": {"lr": 0.5, "momentum": 0.5}},
    "wsp": {**CODED, "every": 4, "fragments": 2, "staleness": 2},
}
#: the file with the meeting at which all islands end
END = "end"


@dataclass(frozen=True)
class Island:
    """An island of a run.

    Attributes:
        folder: of the run.
        name: of the island.
        life: which start of it this is.
        address: of the rendezvous.
        islands: with which the run begins.
        timeout_s: how long meetings wait.
        seed: of the run's weights and data.
        pause_s: added to each step.
        preset: of the block; see ``RULES``.
    """

    folder: Path
    name: str
    life: int
    address: str
    islands: int
    timeout_s: float
    seed: int
    pause_s: float
    preset: str = "diloco"

    @property
    def log(self) -> Path:
        """Return the file of its lines."""
        return self.folder / f"{self.name}.{self.life}.jsonl"

    def block(self) -> dict[str, Any]:
        """Return its block."""
        where = {
            "rendezvous": self.address, "name": self.name, "at_start": self.islands,
            "timeout_s": self.timeout_s, "join_timeout_s": 120.0,
        }  # fmt: skip
        sync = {"preset": self.preset, **RULES[self.preset], "islands": where}
        return {"sync": sync, "min_bytes": 0, "ledger": {"every": 1_000_000}}


def student() -> nn.Module:
    """Return a model; also the teacher's shape."""
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 4))


class Task:
    """Task to learn: a teacher's answers with noise."""

    def __init__(self, seed: int, data: int) -> None:
        torch.manual_seed(1234)
        self.teacher = student()
        for parameter in self.teacher.parameters():
            parameter.data.mul_(1.5)
        self.held_out = torch.randn(512, WIDTH)
        self.generator = torch.Generator().manual_seed(data)
        torch.manual_seed(seed)
        self.student = student()

    def loss(self, model: nn.Module) -> Tensor:
        """Return the loss of a batch."""
        values = torch.randn(BATCH, WIDTH, generator=self.generator)
        with torch.no_grad():
            answers = self.teacher(values)
            answers += 0.3 * torch.randn(answers.shape, generator=self.generator)
        found: Tensor = (model(values) - answers).square().mean()
        return found

    @torch.no_grad()
    def held_out_loss(self, weights: Tensor) -> float:
        """Return the loss of flat ``weights`` on held-out data, without noise."""
        model, start = student(), 0
        for parameter in model.parameters():
            parameter.copy_(weights[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()
        return float((model(self.held_out) - self.teacher(self.held_out)).square().mean())


def train(island: Island) -> None:
    """Train until the meeting that the file END names."""
    import hybridcomp
    from hybridcomp.patches.torch.attached import Attached

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = f"file://{island.folder}/{island.name}.{island.life}.store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    data = int(hashlib.sha256(f"{island.seed} {island.name}".encode()).hexdigest()[:8], 16)
    task = Task(island.seed, data + island.life)
    model = DistributedDataParallel(task.student)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    attached = hybridcomp.attach(model, island.block())
    assert isinstance(attached, Attached)
    (meetings,) = attached.session.followers
    steps, last = 0, -1
    with island.log.open("a", buffering=1) as log:
        while not _ended(island.folder, last):
            time.sleep(island.pause_s)
            torch.autograd.backward(task.loss(model))
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            part_in: Any = meetings
            held = part_in.membership.last
            if held.number != last:
                last = held.number
                log.write(json.dumps(_line(part_in, task, steps, model)) + "\n")
    hybridcomp.detach(model)
    dist.destroy_process_group()


def _line(meetings: Any, task: Task, steps: int, model: nn.Module) -> dict[str, Any]:
    start = torch.cat([part.fragment.start for part in meetings.parts])
    own = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    held = meetings.membership.last
    return {
        "meeting": held.number,
        "island": meetings.membership.own,
        "here": meetings.membership.own in held.present,
        "steps": steps,
        "clock": meetings.clock,
        "digest": hashlib.sha256(start.numpy().tobytes()).hexdigest()[:16],
        "loss": task.held_out_loss(start),
        "own": task.held_out_loss(own),
    }


def _ended(folder: Path, last: int) -> bool:
    file = folder / END
    return file.exists() and last >= int(file.read_text() or "1000000000")
