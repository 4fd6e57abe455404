"""The example under torch's engines: ``fully_shard`` (FSDP2, HSDP), DistributedDataParallel.

Batch sizes, AdamW, clipping, bf16 and schedule come from the same DeepSpeed file, whose ZeRO and
"compression" settings are ignored. With bf16, FSDP2 computes and gathers in bf16 and reduces in
fp32, and DDP computes under autocast; both keep fp32 weights, as DeepSpeed's bf16 optimizer does.
"""

from __future__ import annotations

import contextlib
import os
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from gpt.data import Batch, Share
from gpt.ds_file import SettingsError, adam_of, has_bf16, scheduler_of
from gpt.loop import mean_over_ranks

Kind = Literal["fsdp2", "hsdp", "ddp"]
#: torch's default
BUCKET_MB = 25


def planned(path: str) -> dict[str, Any]:
    """Run the module that a plan wrote; return its functions ``shard`` and ``syncs``.

    Raises SettingsError if it is missing or damaged.
    """
    try:
        found = runpy.run_path(path)
        return {name: found[name] for name in ("shard", "syncs")}
    except Exception as error:
        raise SettingsError(
            f"{path}: {type(error).__name__}: {error}; write it again with hybridcomp plan --out"
        ) from error


class Engine:
    """Subset of a DeepSpeed engine that the loop uses, over a model under torch's engine."""

    def __init__(
        self, kind: Kind, model: nn.Module, settings: dict[str, Any],
        sums: torch.dtype | None = None, bucket_mb: float = BUCKET_MB,
    ) -> None:  # fmt: skip
        """Wrap ``model``, on its device, in ``kind``; optimizer and schedule from ``settings``.

        Args:
            kind: the engine; hsdp: FSDP2 shards inside each node, nodes are replicas.
            model: fp32.
            settings: contents of a DeepSpeed file; ``"sharding"``: the module that a plan wrote.
            sums: reduce dtype of FSDP2; None for fp32.
            bucket_mb: megabytes of a DDP bucket.
        """
        self.device = next(model.parameters()).device
        self.monitor = type("Monitor", (), {"enabled": False})()
        self.bf16 = has_bf16(settings)
        self.kind = kind
        self.model: Any
        self._planned: Any = None
        if kind == "fsdp2" and "sharding" in settings:
            self._planned = planned(settings["sharding"])
            layers = model.layers[1:-1]  # type: ignore[index]
            self.model = self._planned["shard"](model, layers, self.device.type)
        elif kind != "ddp":
            self.model = sharded(model, self.bf16, sums or torch.float32, nodes=kind == "hsdp")
        else:
            self.model = replicated(model, bucket_mb)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **adam_of(settings))
        self.scheduler = scheduler_of(settings, self.optimizer)
        self._clip = float(settings.get("gradient_clipping", 0.0))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of ``tokens``."""
        casts = self.bf16 and self.kind == "ddp"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=casts):
            logits: Tensor = self.model(tokens)
        return logits

    def accumulating(self, last: bool) -> Any:
        """Return a micro-batch's context; gradients are reduced only with the last micro-batch."""
        if self._planned is not None:
            self._planned["syncs"](self.model, last)
            return contextlib.nullcontext()
        if self.kind != "ddp":
            self.model.set_requires_gradient_sync(last)
            return contextlib.nullcontext()
        return contextlib.nullcontext() if last else self.model.no_sync()

    def update(self) -> None:
        """Clip, and step optimizer and schedule."""
        if self._clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()

    def get_lr(self) -> list[float]:
        """Return the learning rate of every parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def save_checkpoint(self, folder: str, client_state: dict[str, Any]) -> None:
        """Write a torch.distributed.checkpoint and record its name in the file latest."""
        tag = f"step{client_state['step']}"
        save_sharded(self._state(client_state), checkpoint_id=Path(folder) / tag)
        if dist.get_rank() == 0:
            (Path(folder) / "latest").write_text(tag)
        dist.barrier()

    def load_checkpoint(self, folder: str) -> tuple[str | None, dict[str, Any]]:
        """Load the latest checkpoint; return its path (None without one) and the client state."""
        latest = Path(folder) / "latest"
        if not latest.is_file():
            return None, {}
        path = Path(folder) / latest.read_text().strip()
        state = self._state({"step": 0, "consumed_samples": 0})
        load_sharded(state, checkpoint_id=path)
        set_state_dict(
            self.model, self.optimizer,
            model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        )  # fmt: skip
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        return str(path), state["client"]

    def _state(self, client: dict[str, Any]) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        schedule = {} if self.scheduler is None else self.scheduler.state_dict()
        return {"model": model, "optimizer": optimizer, "scheduler": schedule, "client": client}


def sharded(
    model: Any, bf16: bool, sums: torch.dtype = torch.float32, nodes: bool = False
) -> nn.Module:
    """Apply ``fully_shard`` to ``model`` layer by layer; tied weights stay with the root.

    ``sums``: reduce dtype of gradients. ``nodes``: shard within a node and replicate across nodes,
    in torchrun's rank order.
    """
    mesh = None
    if nodes:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        device = next(model.parameters()).device.type
        mesh = init_device_mesh(
            device, (dist.get_world_size() // local, local), mesh_dim_names=("replicate", "shard")
        )
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None,
        reduce_dtype=sums if bf16 or sums != torch.float32 else None,
    )
    for layer in model.layers[1:-1]:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    whole: nn.Module = fully_shard(model, mesh=mesh, mp_policy=policy)
    return whole


def replicated(model: nn.Module, bucket_mb: float = BUCKET_MB) -> DistributedDataParallel:
    """Wrap ``model`` in DistributedDataParallel."""
    devices = None
    if next(model.parameters()).device.type == "cuda":
        devices = [torch.cuda.current_device()]
    return DistributedDataParallel(
        model, device_ids=devices, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb
    )


class TorchTrainer:
    """Adapts torch's engines to the loop's protocol."""

    def __init__(
        self, engine: Engine, loss: Callable[[Tensor, Tensor], Tensor], settings: dict[str, Any]
    ) -> None:
        self.engine: Any = engine
        self._loss = loss
        self.share = Share(
            rank=dist.get_rank(), world_size=dist.get_world_size(),
            micro_batch=int(settings["train_micro_batch_size_per_gpu"]),
            micro_batches=int(settings.get("gradient_accumulation_steps", 1)),
        )  # fmt: skip

    def step(self, batches: Iterator[Batch]) -> float:
        """Make one optimizer step; return the loss, averaged over micro-batches and ranks."""
        losses = self._train(batches)
        self.engine.update()
        return mean_over_ranks(losses)

    def _train(self, batches: Iterator[Batch]) -> list[Tensor]:
        """Run forward and backward of every micro-batch; return their losses."""
        losses, count = [], self.share.micro_batches
        for number, (tokens, labels) in enumerate(batches, 1):
            with self.engine.accumulating(number == count):
                loss = self._loss(self.engine.forward(tokens), labels)
                (loss / count).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return losses

    def evaluate(self, batches: Iterator[Batch]) -> float:
        """Return the loss of a forward pass."""
        self.engine.model.eval()
        with torch.no_grad():
            losses = [self._loss(self.engine.forward(t), labels) for t, labels in batches]
        self.engine.model.train()
        return mean_over_ranks(losses)
