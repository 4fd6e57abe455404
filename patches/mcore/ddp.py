"""Gradient reduction and parameter gather of megatron-core's DistributedDataParallel.

``start_grad_sync`` and ``start_param_sync`` are not replaced, because their work before they
communicate (scaling, NaN checks, copies of higher-precision gradients) changes with every release.
They open torch's ``_coalescing_manager`` and call three collectives inside it. The manager is
the handle on which upstream waits, and it drops handles of collectives that torch does not know:
training would go on before the gradients have arrived. So the seam replaces the manager along with
the collectives. Our manager collects the calls, runs native ones in torch's manager and then the
encoded ones, and its ``wait()`` waits for all of them.

A custom ``dist_reduce_scatter_func`` (``reduce_scatter_with_fp32_accumulation``) would bypass the
seams; ``check`` refuses it. Compressed reductions sum in fp32 anyway, like that function.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import native_nbytes
from hybridcomp.patches.common.optimizer_steps import NO_PASS, backward_pass
from hybridcomp.patches.common.routes import make_torch
from hybridcomp.patches.common.scope import Scope
from hybridcomp.patches.mcore import check, islands, step_messages, weights
from hybridcomp.patches.mcore.ddp_batch import BucketBatch, CollectedCall
from hybridcomp.patches.mcore.groups import coordinates, sizes
from hybridcomp.patches.mcore.requirement import REQUIREMENT
from hybridcomp.patches.rules import mcore
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam
from hybridcomp.session import process
from hybridcomp.session.process import current

MODULE = "megatron.core.distributed.param_and_grad_buffer"
WRAPPER = "megatron.core.distributed.distributed_data_parallel"

INIT = Seam(
    requirement=REQUIREMENT,
    module=WRAPPER,
    qualname="DistributedDataParallel.__init__",
    parameters=(
        (
            "self", "config", "ddp_config", "module", "disable_bucketing", "grad_comm_pgs",
            "model_comm_pgs",
        ),
        ("self", "config", "ddp_config", "module", "disable_bucketing", "pg_collection"),
        (
            "self", "config", "ddp_config", "module", "disable_bucketing", "pg_collection",
            "full_param_layout",
        ),
    ),
)  # fmt: skip
START_GRAD_SYNC = Seam(
    requirement=REQUIREMENT,
    module=MODULE,
    qualname="_ParamAndGradBucketGroup.start_grad_sync",
    parameters=(("self",), ("self", "force_all_reduce")),
)
MANAGER = Seam(
    requirement=REQUIREMENT,
    module=MODULE,
    qualname="_coalescing_manager",
    parameters=("group", "device", "async_ops"),
)
GATHER = Seam(
    requirement=REQUIREMENT,
    module=MODULE,
    qualname="dist_all_gather_func",
    parameters=("output_tensor", "input_tensor", "group", "async_op"),
)
SCATTER = Seam(
    requirement=REQUIREMENT,
    module=MODULE,
    qualname="dist_reduce_scatter_func",
    parameters=("output", "input", "op", "group", "async_op"),
)
CHAINED_INIT = Seam(
    requirement=REQUIREMENT,
    module="megatron.core.optimizer.optimizer",
    qualname="ChainedOptimizer.__init__",
    parameters=("self", "chained_optimizers"),
)

#: the bucket group that is reducing, which knows the parameters in a buffer
_GROUP: Scope[Any] = Scope("mcore_bucket_group", None)
#: the collectives collected so far
_BATCH: Scope[BucketBatch | None] = Scope("mcore_batch", None)


@around
def make_init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Check the job before the buffers exist, and name the parameters afterwards."""
    session = process.session()
    if session is None:
        original(self, *args, **kwargs)
        return
    given = inspect.signature(original).bind(self, *args, **kwargs).arguments
    check.check(
        session.channels, self, given["config"], given["ddp_config"], given["module"],
        given.get("pg_collection"),
    )  # fmt: skip
    original(self, *args, **kwargs)
    model, chunk = given["module"], session.models
    named = {_name(chunk, name, p): p for name, p in model.named_parameters()}
    session.name_parameters(named.items(), _common(named))
    step_messages.tell(session, self)
    weights.note(session, self)
    islands.follow(session, self)


def _name(chunk: int, name: str, parameter: Tensor) -> str:
    """Return a name unique in the job, equal on all ranks that reduce this gradient together."""
    shared = getattr(parameter, "allreduce", True)  # False for the parameters of an expert
    where = coordinates()
    return f"{where.rpartition('.')[0] if shared else where}.chunk{chunk}.{name}"


def _common(named: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the names of vectors that every tensor rank holds and reduces on its own.

    Norms under sequence parallelism are left out: upstream sums their gradients over the tensor
    ranks later.
    """
    if sizes().get("tp", 1) < 2:
        return frozenset()
    return frozenset(
        name
        for name, parameter in named.items()
        if parameter.dim() < 2
        and not getattr(parameter, "tensor_model_parallel", False)
        and not getattr(parameter, "sequence_parallel", False)
    )


def make_start_grad_sync(original: Callable[..., None]) -> Callable[..., None]:
    """Publish the bucket group, which knows the parameters in a buffer."""
    first: list[weakref.ref[Any]] = []

    @functools.wraps(original)
    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        if not first or first[0]() is None:
            first[:] = [weakref.ref(self)]
        if first[0]() is self and backward_pass() == NO_PASS and (found := current()) is not None:
            found.note_pass()  # all reductions run after the step's passes
        with _GROUP.inside(self):
            original(self, *args, **kwargs)

    return start_grad_sync


@around
@contextmanager
def make_coalescing_manager(
    original: Any, group: Any = None, device: torch.device | None = None, async_ops: bool = False
) -> Iterator[Any]:
    """Collect the collectives that upstream calls inside, and launch them at the end."""
    if current() is None or group is None:
        with original(group, device, async_ops) as coalesced:
            yield coalesced
        return
    batch = BucketBatch(group, async_ops, _GROUP.get())
    with _BATCH.inside(batch):
        yield batch
    batch.launch(original, device)


def _collect(call: CollectedCall) -> BucketBatch | None:
    """Add a call to the open batch and return the batch, its handle; None if none is open."""
    batch = _BATCH.get()
    if batch is not None:
        batch.calls.append(call)
    return batch


@around
def make_all_reduce(
    original: Any,
    tensor: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Collect gradient all-reduces: without a distributed optimizer, or between its instances."""
    native = functools.partial(original, tensor, op=op, group=group, async_op=async_op)
    batch = _collect(CollectedCall("all_reduce", native, tensor, tensor, op))
    return native() if batch is None else batch


@around
def make_reduce_scatter_tensor(
    original: Any,
    output: Tensor,
    input: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Collect the distributed optimizer's reduce-scatters; ``output`` is a view of ``input``."""
    native = functools.partial(original, output, input, op=op, group=group, async_op=async_op)
    batch = _collect(CollectedCall("reduce_scatter", native, output, input, op))
    return native() if batch is None else batch


@around
def make_all_gather_into_tensor(
    original: Any,
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Collect the distributed optimizer's gathers of parameters."""
    native = functools.partial(
        original, output_tensor, input_tensor, group=group, async_op=async_op
    )
    sum_op = dist.ReduceOp.SUM  # a gather has no reduction
    batch = _collect(CollectedCall("all_gather", native, output_tensor, input_tensor, sum_op))
    return native() if batch is None else batch


@around
def make_chained_init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Check the block against the optimizers, and count weights that a layer-wise one gathers.

    A layer-wise optimizer is a ChainedOptimizer; from 0.18 on it may gather whole buffers, which we
    encode.
    """
    original(self, *args, **kwargs)
    gather, channels = getattr(self, "allgather_params", None), current()
    if channels is None:
        return
    for one in self.chained_optimizers:
        check.check_optimizer(channels, getattr(one, "config", None))
    if gather is None or getattr(self, "use_buffer_param_sync", False):
        return
    facts = SimpleNamespace(use_layer_wise_distributed_optimizer=True)
    job = mcore.MegatronJob(facts, None, "DistributedDataParallel", sizes())
    check.hold(channels, mcore.LAYER_WISE, job)

    def allgather_params() -> None:
        for name in ("dp_cp", "expt_dp"):
            if shares := getattr(self, f"{name}_params_list"):  # weights of each rank
                own = shares[dist.get_rank(getattr(self.pg_collection, name))]
                numel, dtype = sum(one.numel() for one in own), shares[0][0].dtype
                raw = native_nbytes.all_gather_nbytes(numel, dtype, len(shares))
                channels["zero"].count_native(raw)
        gather()

    self.allgather_params = allgather_params


@around
def _gather_list(
    original: Any,
    tensor_list: Sequence[Tensor],
    tensor: Tensor,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Count gathers of unequal lists (layer-wise optimizer) and leave them native."""
    channels = current()
    if channels is not None:
        raw = native_nbytes.all_gather_nbytes(tensor.numel(), tensor.dtype, len(tensor_list))
        channels["zero"].count_native(raw)
    return original(tensor_list, tensor, group=group, async_op=async_op)


COVERS = ("dp", "zero")
PATCHES = (
    (INIT, make_init),
    (START_GRAD_SYNC, make_start_grad_sync),
    (MANAGER, make_coalescing_manager),
    (
        Seam(REQUIREMENT, MODULE, "torch", None),
        make_torch({"all_reduce": make_all_reduce, "all_gather": _gather_list}),
    ),
    (CHAINED_INIT, make_chained_init),
    (GATHER, make_all_gather_into_tensor),
    (SCATTER, make_reduce_scatter_tensor),
)
