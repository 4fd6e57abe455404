"""Training loop: engines behind one protocol, logging, checkpoints, evaluation."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gpt.data import Batch, Samples, Share
from gpt.weights import ModelConfig

#: number of final steps whose mean loss is the final loss
LAST = 20
#: number of first steps that do not count for the speed
WARM_UP = 3
#: settings that define the model, independent of its layout
SAME_MODEL = ("vocabulary", "layers", "width", "heads", "norm", "tied")
#: entries of a step's record that DeepSpeed's monitors get
MONITORED = ("loss", "tokens", "tokens_per_second", "seconds", "valid_loss")


def mean_over_ranks(losses: list[Tensor]) -> float:
    """Return the mean of a rank's losses, averaged over all ranks."""
    total = torch.stack(losses).float().mean()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


class Trainer(Protocol):
    """Engine as the loop needs it."""

    engine: Any
    share: Share

    def step(self, batches: Iterator[Batch]) -> float:
        """Make one optimizer step; return the loss, averaged over micro-batches and replicas."""

    def evaluate(self, batches: Iterator[Batch]) -> float:
        """Return the loss of one global batch, averaged as in ``step``; train nothing."""


class PlainTrainer:
    """Adapts a DeepSpeedEngine around a plain module."""

    def __init__(self, engine: Any, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.engine, self._loss = engine, loss
        grid = engine.mpu  # with tensor parallelism several ranks take the same samples
        self.share = Share(
            rank=grid.get_data_parallel_rank() if grid else dist.get_rank(),
            # each island (sync) has its own data-parallel group and data
            world_size=engine.dp_world_size if grid else dist.get_world_size(),
            micro_batch=engine.train_micro_batch_size_per_gpu(),
            micro_batches=engine.gradient_accumulation_steps(),
        )

    def step(self, batches: Iterator[Batch]) -> float:
        """Run forward, backward and step for each micro-batch; DeepSpeed decides when to update."""
        losses = []
        for tokens, labels in batches:
            loss = self._forward(tokens, labels)
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
        return self._mean(losses)

    def evaluate(self, batches: Iterator[Batch]) -> float:
        """Return the loss of a forward pass."""
        self.engine.eval()
        with torch.no_grad():
            losses = [self._forward(tokens, labels) for tokens, labels in batches]
        self.engine.train()
        return self._mean(losses)

    def _forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self._loss(self.engine(tokens), labels)
        return loss

    def _mean(self, losses: list[Tensor]) -> float:
        return mean_over_ranks(losses)


class PipeTrainer:
    """Adapts a PipelineEngine, which averages replicas and broadcasts the loss by itself."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.share = Share(
            rank=engine.grid.get_data_parallel_rank(),
            world_size=engine.grid.get_data_parallel_world_size(),
            micro_batch=engine.train_micro_batch_size_per_gpu(),
            micro_batches=engine.gradient_accumulation_steps(),
        )

    def step(self, batches: Iterator[Batch]) -> float:
        """Run a step's whole schedule; return its loss."""
        return float(self.engine.train_batch(batches))

    def evaluate(self, batches: Iterator[Batch]) -> float:
        """Run the inference schedule, which leaves the module in evaluation mode."""
        loss = float(self.engine.eval_batch(batches))
        self.engine.train()
        return loss


@dataclass
class Log:
    """JSON lines of one run, written by rank 0: a header, one record for each step, a summary.

    A resumed run keeps records up to ``start``.
    """

    path: Path | None
    header: dict[str, Any]
    start: int = 0
    losses: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path is None:
            return
        kept = [json.dumps({"run": self.header})]
        if self.start and self.path.is_file():
            records = [json.loads(text) for text in self.path.read_text().splitlines()]
            steps = [r for r in records if "loss" in r and r.get("step", math.inf) <= self.start]
            kept += [json.dumps(record) for record in steps if "summary" not in record]
            self.losses = [record["loss"] for record in steps if "summary" not in record]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(f"{text}\n" for text in kept))

    def write(self, record: dict[str, Any]) -> None:
        """Append a record and flush, so that a killed run keeps its curve."""
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def step(self, record: dict[str, Any]) -> None:
        """Append the record of a step."""
        self.losses.append(record["loss"])
        self.speeds.append(record["tokens_per_second"])
        self.write(record)

    def final_loss(self) -> float:
        """Return the mean of the last steps."""
        last = self.losses[-LAST:]
        return sum(last) / len(last)

    def speed(self) -> float:
        """Return median tokens per second, without the first steps."""
        ordered = sorted(self.speeds[WARM_UP:] or self.speeds)
        return ordered[len(ordered) // 2]


@dataclass
class Plan:
    """Settings of a run: steps, lengths, and when to print and evaluate."""

    steps: int
    length: int
    print_every: int
    eval_every: int
    eval_batches: int
    save: Path | None
    save_every: int
    eval_from: int = 0  # no evaluation before this step


def train(
    trainer: Trainer, samples: Samples, valid: Samples | None, plan: Plan, log: Log, consumed: int
) -> None:
    """Train steps ``log.start + 1`` to ``plan.steps`` after ``consumed`` samples."""
    engine, share = trainer.engine, trainer.share
    first = dist.get_rank() == 0
    tokens_per_step = share.global_batch * plan.length
    stream = share.stream(samples, consumed, engine.device)
    begin = time.perf_counter()
    record: dict[str, Any] = {}
    for step in range(log.start + 1, plan.steps + 1):
        start = time.perf_counter()
        # a flushless pipeline reads ahead; other engines take micro-batches as they come
        reads_ahead = isinstance(trainer, PipeTrainer)
        loss = trainer.step(stream if reads_ahead else islice(stream, share.micro_batches))
        seconds = time.perf_counter() - start
        consumed += share.global_batch
        record = {
            "step": step,
            "tokens": consumed * plan.length,
            "loss": loss,
            "tokens_per_second": tokens_per_step / seconds,
            "seconds": seconds,
            "learning_rate": float(engine.get_lr()[0]),
        }
        due = plan.eval_every and step >= plan.eval_from and step % plan.eval_every == 0
        if valid is not None and due:
            record |= evaluate(trainer, valid, plan.eval_batches)
        if first:
            log.step(record)
            _monitor(trainer, record)
            if step == log.start + 1 or step % plan.print_every == 0 or step == plan.steps:
                print(progress(record, plan.steps, (step - log.start), begin), flush=True)
        if plan.save and plan.save_every and step % plan.save_every == 0 and step < plan.steps:
            save(engine, plan.save, step, consumed)
    if plan.save:
        save(engine, plan.save, max(plan.steps, log.start), consumed)
    if valid is not None and "valid_loss" not in record:
        record |= evaluate(trainer, valid, plan.eval_batches)
    finish(record.get("valid_loss"), plan, log, time.perf_counter() - begin)


def finish(valid_loss: float | None, plan: Plan, log: Log, seconds: float) -> None:
    """Write the summary: final loss, validation loss, speed."""
    if dist.get_rank() != 0:
        return
    if not log.speeds:
        print(f"nothing to do: the checkpoint is at step {log.start} of {plan.steps}", flush=True)
        return
    summary = {
        "summary": True,
        "steps": plan.steps,
        "final_loss": log.final_loss(),
        "valid_loss": valid_loss,
        "tokens_per_second": log.speed(),
        "seconds": seconds,
    }
    log.write(summary)
    shown = "" if valid_loss is None else f"  valid loss {valid_loss:.4f}"
    print(
        f"done  {plan.steps} steps  loss {summary['final_loss']:.4f} (mean of the last "
        f"{min(LAST, len(log.losses))}){shown}  {log.speed() / 1e3:.2f} k tokens/s (median)  "
        f"{seconds:.1f} s",
        flush=True,
    )


def evaluate(trainer: Trainer, valid: Samples, batches: int) -> dict[str, Any]:
    """Return the losses of the first ``batches`` global batches of ``valid``, and their mean."""
    share, device = trainer.share, trainer.engine.device
    losses = [
        trainer.evaluate(share.batches(valid, number * share.global_batch, device))
        for number in range(batches)
    ]
    return {"valid_loss": sum(losses) / len(losses), "valid_losses": losses}


def progress(record: dict[str, Any], steps: int, done: int, begin: float) -> str:
    """Return the progress line."""
    left = (time.perf_counter() - begin) / done * (steps - record["step"])
    valid = f"  valid {record['valid_loss']:.4f}" if "valid_loss" in record else ""
    return (
        f"step {record['step']:>{len(str(steps))}}/{steps}  loss {record['loss']:.4f}{valid}  "
        f"{record['tokens_per_second'] / 1e3:.2f} k tokens/s  "
        f"ETA {int(left) // 60}:{int(left) % 60:02d}"
    )


def save(engine: Any, folder: Path, step: int, consumed: int) -> None:
    """Save DeepSpeed's checkpoint with the position in the data."""
    engine.save_checkpoint(str(folder), client_state={"step": step, "consumed_samples": consumed})


def load(engine: Any, folder: Path) -> tuple[int, int]:
    """Return step and consumed samples of the latest checkpoint. Raises FileNotFoundError."""
    path, state = engine.load_checkpoint(str(folder))
    if path is None:
        raise FileNotFoundError(
            f"--load {folder}: expected a DeepSpeed checkpoint, found none; give the folder that "
            "holds the file 'latest'"
        )
    return int(state["step"]), int(state["consumed_samples"])


def _monitor(trainer: Trainer, record: dict[str, Any]) -> None:
    """Send a step's MONITORED entries to DeepSpeed's monitors (W&B, tensorboard, csv)."""
    engine = trainer.engine
    if not engine.monitor.enabled:
        return
    engine.monitor.write_events(
        [(name, float(record[name]), engine.global_samples) for name in MONITORED if name in record]
    )


def open_log(
    path: Path | None, header: dict[str, Any], samples: Samples, config: ModelConfig,
    settings: dict[str, Any], start: int = 0,
) -> Log:  # fmt: skip
    """Print ``header`` and write it to the log, both on rank 0 only; return the log.

    The log and the W&B run that DeepSpeed started, if any, get ``header`` plus the entries that
    compared runs must share and the contents of the DeepSpeed file.
    """
    first = dist.get_rank() == 0
    if first:
        print(f"run {header}", flush=True)
    model = {name: getattr(config, name) for name in SAME_MODEL}
    header = {**header, "data": samples.fingerprint(), "model": model, "deepspeed": settings}
    run = getattr(sys.modules.get("wandb"), "run", None)
    if run is not None:
        run.config.update({"run": header, "seed": header["seed"]})
    return Log(path if first else None, header, start)
