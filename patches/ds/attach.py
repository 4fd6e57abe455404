"""The engine and its optimizer steps: channels are attached, and islands meet.

The seam is ``DeepSpeedEngine.__init__`` and not ``deepspeed.initialize``, because scripts import
``initialize`` by name, and PipelineEngine, HybridEngine and DualPipeV all call this constructor,
which gets the parsed config before any gradient hook exists. The seam of steps is
``_take_model_step`` and not ``step``, because the pipeline engine calls only the former.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from hybridcomp.channels import ATTRIBUTE, Channels
from hybridcomp.collectives.topology import machines, ranks_of
from hybridcomp.config import BLOCK, CompressionConfig, LedgerConfig, describe, load_config
from hybridcomp.dimensions import Dimension
from hybridcomp.job.devices import device_name
from hybridcomp.job.together import together
from hybridcomp.log import say, say_once
from hybridcomp.patches.common import early_engines, island_steps, publishing_steps
from hybridcomp.patches.ds import (
    island_unit,
    job_facts,
    record,
    settings,
    step_begins,
    step_messages,
    trained_set,
    weights,
)
from hybridcomp.patches.ds.job_facts import GATHERED, Z0_SCALER, loss_scale
from hybridcomp.patches.ds.layers import layer_scope, sparse_rows
from hybridcomp.patches.ds.offload import nvme
from hybridcomp.patches.ds.pipeline.pipe import PIPE, Pipe, close
from hybridcomp.patches.ds.requirement import REQUIREMENT
from hybridcomp.patches.ds.step_ends import at_the_end
from hybridcomp.patches.ds.zero import frozen, node_sums, secondary
from hybridcomp.patches.rules import ds_check, neox
from hybridcomp.patches.rules.planned import hold_to_machines, hold_to_plan
from hybridcomp.seams.arming import IN_PLACE
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam
from hybridcomp.session import process, wandb_run
from hybridcomp.session.agreement import agree_on
from hybridcomp.session.engine_session import ATTRIBUTE as SESSION
from hybridcomp.session.engine_session import WHEN_ATTACHED, EngineSession, session_of
from hybridcomp.session.reporter import Event, describe_run, numbers, report_interval

MODULE = "deepspeed.runtime.engine"

INIT = Seam(
    requirement=REQUIREMENT,
    module=MODULE,
    qualname="DeepSpeedEngine.__init__",
    parameters=(
        "self", "args", "model", "optimizer", "model_parameters", "training_data", "lr_scheduler",
        "mpu", "dist_init_required", "collate_fn", "config", "config_class", "mesh_device",
        "dont_change_device",
    ),
)  # fmt: skip
STEP = Seam(
    requirement=REQUIREMENT,
    module=MODULE,
    qualname="DeepSpeedEngine._take_model_step",
    parameters=(("self", "lr_kwargs"), ("self", "lr_kwargs", "block_eigenvalue")),
)
DESTROY = Seam(
    requirement=REQUIREMENT,
    module=MODULE,
    qualname="DeepSpeedEngine.destroy",
    parameters=("self",),
)

COVERS = ("sync",)
#: name of the operation in messages
WHAT = "the start of DeepSpeed's engine"
#: where residuals are saved, in messages
CHECKPOINTS = "DeepSpeed's checkpoints"


@around
def make_init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Read, check and agree on the block before the engine is built; attach it afterwards."""
    say_once(*job_facts.compile_locks())
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    notes: list[str] = []
    absent: frozenset[Dimension] = frozenset()
    with together(WHAT):  # upstream's own messages begin on all ranks or on none
        ds_json = settings.of_config(bound.arguments["config_class"])
        block = load_config(ds_json)
        if BLOCK not in ds_json:
            # without a block in the file, the process's block applies, so that no setting is
            # ignored; a copy, since a dimension that an engine cannot encode becomes native there
            shared = process.configured()
            block = None if shared is None else shared.model_copy()
        else:
            process.say_unused(block)
        agree_on(block, "deepspeed", **{record.ENVIRONMENT: record.asked()})
        process.forget_deleted()
        if block is not None:
            notes, absent = _plan(block, ds_json, bound.arguments)
            secondary.give_size(bound.arguments["config_class"], block)
        early_engines.register(self, attached=block is not None)
        given = island_unit.give(bound.arguments, block)
    try:
        with nvme.BLOCK_OF.inside(block):
            original(*bound.args, **bound.kwargs)
    except Exception as error:
        if advice := wandb_run.ended_by(error):
            say(advice)  # printed before the tracebacks of all ranks
        raise
    island_unit.finish(self, given)
    record.attach(self)  # before a pipeline's ``ReadAhead``, which may read micro-batches twice
    if block is None:
        lacks = f'DeepSpeed\'s configuration has no "{BLOCK}"'
        if BLOCK in ds_json:
            lacks = "that of DeepSpeed's configuration is not enabled"
        which = "this engine" if numbers() else "DeepSpeed's engine"  # others may have a block
        process.say_native(which, lacks)
        process.mark_no_block()
        _leave(self)
        describe_run(None)
    else:
        undo = ExitStack()
        with together(WHAT, undo.close):
            _attach(self, block, notes, absent, undo)


def _plan(
    block: CompressionConfig, ds_json: Any, given: Mapping[str, Any]
) -> tuple[list[str], frozenset[Dimension]]:
    """Check the block against the job; return messages, and the dimensions without traffic.

    Raises ConfigError when a key cannot act.
    """
    named = (given.get(name) for name in ("model", "mpu", "mesh_device"))
    job = job_facts.facts(*named)
    notes = ds_check.check(block, ds_json, **job, neox=neox.settings_of(given.get("args")))
    absent = ds_check.absent(ds_json, **job)
    return [*describe(block, absent), *notes], absent


def _attach(
    engine: Any,
    block: CompressionConfig,
    notes: list[str],
    absent: frozenset[Dimension],
    undo: ExitStack,
) -> None:
    """Begin the engine's session; tag engine, optimizer and parameters with its channels.

    ``undo`` receives calls that remove the model's tags and close the session.
    """
    hold_to_plan(block, job_facts.layout(engine))
    hold_to_machines(block, lambda: machines(device_name(engine.device)))
    session = EngineSession(
        Channels(block),
        engine.device,
        # a weak proxy, since the process keeps the session, which must not keep the engine alive
        interval=functools.partial(_interval, weakref.proxy(engine), block.ledger),
        write=functools.partial(_write, weakref.proxy(engine)),
        kept_in=CHECKPOINTS,
    )
    undo.callback(session.close)
    channels = session.channels
    channels.leave_out(absent)
    setattr(engine, SESSION, session)
    undo.callback(delattr, engine, SESSION)
    named = [
        (job_facts.unique_name(engine, name, parameter), parameter)
        for name, parameter in engine.module.named_parameters()
    ]
    for tagged in (engine, engine.optimizer, *(parameter for _, parameter in named)):
        if tagged is not None:
            undo.callback(_tag, tagged, getattr(tagged, ATTRIBUTE, None))
            _tag(tagged, channels)
    session.name_parameters(named)
    channels.common = job_facts.common_names(engine)
    for attached in WHEN_ATTACHED.get("deepspeed", ()):
        attached(engine, channels)
    pipe: Pipe | None = getattr(engine, PIPE, None)
    if pipe is not None and pipe.waitless is not None:
        from hybridcomp.patches.ds.pipeline.row import PipelineRow

        session.follow(PipelineRow(pipe.waitless))
    session.say(*notes)
    session.place(_data_parallel(engine))
    numel = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    sent = step_messages.sent(engine)
    for dtype, names in step_messages.dtypes(engine).items():
        own = {name: sent[name] for name in names if name in sent}
        session.measure(engine.seq_data_parallel_group, dtype, numel, own, only=names)
    step_messages.note_tied(engine, session)
    sparse_rows.follow(engine, channels, undo)
    if block.measured():
        step_begins.watch(engine, session)
    trained_set.watch(engine, session)
    if block.sync.acts:
        _meet(engine, session, undo)
    if block.publish is not None:
        # a weak proxy, since the session must not keep the engine alive
        publishing_steps.start(
            session, functools.partial(weights.weights_of, weakref.proxy(engine))
        )
    undo.callback(process.release, engine)
    process.share_session(engine, session)
    session.open_reporter()
    session.warn(dict.fromkeys(parameter.dtype for parameter in engine.module.parameters()))


def _leave(engine: Any) -> None:
    """Make an engine without a block send all of its model natively.

    Another engine, perhaps destroyed by now, may have had the model and tagged parts of it.
    """
    for tagged in (*engine.module.modules(), *engine.module.parameters()):
        _tag(tagged, None)
    layer_scope.tag(engine, None)
    secondary.leave(engine)
    frozen.leave(engine)


def _tag(tagged: Any, channels: Channels | None) -> None:
    """Make ``tagged`` send through ``channels``; None: natively."""
    if channels is not None:
        setattr(tagged, ATTRIBUTE, channels)
    else:
        vars(tagged).pop(ATTRIBUTE, None)


def _meet(engine: Any, session: EngineSession, undo: ExitStack) -> None:
    """Make the engine's islands meet, starting before the first pass with gradients."""
    ranks = ranks_of(engine.data_parallel_group)
    make = functools.partial(island_unit.masters_of, weakref.proxy(engine))
    island_steps.start(session, make, ranks, "leave mpu and mesh_device out")

    def begins(module: Any, *_: Any) -> None:
        if torch.is_grad_enabled():  # also in eval mode
            hook.remove()
            session.before_step()

    # before stage 3's own hook, which fetches parameters
    hook = engine.module.register_forward_pre_hook(begins, prepend=True)
    undo.callback(hook.remove)


def _data_parallel(engine: Any) -> set[tuple[int, ...]]:
    """Return the ranks of this rank's groups that reduce gradients or gather parameters."""
    groups = [engine.data_parallel_group, engine.seq_data_parallel_group]
    groups += (engine.expert_data_parallel_group or {}).values()
    groups += [getattr(p, "ds_process_group", None) for p in engine.module.parameters()]
    return {ranks_of(group) for group in groups if group is not None}


@around
def make_take_model_step(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Call the session's ``end_step`` after the step."""
    session = session_of(self)
    if session is None:
        original(self, *args, **kwargs)
        return
    session.loss_scale = loss_scale(self)
    session.before_step()
    node_sums.cross(self.optimizer)
    original(self, *args, **kwargs)
    overflow, scale = bool(getattr(self.optimizer, "overflow", False)), loss_scale(self)
    # this scaler shows by its scale whether it skipped the step
    if getattr(self, Z0_SCALER, None) is not None:
        overflow = scale < session.loss_scale
    end = functools.partial(session.end_step, overflow=overflow, loss_scale=scale)
    at_the_end(self, functools.partial(end, step=self.global_steps))


def _interval(engine: Any, ledger: LedgerConfig) -> int:
    return report_interval(ledger, engine.steps_per_print())


def _write(engine: Any, events: list[Event], step: int) -> None:
    """Write a report's figures to DeepSpeed's monitors on rank 0, or to W&B."""
    if dist.get_rank() or not events:
        return
    if engine.monitor.enabled:
        engine.monitor.write_events(
            [(name, value, engine.global_samples) for name, value in events]
        )
    if engine.monitor.wandb_monitor is None and "megatron.training" not in IN_PLACE:
        wandb_run.log(events, step)  # the W&B run of Hugging Face's Trainer, or of a script


@around
def make_destroy(original: Any, self: Any) -> None:
    """Close a destroyed engine's session, stop sharing its channels, and free its residuals.

    DeepSpeed's hooks keep an engine alive until it is destroyed, at stage 3 even afterwards.
    """
    original(self)
    close(self)
    process.release(self)
    island_unit.release(self)
    sparse_rows.leave(self)
    session = session_of(self)
    if session is not None:
        session.close()
        session.channels.residuals.clear()
        session.channels.node_sums.drop()
        step_begins.stop(session)
        vars(self).pop(GATHERED, None)
        _free_copies(self, session.channels)


def _free_copies(engine: Any, channels: Channels) -> None:
    """Free the kept weights of a destroyed engine.

    Python may destroy it a second time on collecting it, when a later engine has the model.
    """
    parameters = list(engine.module.parameters())
    for kept, leave in (
        (frozen.weights_of(parameters), frozen.leave),
        (secondary.copies_of(parameters), secondary.leave),
    ):
        if kept is not None and kept.channel is channels["zero"]:
            leave(engine)


PATCHES = (
    (INIT, make_init),
    (STEP, make_take_model_step),
    (DESTROY, make_destroy),
)
