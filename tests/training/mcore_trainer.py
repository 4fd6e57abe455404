"""Tiny trainings with megatron-core on several ranks, for tests of its seams.

Call ``run(jobs)`` on every rank (``tests.ranks.run_ranks``) with many jobs: importing megatron-core
takes longer than most trainings.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.sync import islands
from tests.ranks import forget_inherited
from tests.stand_ins.link_clock import clock
from tests.training.in_turn import Ledger, digest, ledger_of

VOCAB, WIDTH, LENGTH, MICRO_BATCH, HEADS = 32, 32, 16, 2, 4


#: arguments with which the groups of this process were created last
_layout: dict[str, Any] = {}


@dataclass(frozen=True)
class Job:
    """One training. ``block`` is the compression block; None runs unpatched."""

    layers: int = 2
    tp: int = 1
    pp: int = 1
    virtual: int | None = None  # stages per pipeline rank
    ep: int = 1
    cp: int = 1
    experts: int | None = None
    dispatcher: str = "alltoall"
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    overlap: bool = False  # reduction, gathers and sends overlap with computation
    batch_p2p: bool = True
    bf16: bool = False
    loss_scale: float | None = None  # initial scale: the job is in fp16
    recompute: bool = False
    average: bool = False  # average_in_collective
    optimizer: str = "adam"
    linear: bool = False  # makes Adam plain SGD, which the distributed optimizer does not accept
    clip: float = 1.0
    order: str = "tp-cp-ep-dp-pp"  # order of ranks
    tied: bool = False  # embedding and output layer share a weight
    steps: int = 50
    micro_batches: int = 2
    lr: float = 4e-3
    seed: int = 0
    restart: int | None = None  # save, drop and reload everything before this step
    folder: str = ""  # the restart's checkpoint
    raw: bool = False  # a lossless fixed-size codec on every dimension of the block
    #: seconds of native and of encoded messages, as measured by ``"when": "auto"``
    link: tuple[float, float] | None = None
    block: dict[str, Any] | None = None


@dataclass
class Outcome:
    """A rank's results."""

    losses: list[float]  # on the last stage only
    parameters: dict[str, str]  # digest of the bytes, by name
    ledger: Ledger
    residuals: float = 0.0


def run(jobs: Sequence[Job]) -> list[Outcome | str]:
    """Run every job in turn; return hybridcomp's errors as text."""
    prepare()
    return [_run(job) for job in jobs]


def run_on_kept_groups(jobs: Sequence[Job]) -> list[Outcome | str]:
    """Do the same, and leave Megatron's groups to the next job of this process: a layout's groups
    take longer than its steps.
    """
    prepare()
    return [_run(job, keeps_groups=True) for job in jobs]


def prepare() -> None:
    """Import megatron-core, with stand-ins for packages that this machine lacks."""
    from tests.stand_ins import megatron_on_cpu

    shim = _device().type == "cpu"
    if shim:
        megatron_on_cpu.install()
    known = "megatron.core.optimizer" in sys.modules
    import megatron.core.distributed
    import megatron.core.optimizer  # noqa: F401

    if not known:
        forget_inherited()  # drop inherited objects as well

    if shim:
        megatron_on_cpu.patch()
    else:
        megatron_on_cpu.patch_without_engine()


def _device() -> torch.device:
    """Return the models' device: ``DS_ACCELERATOR``, as in the tests of DeepSpeed."""
    return torch.device(os.environ.get("DS_ACCELERATOR", "cpu"))


def _run(job: Job, keeps_groups: bool = False) -> Outcome | str:
    from hybridcomp.errors import HybridcompError

    link = nullcontext() if job.link is None else clock(*job.link)
    try:
        with link, armed(job, keeps_groups):
            return _train(job)
    except HybridcompError as error:
        return f"{type(error).__name__}: {error}"


@contextmanager
def armed(job: Job, keeps_groups: bool = False) -> Iterator[None]:
    """Apply the patches with the block of ``job`` during a training, or revert them without one.

    They stay for the next job: reverting and applying them takes as long as some steps.
    ``keeps_groups``: whether Megatron's groups stay, too; the next job then uses them if its layout
    is the same.
    """
    import hybridcomp
    from hybridcomp.session import process

    torch.manual_seed(1 + job.seed)
    if job.block is None:
        hybridcomp.uninstall()
    else:
        hybridcomp.install()
        # a report resets the ledger
        process.configure({"ledger": {"every": 1_000_000}, **job.block})
    try:
        yield
    finally:
        if not keeps_groups:
            _forget_layout()
        process.configure(None)


def _forget_layout() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    # 0.13 does not reset them: a middle stage would use the previous job's group
    parallel_state._EMBEDDING_GLOBAL_RANKS = None
    parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None
    destroy_groups()


def destroy_groups() -> None:
    """Destroy every group but the world: Megatron only drops them, and each has polling threads."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    islands._made.clear()  # whose groups are among them


def initialize(job: Job) -> None:
    """Create Megatron's groups, or take those that a job of the same layout has left."""
    from megatron.core import parallel_state, tensor_parallel

    layout: dict[str, Any] = {
        "tensor_model_parallel_size": job.tp,
        "pipeline_model_parallel_size": job.pp,
        "virtual_pipeline_model_parallel_size": job.virtual,
        "expert_model_parallel_size": job.ep,
        "context_parallel_size": job.cp,
        "expert_tensor_parallel_size": 1 if job.ep > 1 else None,
        "order": job.order,
    }
    if layout != _layout and parallel_state.model_parallel_is_initialized():
        _forget_layout()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(**layout)
        _layout.clear()
        _layout.update(layout)
    tensor_parallel.model_parallel_cuda_manual_seed(1 + job.seed)


def _train(job: Job) -> Outcome:
    from hybridcomp.session import process

    initialize(job)
    _adjust(job)
    chunks, optimizer = build(job)
    losses: list[float] = []
    for step in range(job.steps):
        if step == job.restart:
            chunks, optimizer = _restart(job, chunks, optimizer)
        losses += train_step(job, chunks, optimizer, step)
    if job.overlap and job.distributed_optimizer:
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)
    channels = process.current() if job.block is not None else None
    residuals = 0.0 if channels is None else channels.residuals.norm()
    return Outcome(losses, _digests(chunks), ledger_of(channels), residuals)


def train_step(job: Job, chunks: Sequence[Any], optimizer: Any, step: int) -> list[float]:
    """Run a step on this rank's micro-batches; return the loss, on the last stage."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    found = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[batches(job, step) for _ in chunks] if job.virtual else batches(job, step),
        model=chunks if job.virtual else chunks[0],
        num_microbatches=job.micro_batches,
        seq_length=LENGTH,
        micro_batch_size=MICRO_BATCH,
        forward_only=False,
    )
    success, _, _ = optimizer.step()
    assert success or job.loss_scale is not None
    return [sum(float(part["loss"]) for part in found) / len(found)] if found else []


def _restart(job: Job, chunks: Sequence[Any], optimizer: Any) -> tuple[list[Any], Any]:
    """Restart the job: save, create new objects, load."""
    import hybridcomp
    from hybridcomp.session import process

    model = [copy.deepcopy(chunk.module.state_dict()) for chunk in chunks]
    adam = copy.deepcopy(optimizer.state_dict())
    if job.folder:
        hybridcomp.save_state(job.folder)
    process.configure({"ledger": {"every": 1_000_000}, **(job.block or {})})
    torch.manual_seed(99)
    chunks, optimizer = build(job)
    for chunk, state in zip(chunks, model, strict=True):
        chunk.module.load_state_dict(state)
    optimizer.load_state_dict(adam)
    if job.folder:
        hybridcomp.load_state(job.folder)
    return chunks, optimizer


def _adjust(job: Job) -> None:
    """Apply settings of a job that a block cannot express."""
    from hybridcomp.config.policy import Policy
    from hybridcomp.session import process
    from tests.stand_ins.plain_codecs import Identity

    channels = process.current() if job.block is not None else None
    if channels is not None and job.raw:
        policy = channels.policy
        codecs = {key: Identity() if codec else None for key, codec in policy.codecs.items()}
        channels.policy = Policy(codecs, policy.min_bytes, policy.start_step)


def _digests(chunks: Sequence[Any]) -> dict[str, str]:
    return {
        f"{index}.{name}": digest(parameter)
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.module.named_parameters()
    }


def build(job: Job) -> tuple[list[Any], Any]:
    """Build this rank's model chunks, wrapped, and their optimizer."""
    config = model_config(job)
    models = [_model(job, config, index) for index in range(job.virtual or 1)]
    return wrap(job, config, models)


def wrap(job: Job, config: Any, models: Sequence[Any], **groups: Any) -> tuple[list[Any], Any]:
    """Wrap ``models`` and make their optimizer; ``groups`` replaces the islands' groups."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=job.distributed_optimizer,
        overlap_grad_reduce=job.overlap,
        overlap_param_gather=job.overlap and job.distributed_optimizer,
        grad_reduce_in_fp32=config.params_dtype != torch.float32,
        average_in_collective=job.average,
        bucket_size=4000 if job.overlap else None,
    )
    groups = groups or _groups(job)
    chunks = [DistributedDataParallel(config, ddp_config, model, **groups) for model in models]
    config.finalize_model_grads_func = finalize_model_grads
    scaled = job.loss_scale is not None
    if job.overlap:
        config.no_sync_func = (
            [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync
        )
    settings: dict[str, Any] = {
        "optimizer": job.optimizer, "lr": job.lr, "weight_decay": 0.0, "clip_grad": job.clip,
        "sgd_momentum": 0.0, "bf16": job.bf16, "fp16": scaled,
        "params_dtype": config.params_dtype, "use_distributed_optimizer": job.distributed_optimizer,
        "overlap_param_gather": job.overlap and job.distributed_optimizer,
    }  # fmt: skip
    if scaled:
        settings |= {"initial_loss_scale": job.loss_scale, "hysteresis": 1}
    if job.linear:
        settings |= {"adam_beta1": 0.0, "adam_beta2": 0.0, "adam_eps": 1e6, "lr": 1e6 * job.lr}
    known = {field.name for field in fields(OptimizerConfig)}  # 0.13 has no overlap_param_gather
    settings = {name: value for name, value in settings.items() if name in known}
    gloo = {"use_gloo_process_groups": False} if groups else {}
    optimizer = get_megatron_optimizer(OptimizerConfig(**settings), chunks, **gloo, **groups)
    if scaled:
        config.grad_scale_func = optimizer.scale_loss
    return chunks, optimizer


def _groups(job: Job) -> dict[str, Any]:
    """Return the groups of a block's islands, if any."""
    import hybridcomp

    if "sync" not in (job.block or {}):
        return {}
    return {"pg_collection": hybridcomp.island_pg_collection()}


def model_config(job: Job) -> Any:
    """Return a job's TransformerConfig."""
    from megatron.core.transformer import TransformerConfig

    moe: dict[str, Any] = {}
    if job.experts:
        moe = {
            "num_moe_experts": job.experts, "moe_router_topk": 2, "moe_grouped_gemm": False,
            "moe_token_dispatcher_type": job.dispatcher, "moe_router_load_balancing_type": "none",
            "add_bias_linear": False,
        }  # fmt: skip
    if job.recompute:
        moe |= {
            "recompute_granularity": "full", "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }  # fmt: skip
    dtype = torch.bfloat16 if job.bf16 else torch.float32 if job.loss_scale is None else torch.half
    return TransformerConfig(
        num_layers=job.layers, hidden_size=WIDTH, num_attention_heads=HEADS,
        use_cpu_initialization=True,
        tensor_model_parallel_size=job.tp, pipeline_model_parallel_size=job.pp,
        virtual_pipeline_model_parallel_size=job.virtual, expert_model_parallel_size=job.ep,
        sequence_parallel=job.sequence_parallel, bf16=job.bf16, fp16=job.loss_scale is not None,
        params_dtype=dtype, pipeline_dtype=dtype,
        hidden_dropout=0.0, attention_dropout=0.0, gradient_accumulation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False,
        batch_p2p_comm=job.batch_p2p, overlap_p2p_comm=job.overlap and not job.batch_p2p,
        **moe,
    )  # fmt: skip


def _model(job: Job, config: Any, index: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module

    stage = {"ignore_virtual": False, "vp_stage": index} if job.virtual else {}
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=job.experts),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        share_embeddings_and_output_weights=job.tied,
        **({"vp_stage": index} if job.virtual else {}),
    ).to(_device())
    for parameter in model.parameters():
        tensor_parallel_defaults(parameter)
    return model if config.params_dtype == torch.float32 else Float16Module(config, model)


def tensor_parallel_defaults(parameter: Tensor) -> None:
    """Set the attributes that Megatron's training loop sets on every parameter."""
    from megatron.core import tensor_parallel

    tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)


def batches(job: Job, step: int) -> Iterator[Tensor]:
    """Return noisy sequences that count modulo VOCAB; a different share for each data rank."""
    from megatron.core import parallel_state

    data_rank = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(1000 * (step + 1000 * job.seed) + data_rank)
    while True:
        start = torch.randint(VOCAB, (MICRO_BATCH, 1), generator=generator)
        stride = torch.randint(1, 4, (MICRO_BATCH, 1), generator=generator)
        noise = torch.randint(2, (MICRO_BATCH, LENGTH + 1), generator=generator)
        yield (start + stride * torch.arange(LENGTH + 1) + noise) % VOCAB


def forward_step(iterator: Iterator[Tensor], model: Any) -> tuple[Tensor, Callable[..., Any]]:
    device = _device()
    tokens = next(iterator).to(device)
    mask = torch.ones(1, 1, LENGTH, LENGTH, device=device).triu(1).bool()
    positions = torch.arange(LENGTH, device=device).expand(len(tokens), LENGTH)
    output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous())

    def loss_of(per_token: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = per_token.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return output, loss_of
