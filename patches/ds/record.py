"""Record loss, speed and identity of a DeepSpeed run as JSON lines, with or without a block.

``HYBRIDCOMP_RECORD=FILE`` requests this; ``hybridcomp compare --launch`` sets it, so that scripts
that log nothing can be compared. Only this engine object's methods are wrapped, not its class's.
Reading the loss waits for the device once per step.

Two runs are comparable if their inputs have equal fingerprints: shapes and first values of the
parameters on rank 0, torch's seed, and the tensors of the first steps' batches on rank 0.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridcomp.channels.accounting.ledger_file import JsonLines, make_together
from hybridcomp.job import environment, small_messages
from hybridcomp.job.together import ending
from hybridcomp.metric_names import LOSS, SPEED, TOKENS

#: environment variable with the path of the file, relative to rank 0's working directory
ENVIRONMENT = environment.RECORD
#: number of steps whose batches enter the fingerprint of the data
FINGERPRINTED = 8
#: elements of each parameter in its fingerprint
HEAD = 64

_recorded = False


def asked() -> bool:
    """Return whether this process should record; equal on all ranks."""
    return bool(os.environ.get(ENVIRONMENT))


def has_recorded() -> bool:
    """Return whether any engine of this process is, or was, recorded."""
    return _recorded


def attach(engine: Any) -> None:
    """Record ``engine``, if requested and if it is the process's first one with an optimizer.

    Raises ConfigError on every rank if rank 0 cannot write the file.
    """
    global _recorded
    if asked() and not _recorded and engine.optimizer is not None:
        _recorded = True
        path = Path(os.environ[ENVIRONMENT])
        make_together(path, ENVIRONMENT)
        Recorder(engine, path)


class Recorder:
    """Record one engine's run, on every rank, since the mean of the losses is a collective."""

    def __init__(self, engine: Any, path: Path) -> None:
        self._engine = engine
        self._lines = JsonLines(path) if dist.get_rank() == 0 else None
        if self._lines is not None:
            atexit.register(self._lines.close)
        self._losses: list[torch.Tensor] = []
        self._batches = hashlib.sha256()
        self._step_tokens = self._tokens = 0
        #: of a pipeline's micro-batches that no step has used: tokens, and the hash after each
        self._read: deque[tuple[int, Any]] = deque()
        #: tokens and hash before the last pass in eval mode, which may belong to a validation
        self._before: tuple[int, Any] | None = None
        self._start: float | None = None
        self._steps = 0
        methods = {"forward": self._forward, "backward": self._backward, "step": self._step}
        if hasattr(engine, "train_batch"):
            methods = {"train_batch": self._train_batch, "_next_batch": self._next_batch}
        for name, method in methods.items():
            setattr(engine, name, functools.partial(method, getattr(engine, name)))
        self._header: dict[str, Any] = {
            "seed": torch.initial_seed(),
            "model": fingerprint(engine.module),
        }

    def _forward(self, original: Callable[..., Any], *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._forget_validation()
            if not self._engine.training:
                self._before = self._step_tokens, self._batches.copy()
            self._see((inputs, kwargs))
        return original(*inputs, **kwargs)

    def _backward(
        self, original: Callable[..., Any], loss: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        self._before = None
        self._losses.append(loss.detach())
        return original(loss, *args, **kwargs)

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = self._engine.global_steps
        result = original(*args, **kwargs)
        if self._engine.global_steps != before and self._losses:
            with ending("recording the loss"):
                mean = torch.stack(self._losses).float().mean().to(self._engine.device)
                self._losses.clear()
                self._finish(float(small_messages.total(mean)) / dist.get_world_size())
        return result

    def _next_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch = original(*args, **kwargs)
        if torch.is_grad_enabled():
            self._see(batch)
            self._read.append((self._step_tokens, self._batches.copy()))
            self._step_tokens = 0
        return batch

    def _train_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._begin()
        loss = original(*args, **kwargs)
        ahead = self._batches
        # without a flush the first stage has read micro-batches of later steps, too
        for _ in range(min(len(self._read), int(self._engine.micro_batches))):
            tokens, self._batches = self._read.popleft()
            self._step_tokens += tokens
        self._finish(float(loss.mean()))  # the mean over replicas, on all stages
        self._batches = ahead
        return loss

    def _begin(self) -> None:
        if self._start is None:
            self._start = time.perf_counter()

    def _forget_validation(self) -> None:
        """Undo the counts of a pass in eval mode that no backward pass followed."""
        if self._before is not None:
            (self._step_tokens, self._batches), self._before = self._before, None

    def _see(self, batch: Any) -> None:
        """Count and hash one micro-batch before its use, since upstream may change it in place."""
        self._begin()
        tensors = list(tensors_of(batch))
        # labels have the shape of the tokens, so count the largest tensor instead of the sum
        whole = [found.numel() for found in tensors if not found.is_floating_point()]
        self._step_tokens += max(whole, default=0)
        if self._lines is not None and self._steps < FINGERPRINTED:
            for found in tensors:
                self._batches.update(_bytes(found))

    def _finish(self, loss: float) -> None:
        """Write one step; only rank 0 has a file."""
        assert self._start is not None
        now = time.perf_counter()
        seconds, self._start = now - self._start, now
        self._steps += 1
        tokens = self._step_tokens * int(self._engine.seq_dp_world_size)
        self._step_tokens, self._tokens = 0, self._tokens + tokens
        if self._lines is None:
            return
        if self._steps in (1, FINGERPRINTED):
            name = "first_batch" if self._steps == 1 else "first_batches"
            data = {**self._header.get("data", {}), name: self._batches.hexdigest()[:16]}
            self._header = {**self._header, "data": data, "tokens_per_step": tokens}
            self._lines.write({"run": self._header})
        record: dict[str, Any] = {"step": self._steps, LOSS: loss, "seconds": seconds}
        if tokens:
            record |= {TOKENS: self._tokens, SPEED: tokens / seconds}
        self._lines.write(record)
        if self._engine.monitor.enabled:
            samples = self._engine.global_samples
            names = (LOSS, "seconds", TOKENS, SPEED)
            self._engine.monitor.write_events(
                [(name, float(record[name]), samples) for name in names if name in record]
            )


def fingerprint(module: torch.nn.Module) -> dict[str, Any]:
    """Return the number of parameters, and digests of their shapes and first values."""
    shapes, start, count = hashlib.sha256(), hashlib.sha256(), 0
    for name, parameter in module.named_parameters():
        # under ZeRO 3 the parameter's own shape is empty
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        shapes.update(f"{name}{shape}".encode())
        count += int(torch.Size(shape).numel())
        held = getattr(parameter, "ds_tensor", parameter).detach()
        start.update(_bytes(held.reshape(-1)[:HEAD].float()))
    return {
        "parameters": count,
        "shapes": shapes.hexdigest()[:16],
        "first_values": start.hexdigest()[:16],
    }


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested tuples, lists and dicts."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict):
        yield from tensors_of(list(batch.values()))
    elif isinstance(batch, (tuple, list)):
        for part in batch:
            yield from tensors_of(part)


def _bytes(values: torch.Tensor) -> bytes:
    flat = values.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
