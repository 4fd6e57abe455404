"""Pipeline sends of megatron-core: 1F1B, interleaved and overlapped.

Seams: ``_batched_p2p_ops`` and ``_p2p_ops``. They send all activations and have had the same
signature since 0.12; messages with shapes use other functions. ``torch.distributed.isend`` must not
be replaced, because ``P2POp`` compares it. ``_communicate`` is wrapped only to read the
configuration, which the other two do not get.

Messages to the next stage are ``forward``, those to the previous stage ``backward``. Tensors are
encoded when they are posted, since upstream empties a tensor that was sent, and decoded in
``wait()``.

Codecs of variable size: only the sender knows the length, but upstream posts both sides at once and
in overlapped schedules computes before it waits. Waiting for a size in between could deadlock, as
another rank may be waiting for this one. So there is one message: a header with the length, then
the payload, received into a buffer for the longest payload. gloo delivers a message that is shorter
than its receive; NCCL does not, and there such a codec is refused.

``"scatter_gather": true`` (Narayanan et al. 2021, section 4.1): without sequence parallelism all
tensor ranks hold the same message, so each sends a part of it, and the receivers all-gather the
payloads over their tensor group. The ledger counts the all-gathers as native bytes of ``tp``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch.distributed as dist
from packaging.version import Version
from torch import Tensor

from hybridcomp.channels import Posted
from hybridcomp.config import BLOCK
from hybridcomp.config.error_messages import Shown
from hybridcomp.dimensions import Direction
from hybridcomp.errors import ConfigError
from hybridcomp.patches.common.scope import Scope
from hybridcomp.patches.mcore.pipeline_message import post
from hybridcomp.patches.mcore.requirement import REQUIREMENT
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam
from hybridcomp.session.process import current

MODULE = "megatron.core.pipeline_parallel.p2p_communication"
OPERATIONS = tuple(
    Seam(
        requirement=REQUIREMENT,
        module=MODULE,
        qualname=name,
        parameters=(
            "tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next",
            "group", "prev_pipeline_rank", "next_pipeline_rank",
        ),
    )
    for name in ("_batched_p2p_ops", "_p2p_ops")
)  # fmt: skip
#: direction of each request, in upstream's order; tensors are passed as ``tensor_send_prev``, ...
WAYS: dict[str, Direction] = {
    "send_prev": "backward", "recv_prev": "forward", "send_next": "forward",
    "recv_next": "backward",
}  # fmt: skip

#: upstream's configuration of the operations that are running
_CONFIG: Scope[Any] = Scope("mcore_pipeline", None)


def communicate_seam() -> Seam:
    """Return the seam of ``_communicate``: a function of the module in 0.13, then a method."""
    try:
        old = Version(version("megatron-core")) < Version("0.14")
    except PackageNotFoundError:
        old = False
    shared = ("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next", "tensor_shape")
    return Seam(
        requirement=REQUIREMENT,
        module=MODULE,
        qualname="_communicate" if old else "P2PCommunicator._communicate",
        parameters=(
            (*shared, "config", "wait_on_reqs") if old else ("self", *shared, "wait_on_reqs")
        ),
    )


@around
def make_communicate(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Publish the configuration for the operations inside."""
    with _CONFIG.inside(kwargs["config"] if "config" in kwargs else args[0].config):
        return original(*args, **kwargs)


@around
def make_operations(original: Callable[..., Any], /, **kwargs: Any) -> Any:
    """Replace tensors by payloads in upstream's calls, and decode in ``wait()``."""
    channels = current()
    if channels is None:
        return original(**kwargs)
    group, config = kwargs["group"], _CONFIG.get()
    if original.__name__ == "_batched_p2p_ops":
        _refuse_two_stages(config, group)
    posted: dict[str, Posted] = {}
    payloads: dict[str, Tensor | None] = {}
    for key, way in WAYS.items():
        tensor = payloads[f"tensor_{key}"] = kwargs[f"tensor_{key}"]
        if tensor is None:
            continue
        ends = dist.get_rank(), int(kwargs[f"{key[5:]}_pipeline_rank"])
        between = ends if key.startswith("send") else ends[::-1]
        message = post(channels, tensor, group, way, config, between)
        if message is not None:
            posted[key], payloads[f"tensor_{key}"] = message, message.message
    if not posted:
        return original(**kwargs)
    return _with_decoding(original(**{**kwargs, **payloads}), payloads, posted)


class Request:
    """Upstream request whose ``wait()`` also decodes."""

    def __init__(self, request: Any, sent: list[Posted], received: list[Posted]) -> None:
        self._request, self._sent, self._received = request, sent, received

    def wait(self) -> None:
        """Wait, then decode the received payloads; harmless when called twice."""
        parts = [*self._sent, *self._received]
        with parts[0].meter.waiting() if parts else nullcontext():
            self._request.wait()
        for part in parts:
            part.done()
        self._sent, self._received = [], []

    def is_completed(self) -> bool:
        """Return whether the request is complete and nothing is left to decode."""
        return not self._received and bool(self._request.is_completed())


def _with_decoding(
    requests: Any, payloads: dict[str, Tensor | None], posted: dict[str, Posted]
) -> Any:
    def request(upstream: Any, keys: list[str]) -> Request:
        sent = [posted[key] for key in keys if key in posted and key.startswith("send")]
        received = [posted[key] for key in keys if key in posted and key.startswith("recv")]
        return Request(upstream, sent, received)

    if isinstance(requests, dict):
        return {key: request(upstream, [key]) for key, upstream in requests.items()}
    keys = [key for key in WAYS if payloads[f"tensor_{key}"] is not None]
    if len(requests) == len(keys):  # gloo: one request for each operation
        return [request(u, [key]) for key, u in zip(keys, requests, strict=True)]
    # NCCL: one request for the whole batch
    return [request(u, keys if u is requests[-1] else []) for u in requests]


def _refuse_two_stages(config: Any, group: Any) -> None:
    virtual = getattr(config, "virtual_pipeline_model_parallel_size", None)
    if virtual is not None and virtual > 1 and dist.get_world_size(group) == 2:
        raise ConfigError(
            f"{BLOCK}.pp",
            Shown("batch_p2p_comm with interleaving on two pipeline stages"),
            "previous and next stage are the same rank, so that upstream's batches pair up "
            "wrongly and training learns nothing; set batch_p2p_comm to False",
        )


COVERS = ("pp",)
PATCHES = (
    (communicate_seam(), make_communicate),
    *((seam, make_operations) for seam in OPERATIONS),
)
