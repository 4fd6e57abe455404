"""Run GPT-NeoX's training loop, from a checkout, on gloo ranks.

Call ``run`` on new ranks. All jobs of a launch share the tensor and pipeline groups, which GPT-NeoX
creates once per process.
"""

from __future__ import annotations

import copy
import os
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.training.in_turn import Ledger, digest, ledger_of

LENGTH, MICRO_BATCH, WIDTH, LAYERS = 32, 2, 64, 2


@dataclass(frozen=True)
class Job:
    """Settings of a training."""

    tp: int = 1
    pp: int = 1
    steps: int = 6
    micro_batches: int = 2
    #: the compression block; None: hybridcomp is not installed
    block: dict[str, Any] | None = None
    #: replace every codec of the block with a copying one
    raw: bool = False
    #: further GPT-NeoX settings
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """A job's results on one rank."""

    losses: list[float]
    digests: dict[str, str]
    ledger: Ledger
    #: whether this stage's first layer got the causal attention mask in every pass
    masks: list[bool]
    #: marks of the tensors sent to the next stage: whether they may be compressed
    marks: list[bool]


def settings_of(job: Job, data: str) -> dict[str, Any]:
    """Return a job's GPT-NeoX configuration."""
    return {
        "data_path": data, "data_impl": "mmap", "split": "1,0,0",
        "tokenizer_type": "CharLevelTokenizer",
        "global_num_gpus": dist.get_world_size(), "distributed_backend": "gloo",
        "pipe_parallel_size": job.pp, "model_parallel_size": job.tp,
        "num_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": 4,
        "seq_length": LENGTH, "max_position_embeddings": LENGTH,
        "norm": "layernorm", "pos_emb": "rotary", "no_weight_tying": True,
        "gpt_j_residual": False, "output_layer_parallelism": "column",
        "init_method": "small_init", "output_layer_init_method": "wang_init",
        "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "scaled_upper_triang_masked_softmax_fusion": False, "bias_gelu_fusion": False,
        "rope_fusion": False, "layernorm_fusion": False,
        "optimizer": {"type": "Adam", "params": {"lr": 2e-3, "betas": [0.9, 0.95], "eps": 1e-8}},
        "min_lr": 2e-4, "zero_optimization": {"stage": 1}, "precision": "fp32",
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": job.micro_batches,
        "gradient_clipping": 1.0, "weight_decay": 0.1,
        "train_iters": job.steps, "lr_decay_iters": 400, "lr_decay_style": "cosine",
        "warmup": 0.02, "eval_interval": 10000, "eval_iters": 0,
        "log_interval": 1000, "steps_per_print": 10000,
        "use_wandb": False, "num_workers": 0,
        **job.settings,
        **({"deepspeed_extra_args": {"compression": job.block}} if job.block else {}),
    }  # fmt: skip


def write_data(folder: str) -> str:
    """Write a small learnable dataset; return its prefix."""
    from gpt.indexed import IndexedWriter

    prefix = Path(folder, "counting")
    generator = random.Random(0)
    with IndexedWriter(prefix) as writer:
        for _ in range(64):
            start, stride = generator.randrange(64), generator.randrange(1, 4)
            tokens = [32 + (start + stride * i + generator.randrange(2)) % 64 for i in range(512)]
            writer.add(np.array(tokens, dtype=np.uint16))
    return str(prefix)


def run(jobs: list[Job], home: str, folder: str) -> list[Outcome]:
    """Train every job on this rank, one after the other."""
    sys.path.insert(0, home)
    os.chdir(folder)
    from hybridcomp.patches.neox import cpu_shim

    cpu_shim.install()
    import deepspeed

    deepspeed.init_distributed("gloo")
    import megatron.training

    cpu_shim.patch()
    data = str(Path(folder, "counting"))
    return [_train(megatron.training, job, data) for job in jobs]


def _train(training: Any, job: Job, data: str) -> Outcome:
    from megatron.neox_arguments import NeoXArgs

    import hybridcomp
    from hybridcomp.channels import channels_of
    from hybridcomp.session import process

    losses: list[float] = []
    engines: list[Any] = []
    masks: list[bool] = []
    step, setup = training.train_step, training.setup_model_and_optimizer

    def train_step(*args: Any, **kwargs: Any) -> Any:
        found = step(*args, **kwargs)
        losses.append(float(found[0]["lm_loss"]))
        return found

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        found = setup(*args, **kwargs)
        engines.append(found[0])
        _adjust(found[0], job, masks)
        return found

    if job.block is not None:
        hybridcomp.install()
    training.train_step, training.setup_model_and_optimizer = train_step, setup_model_and_optimizer
    try:
        neox_args = NeoXArgs.from_dict(copy.deepcopy(settings_of(job, data)))
        neox_args.configure_distributed_args()
        neox_args.build_tokenizer()
        neox_args.initialize_tensorboard_writer()
        training.pretrain(neox_args=neox_args)
    finally:
        training.train_step, training.setup_model_and_optimizer = step, setup
        hybridcomp.uninstall()
    (engine,) = engines
    digests = {name: digest(parameter) for name, parameter in engine.module.named_parameters()}
    outcome = Outcome(losses, digests, ledger_of(channels_of(engine)), masks, _marks(engine))
    engine.destroy()
    process.configure(None)  # this engine may survive in a cycle, and keep sharing its session
    return outcome


def _adjust(engine: Any, job: Job, masks: list[bool]) -> None:
    """Set codecs that a block cannot express; record received masks."""
    from hybridcomp.channels import channels_of
    from hybridcomp.config.policy import Policy
    from tests.stand_ins.plain_codecs import Identity

    channels = channels_of(engine)
    if channels is not None and job.raw:
        policy = channels.policy
        codecs = {key: Identity() if codec else None for key, codec in policy.codecs.items()}
        channels.policy = Policy(codecs, policy.min_bytes, policy.start_step)
    causal = torch.ones(LENGTH, LENGTH).triu(1).bool()

    def look(module: Any, given: Any) -> None:
        _, mask = given[0]
        masks.append(mask.dtype == torch.bool and bool((mask == causal).all()))

    layers = [m for m in engine.module.modules() if type(m).__name__.endswith("LayerPipe")]
    layers[0].register_forward_pre_hook(look)


def _marks(engine: Any) -> list[bool]:
    from hybridcomp.patches.ds.pipeline.pipe import PIPE

    pipe = getattr(engine, PIPE, None)
    if pipe is None or pipe.outgoing.agreed is None:
        return []
    return [agreed.values for agreed in pipe.outgoing.agreed.activations]
