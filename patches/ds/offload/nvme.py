"""Optimizer states and parameters that ZeRO-Infinity keeps on NVMe, dimension ``offload``.

Seams:

* ``AsyncIOBuilder`` in the three modules of swappers, from which they get the handle that reads and
  writes every file. Here they get a handle that encodes and checks files
  (``channels/offload/state_io``). It uses DeepSpeed's own handle if libaio is installed, else
  threads.
* ``_configure_tensor_swapping`` makes the swapper of an optimizer, ``_configure_aio`` the one of
  parameters, which ``zero.Init`` may make before there is an engine.
* ``_prepare_sub_group``, ``_release_sub_group`` and ``_post_step``: a rank whose file is damaged or
  cannot be written fails between collectives. The others learn of it at their next gate, before the
  collectives of ``_post_step``, so that all ranks raise together.
* ``_pre_step``: a parameter that could not be read is NaN until here, because other ranks wait for
  this rank in a gather; then all ranks raise, before the optimizer changes anything.
* ``reset_swap_buffers``: reads the files that ``load_checkpoint`` has copied.

Not covered: GDS, and gradients that stay in memory because they are shorter than a block of the
drive.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import Channels
from hybridcomp.channels.accounting.memory import size
from hybridcomp.channels.offload import state_files
from hybridcomp.channels.offload.state_files import StateFiles
from hybridcomp.channels.offload.state_io import StateHandle
from hybridcomp.config import BLOCK, CompressionConfig, load_config
from hybridcomp.errors import ConfigError, StateFileError
from hybridcomp.job.agreement import tell
from hybridcomp.job.together import together
from hybridcomp.log import say, say_once
from hybridcomp.patches.common.scope import Scope
from hybridcomp.patches.ds import settings
from hybridcomp.patches.ds.offload import saved_states
from hybridcomp.patches.ds.requirement import REQUIREMENT
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam
from hybridcomp.session import process

STAGE3 = "deepspeed.runtime.zero.stage3"
CLASS = "DeepSpeedZeroOptimizer_Stage3"
SWAPPERS = "deepspeed.runtime.swap_tensor"
OPTIMIZERS = ("partitioned_optimizer_swapper", "pipelined_optimizer_swapper")
PARAMETERS = "partitioned_param_swapper"
#: attribute of an optimizer: the files of its parameters
PARAMETER_FILES = "_hybridcomp_parameter_files"
WHAT = "optimizer states on NVMe"
#: bytes per parameter in files: master, two moments, gradient
STATES = 16

#: block of the engine being built; files of the swapper being created
BLOCK_OF: Scope[CompressionConfig | None] = Scope("nvme_block", None)
_MAKING: Scope[StateFiles | None] = Scope("nvme_files", None)


class _Builder:
    """Replace DeepSpeed's ``AsyncIOBuilder``."""

    def __init__(self, files: StateFiles, original: Any) -> None:
        self._files, self._original = files, original

    def load(self, verbose: bool = False) -> _Builder:
        return self

    def aio_handle(self, intra_op_parallelism: int = 1, **options: Any) -> StateHandle:
        options["intra_op_parallelism"] = intra_op_parallelism
        if self._original().is_compatible():
            inner = self._original().load().aio_handle(**options)
            return StateHandle(self._files, inner, intra_op_parallelism)
        say_once("offload states: libaio is not installed; threads of each rank read and write")
        return StateHandle(self._files)


def make_builder(original: Any) -> Callable[[], Any]:
    """Give swappers of an attached engine our handle, all others DeepSpeed's."""

    def builder() -> Any:
        files = _MAKING.get()
        return original() if files is None else _Builder(files, original)

    return builder


@around
def make_configure_states(
    original: Any, self: Any, offload_optimizer_config: Any, aio_config: Any
) -> None:
    """Create the optimizer's swapper with files that are encoded and checked."""
    files = _files(self, BLOCK_OF.get(), halves=functools.partial(_half, weakref.proxy(self)))
    with _MAKING.inside(files):
        original(self, offload_optimizer_config, aio_config)
    if files is not None:
        state_files.sweep(self.optimizer_swapper.swap_folder)


def _files(owner: Any, block: CompressionConfig | None, **settings: Any) -> StateFiles | None:
    """Return new files of ``owner``; None if ``states`` of ``block`` has no codec."""
    codec = None if block is None else block.codecs()["offload", "states"]
    if codec is None:
        return None
    files = StateFiles(codec, dist.get_rank(), **settings)
    setattr(owner, saved_states.FILES, files)
    return files


def _half(optimizer: Any, path: str) -> Tensor | None:
    """Return the bf16 parameters of the sub-group whose masters are in ``path``, or None."""
    name = os.path.basename(path).removesuffix(state_files.SWAPPED)
    for ids, flat in zip(
        optimizer.fp16_partitioned_groups_flat_id, optimizer.fp16_partitioned_groups_flat,
        strict=True,
    ):  # fmt: skip
        if name == f"{ids[0]}_{ids[-1]}":
            bf16 = flat is not None and str(flat.dtype) == "torch.bfloat16"
            return flat.data.view(-1) if bf16 else None
    return None


@around
def make_configure_parameters(original: Any, self: Any, ds_config: Any) -> None:
    """Create the swapper of parameters likewise, for ``zero.Init`` before the engine exists."""
    block = BLOCK_OF.get() or _block_of(ds_config)
    with _MAKING.inside(_files(self, block, poisons=True)):
        original(self, ds_config)


def _block_of(ds_config: Any) -> CompressionConfig | None:
    """Return the block of a job whose engine does not exist yet."""
    ds_json = settings.of_config(ds_config)
    return load_config(ds_json) if BLOCK in ds_json else process.configured()


@around
def make_moved(original: Any, self: Any, sub_group_id: int, timer_names: Any) -> None:
    """Make all ranks raise if one cannot read or write a sub-group."""
    files = saved_states.files_of(self)
    if files is None:
        original(self, sub_group_id, timer_names)
        return
    try:
        files.hold()
        saved_states.restore(self, files, sub_group_id)
        original(self, sub_group_id, timer_names)
        files.hold()
    except StateFileError as error:
        # the other ranks reach the next gate in _post_step
        with together(WHAT, error=StateFileError, votes=True):
            raise error


@around
def make_post_step(original: Any, self: Any, timer_names: Any) -> None:
    """Raise on all ranks if one has failed, before the collectives at the end of a step."""
    _hold(saved_states.files_of(self))
    original(self, timer_names)


@around
def make_pre_step(original: Any, self: Any) -> None:
    """Raise on all ranks if one could not read a parameter, before the optimizer's step."""
    _hold(getattr(self, PARAMETER_FILES, None))
    original(self)


def _hold(files: StateFiles | None) -> None:
    if files is not None:
        with together(WHAT, error=StateFileError, votes=True):
            files.hold()


@around
def make_reset(original: Any, self: Any) -> None:
    """Read the states of a checkpoint, on all ranks or none."""
    files = saved_states.files_of(self)
    if files is None:
        original(self)
        return
    with together(WHAT, error=StateFileError):
        saved_states.take_over(self, files)
        original(self)
        files.hold()


def attached(engine: Any, channels: Channels) -> None:
    """Count the engine's files in its ledger; raise if they failed or will not fit."""
    optimizer = engine.optimizer
    files = saved_states.files_of(optimizer)
    if files is None:
        return
    channels.keeps_files = True
    every = [files]
    swapper = next((p.nvme_swapper for p in engine.module.parameters()
                    if getattr(p, "nvme_swapper", None) is not None), None)  # fmt: skip
    parameter_files = getattr(swapper, saved_states.FILES, None)
    if parameter_files is not None:
        setattr(optimizer, PARAMETER_FILES, parameter_files)
        every.append(parameter_files)
    for one in every:
        one.ledger = channels.ledger
        one.hold()
    _hold_to_disk(optimizer)


def _hold_to_disk(optimizer: Any) -> None:
    """Raise ConfigError on all ranks if the states of a node's ranks do not fit on its disk."""
    numels = optimizer.fp16_partitioned_groups_flat_numel
    moved = [n for i, n in enumerate(numels) if optimizer._swappable_optimizer_subgroup(i)]
    if not any(rank["moved"] for rank in tell({"moved": len(moved)}, what=WHAT)):
        least = optimizer.optimizer_swapper.min_aio_bytes
        say(f"offload states: nothing goes to a file, as no sub-group has {least} bytes, or "
            "memory.host_gb keeps all")  # fmt: skip
        return
    folder = optimizer.optimizer_swapper.swap_folder
    there = sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file())
    # a file is complete under another name before it replaces the previous one
    needed = max(0, STATES * (sum(moved) + max(moved, default=0)) - there)
    disk = [os.uname().nodename, os.stat(folder).st_dev]
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    said = tell({"disk": disk, "needed": needed, "free": free}, what=WHAT)
    for statement in said:
        ours = [rank for rank in said if rank["disk"] == statement["disk"]]
        all_needed, least = sum(rank["needed"] for rank in ours), min(r["free"] for r in ours)
        if all_needed > least:
            raise ConfigError(
                "zero_optimization.offload_optimizer.nvme_path", os.path.dirname(folder),
                f"{len(ours)} ranks of {statement['disk'][0]} need up to {size(all_needed)} more "
                f"for optimizer states and gradients, and {size(least)} are free; make room, or "
                "name another disk",
            )  # fmt: skip


def _stage3(method: str, *parameters: str) -> Seam:
    return Seam(REQUIREMENT, STAGE3, f"{CLASS}.{method}", parameters)


def _builder(module: str) -> tuple[Seam, Callable[..., Any]]:
    return Seam(REQUIREMENT, f"{SWAPPERS}.{module}", "AsyncIOBuilder", None), make_builder


COVERS = ("offload",)
ATTACHED = attached
PATCHES = (
    *map(_builder, (*OPTIMIZERS, PARAMETERS)),
    (
        _stage3("_configure_tensor_swapping", "self", "offload_optimizer_config", "aio_config"),
        make_configure_states,
    ),
    (
        Seam(
            REQUIREMENT, f"{SWAPPERS}.{PARAMETERS}",
            "AsyncPartitionedParameterSwapper._configure_aio", ("self", "ds_config"),
        ),
        make_configure_parameters,
    ),
    (_stage3("_prepare_sub_group", "self", "sub_group_id", "timer_names"), make_moved),
    (_stage3("_release_sub_group", "self", "sub_group_id", "timer_names"), make_moved),
    (_stage3("_pre_step", "self"), make_pre_step),
    (_stage3("_post_step", "self", "timer_names"), make_post_step),
    (_stage3("reset_swap_buffers", "self"), make_reset),
)  # fmt: skip
