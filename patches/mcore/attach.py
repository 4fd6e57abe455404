"""Start the session of a megatron-core job, and follow its optimizer steps: islands meet.

Megatron has no engine object, so its job uses the session of the process (``process``). The session
starts in ``initialize_model_parallel``, which every rank calls after torch.distributed is
initialized and before the first message. Steps are counted in the concrete ``step`` methods, since
``MegatronOptimizer.step`` is abstract; these call each other, so only the outermost call counts.
``load_state_dict`` is wrapped only to notice a restart: the user calls ``hybridcomp.load_state``.
``torch_steps`` handles jobs that use only an optimizer of torch.
"""

from __future__ import annotations

from typing import Any

import torch

from hybridcomp.collectives.topology import machines
from hybridcomp.job.devices import device_name
from hybridcomp.job.together import together
from hybridcomp.patches.common.scope import Scope
from hybridcomp.patches.mcore import groups, islands, torch_steps
from hybridcomp.patches.mcore.requirement import REQUIREMENT
from hybridcomp.patches.rules.planned import hold_to_machines, hold_to_plan
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam
from hybridcomp.session import process

process.GROUP_SIZES["megatron.core"] = groups.sizes

#: its signature is not checked: the arguments differ in every release and are passed through
INITIALIZE = Seam(
    requirement=REQUIREMENT,
    module="megatron.core.parallel_state",
    qualname="initialize_model_parallel",
    parameters=None,
)
STEPS = tuple(
    Seam(
        requirement=REQUIREMENT,
        module="megatron.core.optimizer.optimizer",
        qualname=f"{name}.step",
        parameters=("self",),
    )
    for name in ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer")
)


def _of_optimizers(method: str, *parameters: str) -> tuple[Seam, ...]:
    """Return the seams of a method that several Megatron optimizers define."""
    return tuple(
        Seam(
            requirement=REQUIREMENT,
            module=f"megatron.core.optimizer.{module}",
            qualname=f"{name}.{method}",
            parameters=("self", *parameters),
        )
        for module, name in (
            ("optimizer", "Float16OptimizerWithFloat16Params"),
            ("optimizer", "FP32Optimizer"),
            ("optimizer", "ChainedOptimizer"),
            ("distrib_optimizer", "DistributedOptimizer"),
        )
    )


ZEROS = _of_optimizers("zero_grad", "set_to_none")
LOADS = _of_optimizers("load_state_dict", "state_dict")
LACKS_STATE = (
    "WARNING: Megatron's optimizer was restored from a checkpoint, and hybridcomp was not: steps "
    "count from zero and error feedback has forgotten what was left out; call "
    "hybridcomp.save_state(folder) where Megatron saves, hybridcomp.load_state(folder) where it "
    "loads"
)


#: whether an outermost ``step`` or ``zero_grad`` is running
_STEPPING: Scope[bool] = Scope("mcore_step", False)


@around
def make_initialize_model_parallel(original: Any, *args: Any, **kwargs: Any) -> None:
    """Start the session once the process groups exist and before they carry a message."""
    original(*args, **kwargs)
    with together("the start of megatron-core", process.put_back()):
        process.forget_deleted()
        _start()


def _start() -> None:
    """Begin the process's session; place the job's messages in the hierarchy, and measure them."""
    session = process.own_session()
    if session is None:
        return
    torch_steps.follow(session)
    hold_to_plan(session.channels.config, groups.layout())
    device = session.device
    hold_to_machines(session.channels.config, lambda: machines(device_name(device)))
    if not islands.cuts(session):  # with islands the groups are made later
        session.place(groups.data_parallel())
        # gradients may be fp32 or bf16, not known yet: codecs that pay for bf16 pay for fp32
        session.measure(groups.replicas(), torch.bfloat16)


@around
def make_step(original: Any, self: Any) -> Any:
    """Call the session's ``end_step`` after the outermost step."""
    session = process.own_session()
    if session is None or _STEPPING.get():
        return original(self)
    torch_steps.leave(session)
    channels = session.channels
    feedback = any(channel.error_feedback for channel in channels)
    if feedback:  # only residuals depend on the scale, and reading it may wait for a GPU
        session.loss_scale = loss_scale(self)
    has_islands = islands.stepping(session, self)
    session.before_step()
    kept = feedback or channels.config.start_step or session.followers.stateful
    if session.forgetful and kept:
        session.say(LACKS_STATE)
    with _STEPPING.inside(True):
        result = original(self)
    skipped = (feedback or has_islands) and not bool(result[0])
    after = loss_scale(self) if feedback or skipped else session.loss_scale
    session.end_step(overflow=skipped, loss_scale=after)
    return result


def loss_scale(optimizer: Any) -> float:
    """Return the factor by which an optimizer scales the loss.

    Without a scaler this returns 1 without reading the scale: Megatron keeps it on the GPU, and the
    host would wait for it before launching the step.
    """
    scaled = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    if all(hasattr(one, "grad_scaler") and one.grad_scaler is None for one in scaled):
        return 1.0
    return float(optimizer.get_loss_scale())


@around
def make_zero_grad(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Start islands before the first forward pass, from the first island's weights."""
    session = process.own_session()
    if session is None or _STEPPING.get() or not islands.stepping(session, self):
        original(self, *args, **kwargs)
        return
    with _STEPPING.inside(True):
        session.before_step()
        original(self, *args, **kwargs)


@around
def make_load_state_dict(original: Any, self: Any, state_dict: Any) -> Any:
    """Record that a checkpoint was loaded: hybridcomp's state beside it must be loaded, too."""
    session = process.own_session()
    if session is not None:
        session.restored = True
    return original(self, state_dict)


COVERS = ("sync",)
PATCHES = (
    (INITIALIZE, make_initialize_model_parallel),
    *((seam, make_step) for seam in STEPS),
    *((seam, make_zero_grad) for seam in ZEROS),
    *((seam, make_load_state_dict) for seam in LOADS),
)
