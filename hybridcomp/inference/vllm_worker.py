"""Load published weights in a vLLM worker: a weight-transfer engine.

Each worker has a receiver of its own. Changed values go through vLLM's checkpoint patches, which
find their way into packed and sharded parameters; the first version, and whatever a patch cannot
express, goes through vLLM's layerwise reload.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from hybridcomp.errors import PublishError
from hybridcomp.inference.checks import refuse_dtype, refuse_quantized
from hybridcomp.inference.follower import Follower, Patched
from hybridcomp.inference.upstream import check
from hybridcomp.inference.vllm_seams import WORKER_SEAMS
from hybridcomp.publishing import WeightReceiver


@dataclass
class VersionSource(WeightTransferInitInfo):  # type: ignore[misc]
    """First message to a worker: where versions are, as ``ModuleFollower`` takes it."""

    source: str
    wait_s: float = 60.0
    verify: bool = True


@dataclass
class VersionUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Message to a worker for each update: the version that all workers load."""

    version: int


class HybridcompWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Loads versions that ``hybridcomp.publish`` has written: backend "hybridcomp" of vLLM."""

    init_info_cls = VersionSource
    update_info_cls = VersionUpdate
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        """Check vLLM and the model. Raises SeamError, and PublishError on quantized weights."""
        check(WORKER_SEAMS)
        super().__init__(config, vllm_config, device, model)
        refuse_quantized(self.model_config.quantization, ())
        self._follower: Follower | None = None

    def init_transfer_engine(self, init_info: VersionSource) -> None:
        """Open the source; nothing is read before the first update. Frees an earlier mirror."""
        weights = _WorkerWeights(self.model, self.model_config, torch.device(self.device))
        self._follower = Follower(
            WeightReceiver(init_info.source), weights,
            wait_s=init_info.wait_s, verify=init_info.verify,
        )  # fmt: skip

    def start_weight_update(self) -> None:
        """Refuse an update before ``init_transfer_engine``."""
        self._followed()

    def receive_weights(self, update_info: VersionUpdate) -> None:
        """Bring the model to the version of ``update_info``. Raises PublishError."""
        self._followed().follow(update_info.version)

    def finish_weight_update(self) -> None:
        """Do nothing: ``receive_weights`` has loaded a whole version."""

    def shutdown(self) -> None:
        """Free the mirror."""
        self._follower = None

    def _followed(self) -> Follower:
        if self._follower is None:
            raise PublishError(
                "the engine was told no source; call init_weight_transfer_engine with "
                '{"source": "file:///..."} before the first update'
            )
        return self._follower


class _WorkerWeights:
    """The model of one worker as a ``Follower`` writes it."""

    def __init__(self, model: Any, model_config: Any, device: torch.device) -> None:
        self._model, self._config, self._device = model, model_config, device

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return the parameters of this worker, by vLLM's own names."""
        found: Iterable[tuple[str, Tensor]] = self._model.named_parameters()
        return found

    def check(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raise PublishError on quantized parameters, and where values would be rounded."""
        refuse_quantized(None, self.weights())
        refuse_dtype(self._config.dtype, weights)

    def load_whole(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load all weights as from a checkpoint, through vLLM's layerwise reload."""
        initialize_layerwise_reload(self._model)
        with disable_mtp_completeness_check():
            # copies: a loader may write to what it is given
            self._model.load_weights((name, self._copied(one)) for name, one in weights)
        finalize_layerwise_reload(self._model, self._config)

    def load_changes(self, patches: list[Patched]) -> None:
        """Patch the changed values in place.

        vLLM marks unchanged values with NaN, so parameters that got a NaN are patched as a whole.
        """
        odd = {one.name for one in patches if bool(torch.isnan(one.values).any())}
        sparse = [self._patch(one) for one in patches if one.name not in odd]
        whole = [(one.name, self._copied(one.whole)) for one in patches if one.name in odd]
        if sparse:
            # offsets are unique: they come from torch.unique or from a receiver's own pieces
            load_checkpoint_weight_patches(self._model, sparse, validate_unique_indices=False)
        if whole:
            with disable_mtp_completeness_check():
                self._model.load_weights(whole)

    def _patch(self, one: Patched) -> Any:
        return CheckpointWeightPatch(
            one.name,
            tuple(one.whole.shape),
            one.whole.dtype,
            one.values.to(self._device),
            one.offsets.to(self._device),
        )

    def _copied(self, weight: Tensor) -> Tensor:
        return weight.to(self._device, copy=True)
