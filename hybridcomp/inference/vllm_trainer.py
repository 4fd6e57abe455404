"""Publish versions from a training job and make vLLM's workers load them: vLLM's trainer engine."""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import dataclass, field
from typing import Any, ClassVar

import requests  # a dependency of vLLM's client too
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

from hybridcomp.errors import ConfigError, PublishError
from hybridcomp.escaping import SENTENCE, one_line
from hybridcomp.inference.upstream import check
from hybridcomp.inference.vllm_plugin import BACKEND
from hybridcomp.inference.vllm_seams import TRAINER_SEAMS
from hybridcomp.job.agreement import tell
from hybridcomp.job.saved import attempt
from hybridcomp.publishing import Publisher, StartedVersion, VersionSummary


@dataclass
class HybridcompTrainerInfo(TrainerInitInfo):  # type: ignore[misc]
    """Arguments of the trainer's engine, on each rank.

    Attributes:
        publisher: the result of ``hybridcomp.publish(engine, to)``.
        source: the published folder or source, under the workers' path.
        wait_s, verify: options for the workers, as for ``ModuleFollower``.
    """

    backend: ClassVar[str] = BACKEND

    publisher: Publisher = field(kw_only=True)
    source: str = field(kw_only=True)
    wait_s: float = field(default=60.0, kw_only=True)
    verify: bool = field(default=True, kw_only=True)


class HybridcompTrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """Publish on all ranks; rank 0 tells vLLM's workers which version to load."""

    init_info_cls = HybridcompTrainerInfo

    def __init__(
        self, *, client: Any, publisher: Publisher, rank: int, where: dict[str, Any]
    ) -> None:
        """Hold the publisher, which the caller closes. ``where``: fields of ``VersionSource``."""
        takes_rank = "rank" in inspect.signature(TrainerWeightTransferEngine.__init__).parameters
        more = {"rank": rank} if takes_rank else {}
        super().__init__(client=client, source=None, is_sender=rank == 0, **more)
        self._publisher, self._where = publisher, where
        # version that was prepared but that no worker has switched to yet
        self._prepared: StartedVersion | None = None

    @classmethod
    def trainer_init(
        cls, init_info: HybridcompTrainerInfo, *, client: Any, source: Any = None
    ) -> HybridcompTrainerEngine:
        """Tell the workers the source. Raises SeamError, and ConfigError for an invalid source."""
        check(TRAINER_SEAMS)
        if source is not None:
            todo = "leave it out: hybridcomp.publish was given the engine whose weights are sent"
            raise ConfigError("source", type(source).__name__, todo)
        where = {name: getattr(init_info, name) for name in ("source", "wait_s", "verify")}
        engine = cls(client=client, publisher=init_info.publisher, rank=init_info.rank, where=where)
        if engine.is_sender:
            client.init_weight_transfer_engine(where)
        return engine

    def prepare_weights(self) -> StartedVersion:
        """Start to publish a version while training and the workers' requests go on.

        The workers receive and check it in a thread. They keep their current version until
        ``send_weights``, which then publishes nothing and makes them switch to this version. Every
        rank calls this; a collective.

        Raises PublishError on every rank if an earlier version could not be published.
        ``send_weights`` raises the errors of this version and of the workers.
        """
        told = self._prepared = self._publisher.publish(wait=False)
        if self.is_sender:
            attempt(lambda: self._ask({"version": told.version, "prepare": True}))
        return told

    def send_weights(self) -> VersionSummary:
        """Publish a version, and make the workers load it; every rank calls this, a collective.

        The workers are first told the source again, which matters only after a server restart. Then
        the prefix cache, which holds keys and values of the previous version, is reset if the
        client has ``reset_prefix_cache``, as ``ServerClient`` does.

        Raises PublishError on every rank if the version could not be published or loaded. The error
        says whether the workers keep their version or hold none.
        """
        prepared, self._prepared = self._prepared, None
        told = self._publisher.publish() if prepared is None else self._publisher.finish()
        assert told is not None, "what was prepared is under way"
        problem = self._load(told.version) if self.is_sender else None
        said = tell({"problem": problem}, what="loading weights", ranks=self._publisher.ranks)
        found = next((statement["problem"] for statement in said if statement["problem"]), None)
        if found is not None:
            raise PublishError(f"version {told.version} is published and was not loaded: {found}")
        return told

    def _load(self, version: int) -> str | None:
        """Have the workers load a version; return what went wrong."""
        _, problem = attempt(lambda: self._ask({"version": version}))
        if problem is None:
            reset = getattr(self.client, "reset_prefix_cache", None)
            _, problem = attempt(reset) if callable(reset) else (None, None)
            return problem and f"the prefix cache was not reset: {problem}"
        return f"{one_line(problem, SENTENCE)}; the log of the server says what its workers refused"

    def _ask(self, message: dict[str, Any]) -> None:
        self.client.init_weight_transfer_engine({**self._where, "fresh": False})
        self.client.start_weight_update()
        try:
            self.client.update_weights(message)
        except Exception as error:
            with contextlib.suppress(Exception):  # ends this update's session
                self.client.finish_weight_update()
            answer = getattr(getattr(error, "response", None), "text", "")
            if answer:
                raise PublishError(f"{one_line(error)}: {one_line(answer, SENTENCE)}") from error
            raise
        done = None if message.get("prepare") else str(message["version"])
        self.client.finish_weight_update(weight_version=done)


class ServerClient(HTTPVLLMWeightSyncClient):  # type: ignore[misc]
    """vLLM's client for a server; it can also reset the server's caches of an old version."""

    def reset_prefix_cache(self) -> None:
        """Make the server drop what it has computed with the previous version.

        The outputs of encoders (for example of images) are dropped first, since keys and values are
        computed from them; then all keys and values, also those of vLLM's external connectors.
        Running requests recompute theirs.

        Raises PublishError if the server reports a failure.
        """
        self._reset("reset_encoder_cache")
        answer = self._reset("reset_prefix_cache", reset_running_requests="true",
                             reset_external="true")  # fmt: skip
        if not answer.json().get("success"):
            raise PublishError(f"{self.base_url} answers {one_line(answer.text)}")

    def _reset(self, path: str, **asked: str) -> requests.Response:
        url = f"{self.base_url}/{path}"
        answer = requests.post(url, params=asked, timeout=self.timeout)
        answer.raise_for_status()
        return answer
