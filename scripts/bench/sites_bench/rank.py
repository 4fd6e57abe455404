"""Train the example as one rank of two sites, under one block after the other."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: a file of counters of this namespace's interfaces: bytes are the ninth number after the name
COUNTERS, INTERFACE, SENT = Path("/proc/net/dev"), "eth0:", 8
#: steps between two looks at the clock where no messages are under way for longer than a step
LOOK = 5
#: a report in the middle is a collective of the whole job, which messages of a meeting delay
QUIET = {"every": 10**9, "sample_every": 0}


@dataclass(frozen=True)
class SitesJob:
    """Trainings of the ranks of one link.

    Attributes:
        blocks: by name, what is under ``compression``; None: DeepSpeed by itself.
        settings: DeepSpeed's, without a block.
        few: steps of the cases that are not trained for all.
        steps, seconds: of the others; a case ends with what is over first.
        data: of scripts/prepare_data.py.
        out: the folder that ``NAME.json`` is written to when a case is over.
    """

    blocks: dict[str, dict[str, Any] | None]
    settings: dict[str, Any]
    few: dict[str, int]
    steps: int
    seconds: float
    length: int
    model: dict[str, Any]
    seed: int
    data: str
    out: str

    def write(self, file: Path) -> None:
        """Write this for the ranks."""
        file.write_text(json.dumps(asdict(self)))

    def told(self, name: str) -> dict[str, Any]:
        """Return what decides a case, to tell whether a finished one is this one."""
        found = asdict(self)
        del found["blocks"], found["out"], found["few"]
        own = {"steps": self.few.get(name, self.steps), "data": Path(self.data).name}
        return {**found, **own, "block": self.blocks[name]}


def rank_main(file: Path) -> None:
    """Train all cases of the job in ``file``; rank 0 writes what each has left."""
    import deepspeed
    import torch
    import torch.distributed as dist

    import hybridcomp
    from gpt.data import Samples
    from gpt.indexed import IndexedTokens

    job = SitesJob(**json.loads(file.read_text()))
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    hybridcomp.install()
    data = Path(job.data)
    samples = Samples(IndexedTokens(data.with_name(f"{data.name}_train")), job.length, job.seed)
    for name, block in job.blocks.items():
        found = train(job, samples, block, job.few.get(name, job.steps))
        if dist.get_rank() == 0:
            row = {"told": job.told(name), "name": name, **found}
            Path(job.out, f"{name}.json").write_text(json.dumps(row) + "\n")
            print(f"{name}: {len(found['losses'])} steps, {found['ends'][-1]:.1f} s", flush=True)
    dist.barrier()


def train(
    job: SitesJob, samples: Any, block: Mapping[str, Any] | None, steps: int
) -> dict[str, Any]:
    """Train one case. Losses stay on the ranks until the end: sending them would join the sites.

    Returns losses by step (means over all ranks), the seconds at which each step ended on rank 0,
    bytes that its site has sent, seconds that it waited in meetings and how many there were.
    """
    import torch
    import torch.distributed as dist

    from gpt.model import lm_loss

    engine = make_engine(job, block)
    every = ((block or {}).get("sync") or {}).get("every", LOOK)
    stream = share_of(job).stream(samples, 0, torch.device("cpu"))
    losses: list[float] = []
    ends: list[float] = []
    dist.barrier()
    sent, begun = sent_nbytes(), time.perf_counter()
    for step in range(1, steps + 1):
        tokens, labels = next(stream)
        loss = lm_loss(engine(tokens), labels)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        ends.append(time.perf_counter() - begun)
        # one step before a meeting, when those before have ended
        if step % every == every - 1 and longest(ends[-1]) > job.seconds:
            break
    sent = sent_nbytes() - sent
    rows = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(rows)
    found = {
        "losses": (rows / dist.get_world_size()).tolist(), "ends": ends, "sent": sent,
        **meetings_of(engine),
    }  # fmt: skip
    engine.destroy()
    return found


def make_engine(job: SitesJob, block: Mapping[str, Any] | None) -> Any:
    """Return the engine of one case, with the weights of the job's seed."""
    import deepspeed
    import torch

    from gpt.model import GPT
    from gpt.weights import ModelConfig

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its build takes a minute
    torch.manual_seed(job.seed)
    model = GPT(ModelConfig(**job.model, seed=job.seed))
    settings = dict(job.settings)
    if block is not None:
        settings["compression"] = {"when": "always", "ledger": QUIET, **block}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=settings
    )
    return engine


def share_of(job: SitesJob) -> Any:
    """Return this rank's part of every batch: islands share all data, as other ranks do."""
    import torch.distributed as dist

    from gpt.data import Share

    micro = job.settings["train_micro_batch_size_per_gpu"]
    return Share(dist.get_rank(), dist.get_world_size(), micro, 1)


def longest(seconds: float) -> float:
    """Return the most of all ranks; a collective."""
    import torch
    import torch.distributed as dist

    found = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def meetings_of(engine: Any) -> dict[str, float]:
    """Return the ledger's figures of the meetings of an engine; {} where it has none."""
    from hybridcomp.session.engine_session import session_of
    from hybridcomp.sync import IslandMeetings

    session = session_of(engine)
    for follower in session.followers if session is not None else ():
        if isinstance(follower, IslandMeetings) and (row := follower.row()) is not None:
            return {name: row[name] for name in ("meetings", "meet_wait_ms", "drift")}
    return {}


def sent_nbytes() -> int:
    """Return the bytes that left this site so far, headers included, 0 outside a lab."""
    for line in COUNTERS.read_text().splitlines():
        words = line.split()
        if words[0] == INTERFACE:
            return int(words[1 + SENT])
    return 0
