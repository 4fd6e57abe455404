"""Tiny trainings with sharded layers or sequences: AutoTP and Ulysses.

Call ``run(jobs)`` on every rank. The model uses Hugging Face's names of Llama, but not the package.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from tests.stand_ins.link_clock import clock
from tests.training.in_turn import Ledger, digest, ledger_of, start_deepspeed

VOCAB, WIDTH, LENGTH, BATCH, LAYERS = 64, 32, 16, 2, 2

LINEARS: list[dict[str, Any]] = [
    {"patterns": [r".*\.(o|down)_proj\.weight$"], "partition_type": "row"},
    {"patterns": [r".*\.([qkv]|gate|up)_proj\.weight$"], "partition_type": "column"},
]
#: a head with gathered logits, deepspeed >= 0.19.8
HEAD = {"patterns": [r".*lm_head\.weight$"], "partition_type": "column", "gather_output": True}


@dataclass(frozen=True)
class Job:
    """One training. ``block`` is the compression block, None runs unpatched."""

    tp: int = 1
    sp: int = 1
    alst: bool = False  # sequence parallel by ALST's attention
    heads: int = 4
    head: bool = False  # shard the LM head, gather its logits
    overlap: bool = False  # tp_overlap_comm
    checkpoint: bool = False
    stage: int = 0
    bf16: bool = False
    steps: int = 50
    accumulation: int = 1
    ds_json: dict[str, Any] = field(default_factory=dict)
    #: seconds of native and of encoded messages, as measured by ``"when": "auto"``
    link: tuple[float, float] | None = None
    block: dict[str, Any] | None = None


@dataclass
class Outcome:
    """A rank's results."""

    losses: list[float]
    digests: dict[str, str]  # digests of the bytes of this rank's parameters, by name
    ledger: Ledger
    names: dict[str, str]  # parameter name -> name of its residuals


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention, [batch, length, heads, dim] in and out."""
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


class Local(nn.Module):
    """Ulysses' local attention: whole sequences of some heads."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key, value).contiguous()


def alst_core(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
    """Return causal attention, [batch, heads, length, dim] in, as Hugging Face calls it."""
    found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return found.transpose(1, 2), None


class Attention(nn.Module):
    """Attention with Llama's names; Ulysses' exchange surrounds its core."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.dim = 8
        width = job.heads * self.dim
        self.q_proj = nn.Linear(WIDTH, width, bias=False)
        self.k_proj = nn.Linear(WIDTH, width, bias=False)
        self.v_proj = nn.Linear(WIDTH, width, bias=False)
        self.o_proj = nn.Linear(width, WIDTH, bias=False)
        self.outside: list[Any] = []  # ALST's attention is not a submodule
        if job.alst:
            self.outside.append(alst_attention(job, self.dim))
        elif job.sp > 1:
            from deepspeed.sequence.layer import DistributedAttention

            self.core = DistributedAttention(Local(), sequence_group(), scatter_idx=2, gather_idx=1)

    def forward(self, hidden: Tensor) -> Tensor:
        size = (*hidden.shape[:2], -1, self.dim)
        heads = [proj(hidden).view(size) for proj in (self.q_proj, self.k_proj, self.v_proj)]
        if self.outside:
            first = dist.get_rank(sequence_group()) * hidden.shape[1]
            places = torch.arange(first, first + hidden.shape[1], device=hidden.device)
            places = places.expand(hidden.shape[0], -1)
            turned = [part.transpose(1, 2) for part in heads]
            found = self.outside[0](self, *turned, None, position_ids=places.contiguous())[0]
        elif hasattr(self, "core"):
            found = self.core(*heads, 0)
        else:
            found = attend(*heads)
        result: Tensor = self.o_proj(found.reshape(*hidden.shape[:2], -1))
        return result


class Mlp(nn.Module):
    """MLP with Llama's names."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return result


class Block(nn.Module):
    """A transformer layer."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(WIDTH)
        self.self_attn = Attention(job)
        self.post_attention_layernorm = nn.LayerNorm(WIDTH)
        self.mlp = Mlp()

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden))
        result: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return result


class Model(nn.Module):
    """A small causal language model; its loss is over the given tokens."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block(job) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.checkpoint = job.checkpoint

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embed_tokens(ids)
        for layer in self.layers:
            if self.checkpoint:
                hidden = torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=True)
            else:
                hidden = layer(hidden)
        logits = self.lm_head(self.norm(hidden)).float()
        return F.cross_entropy(logits.view(-1, VOCAB), targets.reshape(-1))


def sequence_group() -> Any:
    """Return the sequence-parallel group: all ranks."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None:
        parallel_state_sp.initialize_sequence_parallel(dist.get_world_size())
    return parallel_state_sp.get_sequence_parallel_group()


def alst_attention(job: Job, dim: int) -> Any:
    """Wrap our attention in ALST's, which only checks Hugging Face's version."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    group = sequence_group()
    with mock.patch("importlib.metadata.version", return_value="4.60.0"):
        return UlyssesSPAttentionHF(
            alst_core, BATCH, job.heads, dim, job.heads, LAYERS, group, seq_length_is_variable=True
        )


def ds_config(job: Job) -> dict[str, Any]:
    """The ds_config of a job."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": job.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "torch_adam": True}},
        "zero_optimization": {"stage": job.stage, "reduce_bucket_size": 3000},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        "steps_per_print": 10_000,
    }
    if job.tp > 1:
        specs = [*LINEARS, HEAD] if job.head else LINEARS
        config["tensor_parallel"] = {
            "autotp_size": job.tp,
            "tp_overlap_comm": job.overlap,
            "partition_config": {"use_default_specs": False, "layer_specs": specs},
        }
    if job.bf16:
        config["bf16"] = {"enabled": True}
    if job.block is not None:
        config["compression"] = job.block
    return {**config, **job.ds_json}


def batch(job: Job, step: int, micro: int) -> tuple[Tensor, Tensor]:
    """Return ids and their successors: a walk with a step that depends on the row."""
    replica = dist.get_rank() // max(job.tp, job.sp)
    generator = torch.Generator().manual_seed(100_003 * replica + 1009 * micro + step)
    start = torch.randint(VOCAB, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
    walk = (start + stride * torch.arange(LENGTH + 1)) % VOCAB
    ids, targets = walk[:, :-1], walk[:, 1:]
    if job.sp > 1:
        rank = dist.get_rank(sequence_group())
        ids, targets = (part.chunk(job.sp, dim=1)[rank] for part in (ids, targets))
    return ids.contiguous(), targets.contiguous()


def make_engine(job: Job) -> Any:
    """Return an engine on this rank, patched if the job has a block.

    Sequence-parallel groups are ALST's, or those of DeepSpeed's mesh from the ds_config.
    """
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    import hybridcomp

    config = ds_config(job)
    if "compression" in config:
        hybridcomp.install()
    else:
        hybridcomp.uninstall()
    if job.sp > 1:
        sequence_group()
    torch.manual_seed(0)
    model = Model(job)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=config,
        mpu=parallel_state_sp if job.sp > 1 and "data_parallel_size" not in config else None,
    )
    return engine


def train(job: Job, each: Callable[[Any, int], None] | None = None) -> Outcome:
    """Train; ``each(engine, step)`` is called after every step."""
    from hybridcomp.channels import NAME, channels_of

    engine = make_engine(job)
    losses = []
    for step in range(job.steps):
        total = 0.0
        for micro in range(job.accumulation):
            loss = engine(*(part.to(engine.device) for part in batch(job, step, micro)))
            engine.backward(loss)
            engine.step()
            total += loss.item() / job.accumulation
        losses.append(total)
        if each is not None:
            each(engine, step)
    named = dict(engine.module.named_parameters())
    outcome = Outcome(
        losses,
        {name: digest(values) for name, values in named.items()},
        ledger_of(channels_of(engine)),
        {name: getattr(values, NAME, "") for name, values in named.items()},
    )
    engine.destroy()
    return outcome


def run(jobs: Sequence[Job]) -> list[Outcome]:
    """Every job in turn."""
    start_deepspeed()
    outcomes = []
    for job in jobs:
        with nullcontext() if job.link is None else clock(*job.link):
            outcomes.append(train(job))
        gc.collect()  # engines are in cycles, and the first living one shares its channels
    return outcomes
