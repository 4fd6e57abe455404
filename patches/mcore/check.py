"""What megatron-core sends on paths that no seam covers: refused, or said once.

``_BaseDataParallel.__init__`` and not a constructor of a model: every data-parallel wrapper goes
through it, FSDP's too, and the model and its configuration are at hand. DistributedDataParallel is
checked before its own constructor, with its configuration (``ddp``).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from hybridcomp.config import BLOCK, CompressionConfig
from hybridcomp.config.error_messages import Shown, idle
from hybridcomp.errors import ConfigError
from hybridcomp.patches import missing
from hybridcomp.patches.mcore.attach import REQUIREMENT
from hybridcomp.patches.mcore.groups import sizes
from hybridcomp.patching import Seam
from hybridcomp.policy import DIMENSIONS, DIRECTIONS, Dimension
from hybridcomp.process import current, say

BASE = Seam(
    requirement=REQUIREMENT,
    module="megatron.core.distributed.data_parallel_base",
    qualname="_BaseDataParallel.__init__",
    parameters=("self", "config", "module"),
)

#: refuse   never together: results would be wrong, whatever ``on_unsupported`` says
#: bypass   this traffic is sent on a path that no seam covers
#: absent   this job has no such traffic: an error for a key that the user wrote
Verdict = Literal["refuse", "bypass", "absent"]


@dataclass(frozen=True)
class Job:
    """One model chunk and how it is parallel."""

    config: Any
    ddp: Any
    wrapper: str
    sizes: Mapping[Dimension, int]
    homes: frozenset[str] = frozenset()  # packages that define the model's layers
    dtypes: frozenset[torch.dtype] = frozenset()
    lossy: frozenset[Dimension] = frozenset()
    delta: bool = False

    def get(self, name: str, default: Any = None) -> Any:
        """A setting of the model or of DDP, ``default`` where this version has none."""
        for source in (self.config, self.ddp):
            if hasattr(source, name):
                return getattr(source, name)
        return default

    def size(self, dimension: Dimension) -> int:
        """Ranks per group; 2 where it is not known, so that nothing is taken for absent."""
        return self.sizes.get(dimension, 2)

    @property
    def transformer_engine(self) -> bool:
        """Whether layers of Transformer Engine are in the model."""
        return "transformer_engine" in self.homes


@dataclass(frozen=True)
class Rule:
    """One thing that a job does, and what it means for some dimensions."""

    verdict: Verdict
    dimensions: tuple[Dimension, ...]
    found: str
    reason: str
    todo: str
    applies: Callable[[Job], bool] = field(repr=False)


GROUPS: tuple[tuple[Dimension, str], ...] = (
    ("tp", "tensor-parallel"),
    ("pp", "pipeline"),
    ("ep", "expert-parallel"),
    ("cp", "context-parallel"),
    ("dp", "data-parallel"),
    ("zero", "data-parallel"),
)

RULES: tuple[Rule, ...] = (
    Rule(
        "absent", ("offload",), "a job without DeepSpeed",
        "only the copies of DeepSpeed's ZeRO-Offload are encoded", "leave offload out",
        lambda job: True,
    ),
    Rule(
        "bypass", ("tp",), "use_transformer_engine_op_fuser",
        "fused operations of Transformer Engine do not tell gradients from activations",
        "set use_transformer_engine_op_fuser to False",
        lambda job: bool(job.get("use_transformer_engine_op_fuser", False)),
    ),
    Rule(
        "bypass", ("tp",), "sequence_parallel in 8 or 4 bits (fp8, fp4)",
        "Transformer Engine gathers the quantized tensors itself; only its reductions are encoded",
        "train in bf16",
        lambda job: job.transformer_engine and bool(job.get("sequence_parallel", False))
        and bool(job.get("fp8") or job.get("fp4")),
    ),
    Rule(
        "bypass", ("tp",), "tp_comm_overlap",
        "the collectives are fused with the matrix products in user buffers",
        "set tp_comm_overlap to False",
        lambda job: bool(job.get("tp_comm_overlap", False)),
    ),
    Rule(
        "bypass", ("cp",), "context parallelism of attention",
        "it is done inside Transformer Engine, where no seam reaches", "leave cp out",
        lambda job: job.size("cp") > 1 and job.transformer_engine,
    ),
    Rule(
        "bypass", ("ep",), 'moe_token_dispatcher_type "flex"',
        "DeepEP, HybridEP and NCCL EP move tokens themselves",
        'set moe_token_dispatcher_type to "alltoall"',
        lambda job: job.get("moe_token_dispatcher_type") == "flex"
        and bool(job.get("num_moe_experts")),
    ),
    Rule(
        "bypass", ("pp",), "use_ring_exchange_p2p",
        "it needs an image of torch with ring_exchange, which takes no bytes",
        "set use_ring_exchange_p2p to False",
        lambda job: bool(job.get("use_ring_exchange_p2p", False)),
    ),
    Rule(
        "refuse", ("dp",), "reduce_scatter_with_fp32_accumulation",
        "it replaces the reduce-scatter that would be compressed; compressed reductions sum in "
        "fp32 anyway", "set it to False",
        lambda job: bool(job.get("reduce_scatter_with_fp32_accumulation", False)),
    ),
    Rule(
        "refuse", ("zero",), "a lossy codec for fp32 parameters",
        "the distributed optimizer keeps no other copy of fp32 parameters, so that every step "
        "would lose digits of the masters", "train in bf16 or use a lossless codec",
        lambda job: torch.float32 in job.dtypes and "zero" in job.lossy
        and bool(job.get("use_distributed_optimizer", False)),
    ),
    Rule(
        "refuse", ("zero",), '"delta": true with reuse_grad_buf_for_mxfp8_param_ag',
        "gradients overwrite the gathered parameters, so that ranks keep nothing to add deltas to",
        "remove delta",
        lambda job: job.delta and bool(job.get("reuse_grad_buf_for_mxfp8_param_ag", False)),
    ),
    Rule(
        "bypass", ("dp", "zero"), "a data-parallel wrapper that is not DistributedDataParallel",
        "FSDP communicates on paths of its own", "use DistributedDataParallel",
        lambda job: job.wrapper != "DistributedDataParallel",
    ),
    Rule(
        "bypass", ("zero",), "parameters in 8 or 4 bits (fp8_param_gather)",
        "they are gathered as they are", "leave zero out",
        lambda job: bool(job.get("fp8_param_gather", False) or job.get("fp8_param", False)),
    ),
    Rule(
        "absent", ("zero",), "no distributed optimizer",
        "no parameters are gathered", "set use_distributed_optimizer",
        lambda job: not job.get("use_distributed_optimizer", False)
        and job.wrapper == "DistributedDataParallel",
    ),
    *(
        Rule(
            "absent", (name,), f"one rank in each {words} group",
            "nothing is sent", f"leave {name} out",
            lambda job, name=name: job.size(name) < 2,  # type: ignore[misc]
        )
        for name, words in GROUPS
    ),
)  # fmt: skip


def check(block: CompressionConfig, wrapper: Any, config: Any, ddp: Any, model: Any) -> None:
    """Hold the block against one model chunk.

    Raises ConfigError for the first dimension that cannot act, unless the block says
    ``"on_unsupported": "native"``; then it is said once, on rank 0, what stays native and why.
    """
    policy = block.policy()
    lossy = {
        name
        for name in DIMENSIONS
        for way in DIRECTIONS
        if (codec := policy.codecs.get((name, way))) is not None and not codec.lossless
    }
    job = Job(
        config, ddp, type(wrapper).__name__, sizes(), frozenset(_homes(model)),
        frozenset(p.dtype for p in model.parameters()), frozenset(lossy), block.zero.delta,
    )  # fmt: skip
    if block.pp.scatter_gather:
        _check_scatter_gather(block, job)
    active = [name for name in DIMENSIONS if block.active(name)]
    if "tp" in active and job.transformer_engine and job.size("tp") > 1:
        _check_transformer_engine(block)
    for rule in RULES:
        names = [name for name in active if name in rule.dimensions]
        if rule.verdict == "absent":
            names = [name for name in names if name in block.explicit]
        if names and rule.applies(job):
            apply(rule, names, block)


def _check_transformer_engine(block: CompressionConfig) -> None:
    """Raise ConfigError, or say once, where its seam is not in place."""
    reason = missing("transformer_engine.pytorch")
    if reason is not None:
        found, todo = "layers of Transformer Engine", "use --transformer-impl local"
        apply(Rule("bypass", ("tp",), found, reason, todo, lambda job: True), ["tp"], block)


def _check_scatter_gather(block: CompressionConfig, job: Job) -> None:
    """Raise ConfigError, or say once, where no tensor ranks hold the same pipeline messages."""
    found = {
        "process groups made without parallel_state: it is not known who shares": not job.sizes,
        "one rank in each pipeline group: nothing is sent": job.size("pp") < 2,
        "one rank in each tensor-parallel group: nobody shares its messages": job.size("tp") < 2,
        "sequence_parallel: every tensor rank sends a part of its own already": bool(
            job.get("sequence_parallel", False)
        ),
    }
    for words, applies in found.items():
        if applies:
            key = f"{BLOCK}.pp.scatter_gather"
            say(idle(key, True, f"{words}; remove it", block.on_unsupported))
            return


def apply(rule: Rule, names: list[Dimension], block: CompressionConfig) -> None:
    """Raise ConfigError for ``names[0]``, or say what stays native."""
    if rule.verdict != "refuse" and block.on_unsupported == "native":
        say(f"{', '.join(names)} native: {rule.found}: {rule.reason}")
        return
    native = "" if rule.verdict == "refuse" else ', or set "on_unsupported": "native"'
    raise ConfigError(
        f"{BLOCK}.{names[0]}",
        Shown(rule.found),
        f'{rule.reason}; {rule.todo}, or set "{names[0]}": "none"{native}',
    )


def _homes(model: Any) -> Iterator[str]:
    """Packages of the classes that the model's modules inherit from."""
    for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
        yield kind.__module__.partition(".")[0]


def make_init(original: Callable[..., None]) -> Callable[..., None]:
    """Check wrappers other than DistributedDataParallel."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        channels = current()
        if channels is not None and type(self).__name__ != "DistributedDataParallel":
            given = signature.bind(self, *args, **kwargs).arguments
            check(channels.config, self, given["config"], None, given["module"])
        original(self, *args, **kwargs)

    return __init__


PATCHES = ((BASE, make_init),)
