"""Load published weights in a vLLM worker, as a weight-transfer engine.

Each worker has its own receiver. The first version, and every parameter that vLLM does not simply
copy, goes through vLLM's layerwise reload. Changed values are written where vLLM's own loader puts
them in packed and sharded parameters. If the trainer asks for it, the worker prepares a version
while it answers requests, and switches to it in one short pause.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from hybridcomp.errors import PublishError
from hybridcomp.escaping import one_line
from hybridcomp.inference.checks import (
    are_eight_bits,
    refuse_configuration,
    refuse_dtype,
    refuse_quantized,
    refuse_unknown,
)
from hybridcomp.inference.follower import Follower, Patched, is_wait
from hybridcomp.inference.layout import LoaderLayout, learn
from hybridcomp.inference.together import Beside, Workers
from hybridcomp.inference.upstream import check
from hybridcomp.inference.vllm_seams import WORKER_SEAMS
from hybridcomp.publishing import WeightReceiver


@dataclass
class VersionSource(WeightTransferInitInfo):  # type: ignore[misc]
    """Message to a worker: the source of versions, as for ``ModuleFollower``.

    ``fresh``: reopen the source even if the worker already has it.
    """

    source: str
    wait_s: float = 60.0
    verify: bool = True
    fresh: bool = True


@dataclass
class VersionUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Message to a worker for each update: the version that all workers load.

    ``prepare``: start to receive and check the version in a thread, and return at once; a later
    message without ``prepare`` switches to the version.
    """

    version: int
    prepare: bool = False


class HybridcompWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Load versions that ``hybridcomp.publish`` has written: backend "hybridcomp" of vLLM."""

    init_info_cls = VersionSource
    update_info_cls = VersionUpdate
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        """Check vLLM and the model. Raises SeamError, and PublishError on quantized weights."""
        check(WORKER_SEAMS)
        super().__init__(config, vllm_config, device, model)
        if self.model_config.quantization not in EIGHT_BITS:
            refuse_quantized(self.model_config.quantization, ())
        self._follower: Follower | None = None
        self._source = ""
        self._beside = Beside()
        self._workers: Workers | None = None

    def init_transfer_engine(self, init_info: VersionSource) -> None:
        """Open the source; nothing is read before the first update.

        Frees an earlier mirror, unless the message continues the same source.

        Raises PublishError on the last worker if any worker cannot open it.
        """
        if self._workers is None:
            count = getattr(self.vllm_config.parallel_config, "world_size", 1)
            self._workers = Workers(count)
        self._workers.tell(self._workers.problem(functools.partial(self._open, init_info)))

    def _open(self, said: VersionSource) -> None:
        if not (isinstance(said.source, str) and is_wait(said.wait_s)
                and isinstance(said.verify, bool) and isinstance(said.fresh, bool)):  # fmt: skip
            found = one_line(vars(said))
            raise PublishError(f"expected source, wait_s in seconds and verify, found {found}")
        self._beside.end()
        if self._follower is not None and not said.fresh and said.source == self._source:
            self._follower.wait_s, self._follower.verify = said.wait_s, said.verify
            return
        self._follower, self._source = None, said.source
        receiver = WeightReceiver(said.source)
        weights = _WorkerWeights(self.model, self.model_config, torch.device(self.device), receiver)
        self._follower = Follower(receiver, weights, wait_s=said.wait_s, verify=said.verify)

    def start_weight_update(self) -> None:
        """Do nothing: ``receive_weights`` refuses an update before ``init_transfer_engine``."""

    def receive_weights(self, update_info: VersionUpdate) -> None:
        """Bring the model to the version of ``update_info``, on all workers or on none.

        If an error occurs before anything is written, all workers keep their version; after an
        error during loading no worker holds a version. Raises PublishError on the last worker.
        """
        wanted = update_info.version

        def prepare() -> bool:
            if type(wanted) is not int or wanted < 1:
                raise PublishError(f"expected a version from 1 on, found {one_line(wanted)}")
            return self._followed().prepare(wanted)

        if update_info.prepare:
            self._beside.begin(wanted, prepare)
            return
        workers = self._workers or Workers(1)
        is_due: list[bool] = []
        problem = workers.problem(lambda: is_due.append(self._beside.result(wanted, prepare)))
        if problem is None:
            problem = workers.problem(lambda: self._followed().load() if is_due[0] else None)
            if problem is not None:
                self._followed().forget()
            elif is_due[0]:
                self._beside.begin(None, self._followed().settle)
        workers.tell(problem)

    def finish_weight_update(self) -> None:
        """Do nothing: ``receive_weights`` has loaded a whole version."""

    def shutdown(self) -> None:
        """Free the mirror."""
        self._beside.end()
        self._follower = None

    def _followed(self) -> Follower:
        if self._follower is None:
            raise PublishError(
                "the engine was told no source; call init_weight_transfer_engine with "
                '{"source": "file:///..."} before the first update'
            )
        return self._follower


#: vLLM's quantizations whose checkpoint format ``publish.as`` publishes
EIGHT_BITS = ("fp8", "mxfp8", "modelopt_mxfp8")
#: names of vLLM's quantization methods that leave weights as they were loaded
PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


def _is_rearranged(model: Any) -> bool:
    """Return whether vLLM may have rearranged a layer's weights after loading.

    It may have for layers whose ``quant_method`` is not in PLAIN_METHODS, such as 16-bit experts.
    It has for layers whose weights are empty, because vLLM computes with packed copies.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        weights = list(module.parameters(recurse=False))
        is_plain = method is None or type(method).__name__ in PLAIN_METHODS
        if weights and (not is_plain or not all(weight.numel() for weight in weights)):
            return True
    return False


def _pack_again(model: Any) -> None:
    """Have vLLM repack weights whose packed copies its own reload does not update.

    On CPUs these are experts, and the embedding if the head is tied to it.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        if experts is not None:
            experts.process_weights_after_loading(module)
        elif type(method).__name__ == "UnquantizedEmbeddingMethod":
            method.process_weights_after_loading(module)


def _of_base(names: Iterable[str]) -> set[str]:
    """Return names without the wrappers of layers with adapters, as vLLM's loader reports them."""
    return {name.replace(".base_layer.", ".") for name in names}


class _WorkerWeights:
    """One worker's model as a ``Follower`` writes it."""

    def __init__(
        self, model: Any, model_config: Any, device: torch.device, receiver: WeightReceiver
    ) -> None:
        self._model, self._config, self._device = model, model_config, device
        self._receiver = receiver
        # copies of vLLM's loader, recorded from the first version on
        self._layout: LoaderLayout | None = None

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return this worker's parameters, by vLLM's names."""
        found: Iterable[tuple[str, Tensor]] = self._model.named_parameters()
        return found

    def check(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raise PublishError if the weights are another model's or would be converted."""
        published = dict(weights)
        is_eight = are_eight_bits(published, self._config.quantization, self.weights())
        refuse_dtype(self._config.dtype, published.items())
        config = getattr(self._config, "hf_text_config", None)
        shapes = {name: tuple(tensor.shape) for name, tensor in published.items()}
        refuse_configuration(config, shapes, self._receiver.aliases)
        if self._layout is None:
            with disable_mtp_completeness_check():
                load, mine = self._model.load_weights, dict(self.weights())
                found = learn(load, mine, published.items())
            is_packed = is_eight or not all(one.numel() for one in mine.values())
            refuse_unknown(found, is_packed)
            self._layout = found

    def load_whole(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load all weights through vLLM's layerwise reload; then compare a few values of each."""
        published = dict(weights)
        mine = _of_base(name for name, _ in self.weights())
        initialize_layerwise_reload(self._model)
        with disable_mtp_completeness_check():
            # load copies: a loader may write to its inputs
            copies = ((name, self._copied(one)) for name, one in published.items())
            loaded = self._model.load_weights(copies)
        finalize_layerwise_reload(self._model, self._config)
        left = sorted(mine - _of_base(loaded)) if isinstance(loaded, set) else []
        if left:
            raise PublishError(
                f"{one_line(left[0])} (and {len(left) - 1} more) of the engine is not among the "
                "published weights, and stays as it was started"
            )
        if self._device.type == "cpu":
            _pack_again(self._model)
        if not _is_rearranged(self._model):
            self._compare(published.items())

    def prepare_changes(self, patches: list[Patched]) -> Callable[[], object]:
        """Return a function that writes the changed values in place and compares a few.

        If vLLM rearranges any layer's weights after loading (for example those of experts), or its
        loader does more than copy a changed parameter, the values' places are unknown: the function
        then reloads the whole model as from a checkpoint.
        """
        layout = self._layout
        assert layout is not None, "``check`` has learned it"
        if _is_rearranged(self._model) or any(patch.name in layout.unknown for patch in patches):
            return lambda: self.load_whole(self._receiver.tensors())
        changes = [(patch.name, patch.offsets, patch.values) for patch in patches]
        write = layout.writer(dict(self.weights()), changes)

        def switch() -> None:
            write()
            if self._device.type == "cpu":
                _pack_again(self._model)
            self._compare(self._receiver.tensors())

        return switch

    def _compare(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raise PublishError if a compared value of a parameter is not the published one."""
        assert self._layout is not None
        odd = self._layout.differing(dict(self.weights()), weights)
        if odd:
            raise PublishError(
                f"{one_line(odd)} has other values behind the load than were published: the engine "
                "rearranges this weight in a way that hybridcomp does not know"
            )

    def _copied(self, weight: Tensor) -> Tensor:
        return weight.to(self._device, copy=True)
