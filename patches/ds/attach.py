"""Attaching channels to a DeepSpeed engine, and following its steps and checkpoints.

``DeepSpeedEngine.__init__`` and not ``deepspeed.initialize``: scripts import ``initialize`` by
name, and PipelineEngine, HybridEngine and DualPipeV all come through this constructor, which is
handed the parsed config before any hook exists. ``_take_model_step`` and not ``step``: the pipeline
engine calls only the former.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridcomp import presence, process
from hybridcomp.agreement import agree, versions
from hybridcomp.channels import ATTRIBUTE, NAME, Channels, channels_of, checkpoint
from hybridcomp.config import BLOCK, CompressionConfig, load_config
from hybridcomp.patches import modules_of
from hybridcomp.patches.ds import (
    check,
    exact_weights,
    job_facts,
    layer_scope,
    record,
    step_messages,
)
from hybridcomp.patches.neox import rules
from hybridcomp.patching import Seam
from hybridcomp.reporter import Reporter, describe_run, report_interval
from hybridcomp.topology import ranks_of

REQUIREMENT = "deepspeed >= 0.19, < 0.20"
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
SAVE = Seam(
    requirement=REQUIREMENT,
    module=MODULE,
    qualname="DeepSpeedEngine.save_checkpoint",
    parameters=(
        "self", "save_dir", "tag", "client_state", "save_latest", "exclude_frozen_parameters",
    ),
)  # fmt: skip
SAVE_16BIT = Seam(
    requirement=REQUIREMENT,
    module=MODULE,
    qualname="DeepSpeedEngine.save_16bit_model",
    parameters=("self", "save_dir", "save_filename", "exclude_frozen_parameters"),
)
LOAD = Seam(
    requirement=REQUIREMENT,
    module=MODULE,
    qualname="DeepSpeedEngine.load_checkpoint",
    parameters=(
        "self", "load_dir", "tag", "load_module_strict", "load_optimizer_states",
        "load_lr_scheduler_states", "load_module_only", "custom_load_fn",
    ),
)  # fmt: skip

DESTROY = Seam(
    requirement=REQUIREMENT,
    module=MODULE,
    qualname="DeepSpeedEngine.destroy",
    parameters=("self",),
)

#: attribute of an attached engine: its Reporter
REPORTER = "_hybridcomp_reporter"


def make_init(original: Callable[..., None]) -> Callable[..., None]:
    """Read, check and agree on the block before the engine is built; attach after."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        ds_json = bound.arguments["config_class"]._param_dict
        block = load_config(ds_json)
        if BLOCK not in ds_json:
            # a block of the process stands in where the file has none: no setting goes unheard
            block = process.configured()
        agree(_statement(block))
        presence.announce()
        notes: list[str] = []
        if block is not None:
            notes = _plan(block, ds_json, bound.arguments)
        original(self, *args, **kwargs)
        if block is None:
            process.decline()
            layer_scope.tag(self, None)
            describe_run(None)
        else:
            _attach(self, block, notes)
        record.attach(self)

    return __init__


def _statement(block: CompressionConfig | None) -> dict[str, Any]:
    settings = {"compression": None} if block is None else block.flat()
    return {**settings, record.ENVIRONMENT: record.asked(), **versions("deepspeed")}


def _plan(block: CompressionConfig, ds_json: Any, given: Mapping[str, Any]) -> list[str]:
    """Check the block against the job; what rank 0 tells the user about it.

    Raises ConfigError when a key cannot act.
    """
    named = (given.get(name) for name in ("model", "mpu", "mesh_device"))
    job = job_facts.facts(*named)
    neox = rules.settings_of(given.get("args"))
    notes = check.check(block, ds_json, **job, neox=neox)
    return [*block.describe(check.absent(ds_json, **job)), *notes]


def _attach(engine: Any, block: CompressionConfig, notes: list[str]) -> None:
    """Tag engine, optimizer and parameters; tell the user what will happen."""
    channels = Channels(block)
    setattr(engine, ATTRIBUTE, channels)
    if engine.optimizer is not None:
        setattr(engine.optimizer, ATTRIBUTE, channels)
    for name, parameter in engine.module.named_parameters():
        setattr(parameter, ATTRIBUTE, channels)
        unique = job_facts.unique_name(engine, name, parameter)
        setattr(parameter, NAME, unique)
        channels.factors.learn(unique, parameter.shape)
    channels.common = job_facts.common_names(engine)
    for module in modules_of("deepspeed"):
        if hasattr(module, "ATTACHED"):
            module.ATTACHED(engine, channels)
    notes += channels.place(_data_parallel(engine))
    dtype = next((parameter.dtype for parameter in engine.module.parameters()), torch.float32)
    numel = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    group, sent = engine.seq_data_parallel_group, step_messages.sent(engine)
    notes += channels.weigh(group, dtype, engine.device, numel, sent)
    step_messages.watch(engine, channels)
    process.lend(engine, channels)
    describe_run(block)
    jsonl = block.ledger.jsonl
    setattr(engine, REPORTER, Reporter(channels, Path(jsonl) if jsonl else None, engine.device))
    if dist.get_rank() == 0:
        dtypes = {parameter.dtype for parameter in engine.module.parameters()}
        for text in (*notes, *(note for dtype in dtypes for note in block.notes(dtype))):
            print(f"[hybridcomp] {text}", flush=True)


def _data_parallel(engine: Any) -> set[tuple[int, ...]]:
    """Ranks of the groups of this rank that reduce gradients or gather parameters."""
    groups = [engine.data_parallel_group, engine.seq_data_parallel_group]
    groups += (engine.expert_data_parallel_group or {}).values()
    groups += [getattr(p, "ds_process_group", None) for p in engine.module.parameters()]
    return {ranks_of(group) for group in groups if group is not None}


def make_take_model_step(original: Callable[..., None]) -> Callable[..., None]:
    """After the step: residuals follow the loss scale, the ledger reports."""

    @functools.wraps(original)
    def _take_model_step(self: Any, *args: Any, **kwargs: Any) -> None:
        channels = channels_of(self)
        if channels is None:
            original(self, *args, **kwargs)
            return
        before, sampled = loss_scale(self), channels.sampling
        original(self, *args, **kwargs)
        channels.step = self.global_steps
        if getattr(self.optimizer, "overflow", False):
            channels.residuals.drop()
        elif (after := loss_scale(self)) != before:
            channels.residuals.scale(after / before)
        checkpoint.say(channels.close_step(sampled, self.device))
        every = report_interval(channels.config.ledger, self.steps_per_print())
        if every and self.global_steps % every == 0:
            _report(self)

    return _take_model_step


def loss_scale(engine: Any) -> float:
    """The factor on the gradients now.

    1.0 where ``engine.backward`` does not scale: the fp16 optimizers of stage 0 have a loss scale,
    but 0.19 multiplies the loss only for a ZeROOptimizer or an autocast scaler.
    """
    from deepspeed.runtime.base_optimizer import ZeROOptimizer

    scaler = getattr(engine, "torch_autocast_z0_gradscaler", None)
    if scaler is not None:
        return float(scaler.get_scale())
    if isinstance(engine.optimizer, ZeROOptimizer):
        return float(getattr(engine.optimizer, "loss_scale", 1.0) or 1.0)
    return 1.0


def _report(engine: Any) -> None:
    events = getattr(engine, REPORTER).report(engine.global_steps)
    if dist.get_rank() == 0 and events and engine.monitor.enabled:
        engine.monitor.write_events(
            [(name, value, engine.global_samples) for name, value in events]
        )


def make_save_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Save exact weights, and residuals of this rank before upstream moves its ``latest`` file."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        channels = channels_of(self)
        if channels is not None:
            bound = signature.bind(self, *args, **kwargs)
            tag = bound.arguments.get("tag") or f"global_step{self.global_steps}"
            folder = Path(bound.arguments["save_dir"]) / str(tag)
            if checkpoint.needed(channels):
                checkpoint.save(folder, channels, loss_scale(self))
            exact_weights.save(folder, self, channels)
        with exact_weights.exact_parameters(self, channels):
            return original(self, *args, **kwargs)

    return save_checkpoint


def make_save_16bit_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Save the exact weights."""

    @functools.wraps(original)
    def save_16bit_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        with exact_weights.exact_parameters(self, channels_of(self)):
            return original(self, *args, **kwargs)

    return save_16bit_model


def make_load_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Take over step and residuals with the optimizer's state."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        channels = channels_of(self)
        if channels is None:
            return original(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        load_dir, tag = bound.arguments["load_dir"], bound.arguments["tag"]
        if tag is None and (latest := Path(load_dir, "latest")).is_file():
            tag = latest.read_text().strip()
        exact_weights.forget(self)
        result = original(self, *args, **kwargs)
        channels.step = self.global_steps
        channels.residuals.drop()
        whole = bound.arguments["load_optimizer_states"] and not bound.arguments["load_module_only"]
        if result[0] is not None and tag is not None and whole:
            folder = Path(load_dir) / str(tag)
            checkpoint.load(folder, channels, loss_scale(self))
            exact_weights.resume(folder, self, channels)
        return result

    return load_checkpoint


def make_destroy(original: Callable[..., None]) -> Callable[..., None]:
    """A destroyed engine lends its channels no more."""

    @functools.wraps(original)
    def destroy(self: Any) -> None:
        original(self)
        process.release(self)

    return destroy


PATCHES = (
    (INIT, make_init),
    (STEP, make_take_model_step),
    (SAVE, make_save_checkpoint),
    (SAVE_16BIT, make_save_16bit_model),
    (LOAD, make_load_checkpoint),
    (DESTROY, make_destroy),
)
