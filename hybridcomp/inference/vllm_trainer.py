"""Publish a version from a training job, and have vLLM's workers load it: a trainer's engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from hybridcomp.errors import ConfigError
from hybridcomp.inference.upstream import check
from hybridcomp.inference.vllm_plugin import BACKEND
from hybridcomp.inference.vllm_seams import TRAINER_SEAMS
from hybridcomp.publishing import Publisher, VersionSummary


@dataclass
class HybridcompTrainerInfo(TrainerInitInfo):  # type: ignore[misc]
    """Arguments of the trainer's engine, on each rank.

    Attributes:
        publisher: what ``hybridcomp.publish(engine, to)`` returned.
        source: where the workers find what it publishes, as they name that folder.
        wait_s, verify: for the workers, as ``ModuleFollower`` takes them.
    """

    backend: ClassVar[str] = BACKEND

    publisher: Publisher = field(kw_only=True)
    source: str = field(kw_only=True)
    wait_s: float = field(default=60.0, kw_only=True)
    verify: bool = field(default=True, kw_only=True)


@dataclass(frozen=True)
class _Source:
    source: str
    wait_s: float
    verify: bool


class HybridcompTrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """Publishes on all ranks; rank 0 tells vLLM's workers which version to load."""

    init_info_cls = HybridcompTrainerInfo

    def __init__(self, *, client: Any, publisher: Publisher, rank: int) -> None:
        """Hold the publisher, which the caller closes."""
        super().__init__(client=client, source=None, is_sender=rank == 0, rank=rank)
        self._publisher = publisher

    @classmethod
    def trainer_init(
        cls, init_info: HybridcompTrainerInfo, *, client: Any, source: Any = None
    ) -> HybridcompTrainerEngine:
        """Tell the workers where versions are. Raises SeamError, and ConfigError on a source."""
        check(TRAINER_SEAMS)
        if source is not None:
            todo = "leave it out: hybridcomp.publish was given the engine whose weights are sent"
            raise ConfigError("source", type(source).__name__, todo)
        engine = cls(client=client, publisher=init_info.publisher, rank=init_info.rank)
        if engine.is_sender:
            where = _Source(init_info.source, init_info.wait_s, init_info.verify)
            client.init_weight_transfer_engine(asdict(where))
        return engine

    def send_weights(self) -> VersionSummary:
        """Publish a version, and have the workers load it; called on every rank.

        The other ranks do not wait for the workers. Raises PublishError on every rank where the
        version could not be published; the workers then keep the one that they hold.
        """
        told = self._publisher.publish()
        if self.is_sender:
            self.client.start_weight_update()
            self.client.update_weights({"version": told.version})
            self.client.finish_weight_update(weight_version=str(told.version))
        return told
