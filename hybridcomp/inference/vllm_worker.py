"""Load published weights in a vLLM worker: a weight-transfer engine.

Each worker has a receiver of its own. Changed values go through vLLM's checkpoint patches, which
find their way into packed and sharded parameters; the first version, and whatever a patch cannot
express, goes through vLLM's layerwise reload.
"""

from __future__ import annotations

import functools
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
from hybridcomp.foreign import one_line
from hybridcomp.inference.checks import (
    refuse_configuration,
    refuse_dtype,
    refuse_empty,
    refuse_quantized,
)
from hybridcomp.inference.follower import Follower, Patched, is_wait
from hybridcomp.inference.together import Workers
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
        refuse_empty(model.named_parameters())
        self._follower: Follower | None = None
        self._workers: Workers | None = None

    def init_transfer_engine(self, init_info: VersionSource) -> None:
        """Open the source; nothing is read before the first update. Frees an earlier mirror.

        Raises PublishError on the last worker, where one of them cannot do it.
        """
        if self._workers is None:
            count = getattr(self.vllm_config.parallel_config, "world_size", 1)
            self._workers = Workers(count)
        self._workers.tell(self._workers.problem(functools.partial(self._open, init_info)))

    def _open(self, said: VersionSource) -> None:
        self._follower = None
        if not (isinstance(said.source, str) and is_wait(said.wait_s)
                and isinstance(said.verify, bool)):  # fmt: skip
            found = one_line(vars(said))
            raise PublishError(f"expected source, wait_s in seconds and verify, found {found}")
        receiver = WeightReceiver(said.source)
        weights = _WorkerWeights(self.model, self.model_config, torch.device(self.device), receiver)
        self._follower = Follower(receiver, weights, wait_s=said.wait_s, verify=said.verify)

    def start_weight_update(self) -> None:
        """Do nothing: ``receive_weights`` refuses an update before ``init_transfer_engine``."""

    def receive_weights(self, update_info: VersionUpdate) -> None:
        """Bring the model to the version of ``update_info``, on all workers or on none.

        After an error before anything was written all workers have the version that they had;
        after one in loading all hold none. Raises PublishError, on the last worker.
        """
        workers = self._workers or Workers(1)
        is_due: list[bool] = []

        def prepare() -> None:
            wanted = update_info.version
            if type(wanted) is not int or wanted < 1:
                raise PublishError(f"expected a version from 1 on, found {one_line(wanted)}")
            is_due.append(self._followed().prepare(wanted))

        def load() -> None:
            if is_due[0]:
                self._followed().load()

        problem = workers.problem(prepare)
        if problem is None:
            problem = workers.problem(load)
            if problem is not None:
                self._followed().forget()
        workers.tell(problem)

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


#: what vLLM names the way in which a layer computes with weights that are as they were loaded
PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


def _rearranged(model: Any) -> str:
    """Return the name of a layer whose weights vLLM may have rearranged; "" where there is none.

    Such are all with another ``quant_method`` than the plain ones, which experts of 16 bits have.
    """
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        has_weights = any(True for _ in module.parameters(recurse=False))
        if method is not None and has_weights and type(method).__name__ not in PLAIN_METHODS:
            return str(name)
    return ""


class _WorkerWeights:
    """The model of one worker as a ``Follower`` writes it."""

    def __init__(
        self, model: Any, model_config: Any, device: torch.device, receiver: WeightReceiver
    ) -> None:
        self._model, self._config, self._device = model, model_config, device
        self._receiver = receiver

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return the parameters of this worker, by vLLM's own names."""
        found: Iterable[tuple[str, Tensor]] = self._model.named_parameters()
        return found

    def check(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raise PublishError where these weights are another model's, or values would change."""
        published = dict(weights)
        refuse_quantized(None, self.weights())
        refuse_empty(self.weights())
        refuse_dtype(self._config.dtype, published.items())
        config = getattr(self._config, "hf_text_config", None)
        shapes = {name: tuple(tensor.shape) for name, tensor in published.items()}
        refuse_configuration(config, shapes, self._receiver.aliases)
        if self._device.type == "cpu" and (odd := _rearranged(self._model)):
            raise PublishError(
                f"{one_line(odd)}: on CPUs vLLM packs the weights of this layer once, and computes "
                "with the copy whatever is loaded later; serve this model on a GPU"
            )

    def load_whole(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load all weights as from a checkpoint, through vLLM's layerwise reload."""
        mine = {name for name, _ in self.weights()}
        initialize_layerwise_reload(self._model)
        with disable_mtp_completeness_check():
            # copies: a loader may write to what it is given
            loaded = self._model.load_weights((name, self._copied(one)) for name, one in weights)
        finalize_layerwise_reload(self._model, self._config)
        left = sorted(mine - loaded) if isinstance(loaded, set) else []
        if left:
            raise PublishError(
                f"{one_line(left[0])} (and {len(left) - 1} more) of the engine is not among the "
                "published weights, and stays as it was started"
            )

    def load_changes(self, patches: list[Patched]) -> None:
        """Patch the changed values in place.

        vLLM marks unchanged values with NaN, so parameters that got a NaN are patched as a whole.
        Where vLLM rearranges weights of a layer after it has loaded them, such as those of experts,
        values have other places: the whole model is loaded then, as from a checkpoint.
        """
        if _rearranged(self._model):
            self.load_whole(self._receiver.tensors())
            return
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
