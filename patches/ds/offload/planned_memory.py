"""Search settings of ZeRO 3's gathers on the step that DeepSpeed has recorded: key ``memory``.

Seams, of ``PartitionedParameterCoordinator``: ``fetch_sub_module`` and ``release_sub_module`` are
counted, and while DeepSpeed records its trace their order is kept. ``reset_step`` begins a pass:
once the trace is complete, settings are searched on it (``autotune.zero3_moves``) and set; if the
trace was discarded, the file's settings are restored. Each pass is compared with the prediction.

``_swappable_optimizer_subgroup`` decides which states go to files: with ``host_gb`` as many of the
first sub-groups as fit stay in memory. Every step visits all sub-groups in the same order, so a
fixed choice is optimal.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hybridcomp.autotune.zero3_moves import (
    Event,
    GatherChoice,
    Knobs,
    Moves,
    Trace,
    choose,
    fewest,
    simulate,
)
from hybridcomp.channels import Channels
from hybridcomp.config import BLOCK
from hybridcomp.config.memory_policy import MemoryPolicy
from hybridcomp.errors import ConfigError
from hybridcomp.job.agreement import tell
from hybridcomp.log import say
from hybridcomp.patches.ds.offload.nvme import BLOCK_OF, STATES
from hybridcomp.patches.ds.requirement import REQUIREMENT
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam

MODULE = "deepspeed.runtime.zero.partitioned_param_coordinator"
CLASS = "PartitionedParameterCoordinator"
#: prefix of DeepSpeed's private attributes
PRIVATE = f"_{CLASS}__"
#: attributes of a coordinator, in the order of ``Knobs``
SETTINGS = ("prefetch_bucket_sz", "max_n_available_params", "max_reuse_dist_in_numel")
#: attribute of a coordinator: its plan
ATTRIBUTE = "_hybridcomp_memory"
#: attribute of an optimizer: sub-groups whose states stay in memory
HOST = "_hybridcomp_on_host"
GB = 1e9
#: share of a device that stays free if the block sets no limit
SPARE = 0.05
#: fraction by which a pass may deviate from the prediction
CLOSE = 0.01


@dataclass
class PlannedMemory:
    """Plan of one engine's gathers.

    Attributes:
        policy: the block's settings.
        itemsize: bytes of a gathered element.
        device: device of the gathers.
        written: settings of the file.
        events: events of the pass being recorded, by module.
        gathered, peak, count: counts of this pass: gathered elements, most at once, and modules
            begun.
        choice: the chosen settings, and the elements that a pass then gathers.
        trace: trace on which the settings were searched.
        external: parameters in ``trace`` that stay until the optimizer's step.
        is_fresh: whether no parameter of ``external`` was available when this pass began.
    """

    policy: MemoryPolicy
    itemsize: int
    device: torch.device
    written: Knobs
    events: list[tuple[Any, bool, bool]] = field(default_factory=list)
    gathered: int = 0
    peak: int = 0
    count: int = 0
    choice: GatherChoice | None = None
    trace: Trace | None = None
    external: list[Any] = field(default_factory=list)
    is_fresh: bool = True
    has_differed: bool = False

    def begin_pass(self) -> None:
        """Reset the counts."""
        self.events, self.gathered, self.peak, self.count = [], 0, 0, 0
        self.is_fresh = all(p.ds_status.name == "NOT_AVAILABLE" for p in self.external)

    def compare(self) -> None:
        """Print once if the finished pass gathered other elements than predicted."""
        if self.choice is None or self.trace is None or self.count != len(self.trace.order):
            return  # only a forward pass, or the first pass
        planned, found = self.choice.moves, Moves(self.gathered, self.peak)
        far = [abs(a - b) > CLOSE * a for a, b in zip(planned, found, strict=True)]
        if any(far) and self.is_fresh and not self.has_differed:
            self.has_differed = True
            say(f"memory: a pass gathered {found.gathered:.3g} elements, {found.peak:.3g} at once, "
                f"where {planned.gathered:.3g} and {planned.peak:.3g} were computed")  # fmt: skip

    def plan(self, coordinator: Any) -> None:
        """Search settings on the completed trace, and set them; a collective."""
        self.trace, params = trace_of(self.events)
        trace = self.trace
        self.external = [params[place] for place in trace.external]
        resident = sum(trace.sizes[p] for p in trace.persistent)
        room = self._room(resident * self.itemsize) // self.itemsize
        limit = min(rank["room"] for rank in tell({"room": int(room)}, what="planned memory"))
        self.choice = choose(trace, limit)
        before = simulate(trace, self.written)
        if self.choice is None:
            least = simulate(trace, Knobs(0, 0, 0)).peak
            say(f"memory: planned: {limit:.3g} elements fit beside everything else, and a module "
                f"needs {least:.3g} at once: the settings stay as written")  # fmt: skip
            return
        knobs, moves = self.choice
        apply(coordinator, knobs)
        whole, bound = max(1, trace.moved), fewest(trace, limit)
        least_told = "" if bound is None else f"least {bound / whole:.3g}, "
        nbytes = (moves.peak + resident) * self.itemsize
        say(f"memory: planned: prefetch {knobs.prefetch:.3g}, live {knobs.live:.3g}, reuse "
            f"{knobs.reuse:.3g}: {moves.gathered / whole:.3g} x the parameters a pass "
            f"({least_told}settings as written {before.gathered / whole:.3g}), {nbytes / GB:.3g} "
            f"of {(limit + resident) * self.itemsize / GB:.3g} GB of gathered ones")  # fmt: skip

    def _room(self, resident: int) -> float:
        """Return the bytes that gathered parameters may take beside ``resident`` ones."""
        asked = None if self.policy.device_gb is None else GB * self.policy.device_gb
        if self.device.type != "cuda":
            assert asked is not None, "checked when the engine was attached"
            return asked - resident
        if asked is None:
            free = torch.cuda.mem_get_info(self.device)[0]
            asked = (1 - SPARE) * (free + torch.cuda.memory_reserved(self.device))
        beside = torch.cuda.max_memory_allocated(self.device) - self.peak * self.itemsize
        return asked - beside


def trace_of(events: list[tuple[Any, bool, bool]]) -> tuple[Trace, list[Any]]:
    """Return the pass of ``events`` and its parameters, as DeepSpeed sees them, in order."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
    from deepspeed.utils import z3_leaf_module

    modules = {module.ds_id: module for module, _, _ in events}
    numbers = {ds_id: number for number, ds_id in enumerate(modules)}
    places: dict[int, int] = {}
    params: list[Any] = []

    def of(module: Any, recurse: bool) -> tuple[int, ...]:
        own = sorted(set(iter_params(module, recurse=recurse)), key=lambda p: int(p.ds_id))
        for param in own:
            if param.ds_id not in places:
                places[param.ds_id] = len(params)
                params.append(param)
        return tuple(places[param.ds_id] for param in own)

    leaves = [bool(z3_leaf_module(module)) for module in modules.values()]
    shallow, deep = ([of(one, way) for one in modules.values()] for way in (False, True))
    uses = [(shallow, deep)[leaf][number] for number, leaf in enumerate(leaves)]
    trace = Trace(
        tuple(Event(numbers[module.ds_id], *kind) for module, *kind in events),
        uses,
        [int(param.ds_numel) for param in params],
        frozenset(place for place, param in enumerate(params) if param.ds_persist),
        frozenset(place for place, param in enumerate(params) if param.is_external_param),
        frozenset(number for number, leaf in enumerate(leaves) if leaf),
        shallow,
        deep,
    )
    return trace, params


def knobs_of(coordinator: Any) -> Knobs:
    """Return the settings of a coordinator."""
    return Knobs(*(int(getattr(coordinator, PRIVATE + name)) for name in SETTINGS))


def apply(coordinator: Any, knobs: Knobs) -> None:
    """Set the settings, and clear the decisions that DeepSpeed has cached."""
    for name, value in zip(SETTINGS, knobs, strict=True):
        setattr(coordinator, PRIVATE + name, value)
    decide = getattr(type(coordinator), f"{PRIVATE}params_to_release")
    while not hasattr(decide, "cache_clear"):  # a profiler range wraps it
        decide = next(
            cell.cell_contents for cell in decide.__closure__ if callable(cell.cell_contents)
        )
    decide.cache_clear()


@around
def make_fetch(original: Any, self: Any, current_submodule: Any, forward: bool) -> None:
    """Count what a module gathers, and record the order while DeepSpeed records its trace."""
    plan: PlannedMemory | None = getattr(self, ATTRIBUTE, None)
    if plan is None:
        original(self, current_submodule, forward)
        return
    before = getattr(self, f"{PRIVATE}n_available_params")
    original(self, current_submodule, forward)
    after = int(getattr(self, f"{PRIVATE}n_available_params"))
    plan.gathered += after - before
    plan.peak, plan.count = max(plan.peak, after), plan.count + 1
    if self.is_record_trace():
        plan.events.append((current_submodule, True, forward))


@around
def make_release(original: Any, self: Any, submodule: Any, forward: bool = False) -> None:
    """Record the order in which modules end."""
    plan: PlannedMemory | None = getattr(self, ATTRIBUTE, None)
    if plan is not None and self.is_record_trace():
        plan.events.append((submodule, False, forward))
    original(self, submodule, forward)


@around
def make_reset(original: Any, self: Any) -> None:
    """Plan once the trace is complete, and compare each pass with the plan."""
    plan: PlannedMemory | None = getattr(self, ATTRIBUTE, None)
    if plan is None:
        original(self)
        return
    had = self.is_complete_trace()
    if had:
        plan.compare()
    elif plan.choice is not None:
        apply(self, plan.written)
        plan.choice = None
        say("memory: planned: the passes are others than were recorded; the settings are those "
            "of the file until a pass is recorded again")  # fmt: skip
    original(self)
    if self.is_complete_trace() and not had:
        plan.plan(self)
    plan.begin_pass()


@around
def make_swappable(original: Callable[..., bool], self: Any, sub_group_id: int) -> bool:
    """Keep the states of as many first sub-groups in memory as ``host_gb`` allows."""
    if not original(self, sub_group_id):
        return False
    if not hasattr(self, HOST):  # first called while the engine is being built
        setattr(self, HOST, _on_host(self))
    return sub_group_id not in getattr(self, HOST)


def _on_host(optimizer: Any) -> frozenset[int]:
    block = BLOCK_OF.get()
    if block is None or block.memory.host_gb is None:
        return frozenset()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    room, found = GB * block.memory.host_gb / ranks, []
    for index, numel in enumerate(optimizer.fp16_partitioned_groups_flat_numel):
        room -= STATES * numel
        if room < 0:
            break
        found.append(index)
    return frozenset(found)


def attached(engine: Any, channels: Channels) -> None:
    """Plan the engine's gathers if the block asks for it."""
    policy = channels.config.memory
    if not policy.planned:
        return
    if engine.device.type == "cpu" and policy.device_gb is None:
        todo = "a CPU does not say what gathered parameters may take; write a number"
        raise ConfigError(f"{BLOCK}.memory.device_gb", None, todo)
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    # of several dtypes the widest, so that what is gathered fits
    itemsize = max(parameter.itemsize for parameter in engine.module.parameters())
    plan = PlannedMemory(policy, itemsize, engine.device, knobs_of(coordinator))
    setattr(coordinator, ATTRIBUTE, plan)
    kept: frozenset[int] = getattr(engine.optimizer, HOST, frozenset())
    if policy.host_gb is not None:
        count = len(engine.optimizer.fp16_partitioned_groups_flat_numel)
        say(f"memory: planned: the states of {len(kept)} of {count} sub-groups stay in memory")


def _seam(method: str, *parameters: str) -> Seam:
    return Seam(REQUIREMENT, MODULE, f"{CLASS}.{method}", parameters)


ATTACHED = attached
PATCHES = (
    (_seam("fetch_sub_module", "self", "current_submodule", "forward"), make_fetch),
    (_seam("release_sub_module", "self", "submodule", "forward"), make_release),
    (_seam("reset_step", "self"), make_reset),
    (
        Seam(
            REQUIREMENT, "deepspeed.runtime.zero.stage3",
            "DeepSpeedZeroOptimizer_Stage3._swappable_optimizer_subgroup",
            ("self", "sub_group_id"),
        ),
        make_swappable,
    ),
)  # fmt: skip
