"""Sync weights with verl's own manager and worker groups in a Ray cluster; print JSON.

``python -m tests.inference.verl_runs FOLDER SYNCS``: two actors and two rollout workers, each a
process of Ray. verl 0.9.1 makes the engines from its registry and calls them; our own are the model
that actors export and the inference engine that takes the tensors.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist
from torch import Tensor
from verl.checkpoint_engine.base import (
    CheckpointEngineConfig,
    CheckpointEngineManager,
    CheckpointEngineRegistry,
    CheckpointEngineWorker,
)
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs
from verl.workers.config import RolloutConfig

from tests.inference.made import bits, sent, values_of

#: the sync in which rank 1 of the actors exports another model
OTHER = 3
MODULE = "hybridcomp.inference.verl_engine"


class Actor(Worker):  # type: ignore[misc]
    """Does what verl's ``ActorRolloutRefWorker`` does for a sync, without a model."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        initialize_global_process_group_ray(backend="cpu:gloo")
        import_external_libs(MODULE)
        self.engine = CheckpointEngineRegistry.new(
            "hybridcomp", is_master=dist.get_rank() == 0, bucket_size=1 << 20, **settings
        )

    def _export(self, version: int) -> Iterator[tuple[str, Tensor]]:
        weights = list(sent(version))
        return iter(weights[: len(weights) - (version == OTHER and self.rank == 1)])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int, mode: str = "auto") -> Any:
        return await self.engine.send_weights(self._export(global_steps), global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)  # type: ignore[untyped-decorator]
    def execute_checkpoint_engine(self, method: str, *args: Any, **named: Any) -> Any:
        return getattr(self.engine, method)(*args, **named)


class Adapter:
    """Inference engine of a rollout worker that keeps the received bits."""

    def __init__(self) -> None:
        self.bits: dict[str, list[int]] = {}

    async def update_weights(
        self, weights: AsyncGenerator[tuple[str, Tensor], None], **_: Any
    ) -> None:
        self.bits = bits([(name, one.clone()) async for name, one in weights])


class Rollout(CheckpointEngineWorker):  # type: ignore[misc]
    """verl's rollout worker, which also returns what its engine holds."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def held(self) -> dict[str, list[int]]:
        return dict(self.server_adapter.bits)


class Replica:
    """Replica of rollouts that records the calls of verl's manager around a sync."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def call(**_: Any) -> None:
            self.calls.append(name)

        return call


def group(of: type, *given: Any, **named: Any) -> Any:
    """Start two Ray workers of a class."""
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
    made = RayClassWithInitArgs(ray.remote(of), *given, **named)
    return RayWorkerGroup(pool, made, device_name="cpu")


def synced(folder: Path, syncs: int) -> dict[str, Any]:
    """Sync versions; return those that arrive wrong, and why a sync failed."""
    settings = {"to": str(folder / "weights"), "wait_s": 20.0}
    given = {"backend": "hybridcomp", "custom_backend_module": MODULE}
    config = CheckpointEngineConfig(**given, engine_kwargs={"hybridcomp": settings})
    actors = group(Actor, settings)
    rollout = RolloutConfig(name="vllm", checkpoint_engine=config)
    rollouts = group(Rollout, rollout_config=rollout, model_config=None, server_adapter=Adapter())
    replica = Replica(rollouts.workers)
    manager = CheckpointEngineManager(config, actors, [replica])
    found: dict[str, Any] = {"wrong": [], "told": {}, "changed": []}
    expected: dict[str, list[int]] = {}
    for version in range(1, syncs + 1):
        try:
            said = manager.update_weights(global_steps=version)
            found["changed"].append(said["checkpoint_engine/changed_ratio"])
            expected = bits(values_of(version).items())
        except Exception as error:
            found["told"][version] = str(error)
        found["wrong"] += [version for one in rollouts.held() if one != expected]
    found["calls"] = replica.calls[:4]
    return found


def main() -> None:
    """Run the syncs in a new local cluster."""
    folder = Path(sys.argv[1])
    there = {"PYTHONPATH": os.environ["PYTHONPATH"], "OMP_NUM_THREADS": "1"}
    ray.init(
        address="local", num_cpus=6, include_dashboard=False, object_store_memory=100 << 20,
        log_to_driver=False, runtime_env={"env_vars": there}, _node_ip_address="127.0.0.1",
    )  # fmt: skip
    try:
        print("\n" + json.dumps(synced(folder, int(sys.argv[2]))), flush=True)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
