"""Publish weights of verl's actors and load them in its rollouts: a checkpoint engine of verl.

verl imports this module in every worker (``checkpoint_engine.custom_backend_module``); the import
registers the backend "hybridcomp". Actors publish to a folder that the rollouts can read. Every
actor rank keeps an even share of each tensor that verl exports, and compares it with the next.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from hybridcomp.errors import ConfigError, PublishError
from hybridcomp.escaping import quoted_path
from hybridcomp.inference.follower import PAUSE_S, tell_of_wait
from hybridcomp.inference.shares import Shares
from hybridcomp.inference.upstream import check
from hybridcomp.inference.verl_seams import SEAMS
from hybridcomp.job.agreement import tell
from hybridcomp.job.saved import attempt
from hybridcomp.job.waits import Notices
from hybridcomp.log import say
from hybridcomp.publishing import Publisher, WeightReceiver
from hybridcomp.publishing.destinations import Folder, folder_of, manifests_in
from hybridcomp.publishing.records import DamagedVersion
from hybridcomp.publishing.summaries import VersionSummary, check_all

BACKEND = "hybridcomp"
SETTINGS = f"checkpoint_engine.engine_kwargs.{BACKEND}"

check(SEAMS)


@CheckpointEngineRegistry.register(BACKEND)
class HybridcompCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Transfer exact deltas through a folder; an instance serves an actor or a rollout.

    Attributes:
        summary: figures of the last version, on an actor; None before the first version.

    On the host, an actor keeps a 16-bit copy of its share (two during a sync), and a rollout worker
    keeps a mirror of the whole model. The memory is freed with the object.
    """

    wire_format = "named_tensors"

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        to: str = "",
        anchor_every: int = 100,
        dtype: str = "bf16",
        wait_s: float = 600.0,
    ) -> None:
        """Keep the settings; files are first touched at the first sync.

        Args:
            bucket_size: verl's, for its own buckets; not used.
            is_master: whether this is the actor's rank 0; not used.
            to: the folder, ``file:///...``, under this worker's path.
            anchor_every: versions from one full version to the next.
            dtype: "bf16" or "fp16": the dtype in which rollouts compute.
            wait_s: seconds a rollout waits for the version of a sync.

        Raises ConfigError without a folder.
        """
        if not to:
            todo = f"expected a folder that actors and rollouts can read; set {SETTINGS}.to"
            raise ConfigError(f"{SETTINGS}.to", to, todo)
        self._to, self._anchor_every, self._dtype = to, anchor_every, dtype
        self._wait_s = wait_s
        self._shares: Shares | None = None
        self._publisher: Publisher | None = None
        self._receiver: WeightReceiver | None = None
        self._before = 0
        self.summary: VersionSummary | None = None

    def prepare(self) -> dict[str, Any]:
        """Do nothing: a folder needs no rendezvous."""
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Tell every worker whether it is an actor or a rollout."""
        actors = {"is_rollout": [False] * actor_wg_world_size}
        return actors, {"is_rollout": [True] * rollout_world_size}

    def init_process_group(self, is_rollout: bool) -> None:
        """Bring a rollout's mirror to the folder's newest version before this sync.

        verl starts to send once this has returned on all workers, so the folder's next version is
        the version of this sync. A damaged version is no error: the receiver has asked for a full
        one, which the actors send next.
        """
        if is_rollout:
            if self._receiver is None:
                self._receiver = WeightReceiver(self._to)
            there = max(manifests_in(folder_of(self._to)), default=0)
            try:
                self._receiver.update()
            except DamagedVersion as error:
                say(f"verl: {error}", anywhere=True)
            self._before = max(there, self._receiver.version)

    def finalize(self) -> None:
        """Do nothing: the next sync reuses mirror and copies."""

    @torch.no_grad()
    async def send_weights(
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publish a version of the weights that verl's export yields; runs on every actor rank.

        Returns figures for verl's log. Raises PublishError on all ranks.
        """
        if self._shares is None:
            self._shares = Shares(self._dtype, dist.get_rank(), dist.get_world_size())
        _, problem = attempt(functools.partial(self._shares.take, weights))
        said = tell({"problem": problem}, what="verl's export")
        check_all(said, tuple(range(len(said))), "the export of verl's actors")
        if self._publisher is None:
            self._publisher = Publisher(
                self._shares.weights(), Folder(folder_of(self._to)), anchor_every=self._anchor_every
            )
        told = self.summary = self._publisher.publish(step=global_steps)
        self._shares.drop_values()
        return {
            "checkpoint_engine/changed_ratio": told.changed_share,
            "checkpoint_engine/bits_per_weight": told.bits_per_weight,
            "checkpoint_engine/payload_mbytes": told.nbytes / (1 << 20),
        }

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, Tensor], None]:
        """Wait for this sync's version, apply it to the mirror, and yield all its tensors.

        The tensors are views of the mirror; verl copies all of them to the engine on the same
        machine, as with its other backends. Raises PublishError before it yields a tensor.
        """
        receiver = await self._next_version()
        for name, tensor in receiver.tensors():
            yield name, tensor

    async def _next_version(self) -> WeightReceiver:
        receiver = self._receiver
        if receiver is None:
            raise PublishError("receive_weights was called before init_process_group; report this")
        wanted = self._before + 1
        notices = Notices()
        while receiver.version <= self._before:
            receiver.update(wanted if self._before else None)
            if receiver.version > self._before:
                break
            if notices.seconds > self._wait_s:
                raise PublishError(
                    f"version {wanted} was not in {quoted_path(self._to)} after "
                    f"{self._wait_s:g} s; look why the actors did not publish it, or raise "
                    f"{SETTINGS}.wait_s"
                )
            tell_of_wait(notices, wanted, self._wait_s)
            await asyncio.sleep(PAUSE_S)
        return receiver
