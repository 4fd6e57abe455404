"""Island of ``chaos_islands.py``: a small training on one rank under DDP.

A two-layer student learns from a teacher of the same shape. After each meeting it writes a JSON
line with the meeting's number, this island's name, the members, a digest of the averaged weights,
and the held-out losses of the averaged and of the island's weights.
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
#: file that holds the meeting at which all islands end
END = "end"


@dataclass(frozen=True)
class Island:
    """An island of a run.

    Attributes:
        folder: the run's folder.
        name: the island's name.
        life: number of its starts so far.
        address: the rendezvous' address.
        islands: initial number of islands.
        timeout_s: timeout of meetings.
        seed: seed of weights and data.
        pause_s: seconds added to each step.
        preset: the block's preset; see ``RULES``.
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
        """Return the path of its JSON lines."""
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
    """Return a student or teacher model."""
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 4))


class Task:
    """Regression on a teacher's outputs with noise."""

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
        """Return the noiseless held-out loss of flat ``weights``."""
        model, start = student(), 0
        for parameter in model.parameters():
            parameter.copy_(weights[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()
        return float((model(self.held_out) - self.teacher(self.held_out)).square().mean())


def train(island: Island) -> None:
    """Train until the meeting that the file END specifies."""
    import hybridcomp
    from hybridcomp.patches.torch.attached import Attached
    from hybridcomp.sync.job_meetings import JobMeetings

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
    meetings: Any
    (meetings,) = (one for one in attached.session.followers if isinstance(one, JobMeetings))
    steps, last = 0, -1
    with island.log.open("a", buffering=1) as log:
        while not _ended(island.folder, last):
            time.sleep(island.pause_s)
            torch.autograd.backward(task.loss(model))
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            held = meetings.membership.last
            if held.number != last:
                last = held.number
                log.write(json.dumps(_line(meetings, task, steps, model)) + "\n")
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
