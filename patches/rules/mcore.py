"""Rules for megatron-core's traffic of each dimension: a table over its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hybridcomp import nn
from hybridcomp.config import BLOCK, CompressionConfig
from hybridcomp.config.error_messages import idle
from hybridcomp.dimensions import MEGATRON, ROWS, Dimension, DimensionRow
from hybridcomp.patches.rules import engine
from hybridcomp.patches.rules.engine import Rule


@dataclass(frozen=True)
class MegatronJob:
    """One model chunk and its parallel layout."""

    config: Any
    ddp: Any
    wrapper: str
    sizes: Mapping[Dimension, int]
    homes: frozenset[str] = frozenset()  # packages that define the classes of the model's layers
    dtypes: frozenset[torch.dtype] = frozenset()
    lossy: frozenset[Dimension] = frozenset()
    delta: bool = False
    steps: bool = False

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting of the model or of DDP, ``default`` where this version has none."""
        for source in (self.config, self.ddp):
            if hasattr(source, name):
                return getattr(source, name)
        return default

    def size(self, dimension: Dimension) -> int:
        """Return a group's number of ranks; 2 if unknown, so that no dimension counts as absent."""
        return self.sizes.get(dimension, 2)

    @property
    def graphs(self) -> bool:
        """Return whether layers or whole steps are captured in CUDA graphs, by older names too."""
        older = self.get("enable_cuda_graph") or self.get("external_cuda_graph")
        return bool(older) or self.get("cuda_graph_impl", "none") != "none"

    @property
    def graph_of_a_step(self) -> bool:
        """Return whether one CUDA graph holds the whole step, its reductions and sends included."""
        scope = self.get("cuda_graph_scope") or ()
        scopes = [scope] if isinstance(scope, str) else scope
        names = {getattr(one, "name", str(one)) for one in scopes}
        names.add(str(self.get("cuda_graph_impl")))  # from 0.19 on this setting states the scope
        return self.graphs and "full_iteration" in names

    @property
    def weight_shards(self) -> bool:
        """Return whether weights are also sharded over GTP ranks and gathered in every pass."""
        sizes = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")
        return any(int(self.get(name) or 1) > 1 for name in sizes)

    @property
    def masters_in_weights(self) -> bool:
        """Return whether the optimizer keeps only what its weights have beyond the model's."""
        asked = bool(self.get("use_precision_aware_optimizer", False))
        # masters of most 8-bit weights are Megatron's own
        asked = asked and bool(self.get("use_precision_aware_optimizer_no_fp8_or_ds_fp8", True))
        kept_apart = self.get("optimizer_cpu_offload", False) or not self.get("bf16", False)
        return asked and not kept_apart and bool(self.get("store_param_remainders", False))

    @property
    def transformer_engine(self) -> bool:
        """Return whether the model has layers of Transformer Engine."""
        return "transformer_engine" in self.homes


#: why messages in a CUDA graph cannot be encoded
REPLAYED = "a graph that is played again sends without counting, checking or following the block"

FULL_GRAPH = 'cuda_graph_scope or cuda_graph_impl "full_iteration"'
SHARDS = "tensor_parallel_num_weight_shards above the tensor-parallel size"
SHARDS_TODO = "remove tensor_parallel_num_weight_shards and its expert_ form"
FULL_GRAPH_TODO = 'set another scope and cuda_graph_impl "none"'


def _grouped() -> list[tuple[Dimension, DimensionRow]]:
    """Return the dimensions that have process groups; those that split the model come first."""
    found = [(name, row) for name, row in ROWS.items() if row.group]
    return sorted(found, key=lambda each: each[1].group == ROWS["dp"].group)


#: settings by which islands would exchange values in every step; advice; whether a job sets it
_COUNTED: tuple[tuple[str, str, Callable[[MegatronJob], bool]], ...] = (
    (
        "calculate_per_token_loss", "set it to False",
        lambda job: bool(job.get("calculate_per_token_loss", False)),
    ),
    (
        "moe_router_enable_expert_bias", "set it to False",
        lambda job: bool(job.get("moe_router_enable_expert_bias", False)),
    ),
    (
        'moe_router_load_balancing_type "global_aux_loss"', 'set "aux_loss"',
        lambda job: "global_aux_loss" in str(job.get("moe_router_load_balancing_type", ""))
        and bool(job.get("num_moe_experts")),
    ),
    ("qk_clip", "set it to False", lambda job: bool(job.get("qk_clip", False))),
)  # fmt: skip

#: rules of an optimizer's settings; it is built after the wrapper has been checked
OPTIMIZERS: tuple[Rule[MegatronJob], ...] = (
    Rule(
        "refuse", ("zero",), "a lossy codec with use_precision_aware_optimizer",
        "with store_param_remainders the gathered bf16 weights are half of the optimizer's own, "
        "and each step would lose digits",
        "set store_param_remainders to False or use a lossless codec",
        lambda job: job.masters_in_weights and "zero" in job.lossy,
    ),
)  # fmt: skip
#: rule of the layer-wise optimizer, which shows by its class
LAYER_WISE: tuple[Rule[MegatronJob], ...] = (
    Rule(
        "bypass", ("zero",), "use_layer_wise_distributed_optimizer",
        "it gathers whole weights in lists of unequal lengths; they are counted, not encoded",
        "leave zero out, or pass the model's full_param_layout, whose buffers are gathered encoded",
        lambda job: bool(job.get("use_layer_wise_distributed_optimizer", False))
        and job.size("zero") > 1,
    ),
)  # fmt: skip
_KNOWN: tuple[Rule[MegatronJob], ...] = (
    Rule(
        "absent", ("offload",), "a job without DeepSpeed",
        "only the copies of DeepSpeed's ZeRO-Offload are encoded", "leave offload out",
        lambda job: True,
    ),
    Rule(
        "bypass", ("tp",), "use_transformer_engine_op_fuser",
        "fused operations of Transformer Engine do not tell gradients from activations",
        "set use_transformer_engine_op_fuser to False",
        lambda job: bool(job.get("use_transformer_engine_op_fuser", False)), is_part=True,
    ),
    Rule(
        "bypass", ("tp",), "sequence_parallel in 8 or 4 bits (fp8, fp4)",
        "Transformer Engine gathers the quantized tensors itself; only its reductions are encoded",
        "train in bf16",
        lambda job: job.transformer_engine and bool(job.get("sequence_parallel", False))
        and bool(job.get("fp8") or job.get("fp4")), is_part=True,
    ),
    Rule(
        "bypass", ("tp",), "tp_comm_overlap",
        "the collectives are fused with the matrix products in user buffers",
        "set tp_comm_overlap to False",
        lambda job: bool(job.get("tp_comm_overlap", False)), is_part=True,
    ),
    Rule(
        "bypass", ("tp",), "symmetric_ar_type",
        "Transformer Engine sums activations in symmetric memory, where no seam reaches; only the "
        "sums of the backward pass are encoded", "remove symmetric_ar_type",
        lambda job: job.transformer_engine and bool(job.get("symmetric_ar_type"))
        and not job.get("sequence_parallel", False),  # it uses reduce-scatters instead
        is_part=True,
    ),
    Rule(
        "bypass", ("tp", "ep", "cp"), "layers in CUDA graphs (cuda_graph_impl)",
        REPLAYED,
        'set cuda_graph_impl to "none"', lambda job: job.graphs, is_part=True,
    ),
    Rule(
        "bypass", ("dp", "zero", "pp"), FULL_GRAPH,
        REPLAYED,
        FULL_GRAPH_TODO, lambda job: job.graph_of_a_step,
    ),
    Rule(
        "absent", ("tp2d",), "a job on megatron-core",
        "its layers are cut in one dimension", "leave it out", lambda job: True,
    ),
    Rule(
        "absent", ("embed",), engine.NO_TABLES, engine.NO_ROWS, engine.TABLES_TODO,
        lambda job: not nn.has_tables(),
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
        "refuse", ("dp",), '"accumulate": "node" under megatron-core',
        "each rank adds up its micro-batches itself, and gradients cross once a step anyway",
        "remove accumulate", lambda job: True,
        settings=lambda block: block.dp.accumulate == "node",
    ),
    Rule(
        "refuse", ("zero",), "a lossy codec for fp32 parameters",
        "the distributed optimizer has no other copy of them, and each step would lose digits",
        "train in bf16 or use a lossless codec",
        lambda job: torch.float32 in job.dtypes and "zero" in job.lossy
        and bool(job.get("use_distributed_optimizer", False)),
    ),
    *OPTIMIZERS,
    Rule(
        "refuse", ("zero",), '"delta": true with reuse_grad_buf_for_mxfp8_param_ag',
        "gradients overwrite the gathered parameters, so that ranks keep nothing to add deltas to",
        "remove delta",
        lambda job: job.delta and not job.steps
        and bool(job.get("reuse_grad_buf_for_mxfp8_param_ag", False)),
    ),
    Rule(
        "refuse", ("zero",), '"secondary" under megatron-core',
        "every rank keeps all that it gathers, so nodes need no copy",
        'remove it, or use {"codec": "stepcode"}, which sends steps',
        lambda job: True, settings=lambda block: block.zero.keeps_copy,
    ),
    Rule(
        "refuse", ("zero",), '"frozen" under megatron-core',
        "weights that are not trained are never gathered", "remove it",
        lambda job: True, settings=lambda block: block.zero.keeps_frozen is not None,
    ),
    Rule(
        "refuse", ("zero",), "stepcode with reuse_grad_buf_for_mxfp8_param_ag",
        "gradients overwrite the gathered parameters, so that ranks keep nothing to take steps "
        "from", "use expcode",
        lambda job: job.steps and bool(job.get("reuse_grad_buf_for_mxfp8_param_ag", False)),
    ),
    Rule(
        "refuse", ("zero",), "stepcode with fp32 parameters",
        "it encodes bf16 and fp16",
        'train in bf16 or fp16, or use {"codec": "mpc", "delta": true}',
        lambda job: job.steps and job.dtypes == {torch.float32}
        and bool(job.get("use_distributed_optimizer", False)),
    ),
    Rule(
        "note", ("zero",), "stepcode with some fp32 parameters",
        "it encodes bf16 and fp16; the fp32 ones are gathered natively", "",
        lambda job: job.steps and torch.float32 in job.dtypes and len(job.dtypes) > 1,
    ),
    Rule(
        "bypass", ("dp", "zero"), "a data-parallel wrapper that is not DistributedDataParallel",
        "FSDP communicates on paths of its own", "use DistributedDataParallel",
        lambda job: job.wrapper != "DistributedDataParallel",
    ),
    Rule(
        "refuse", ("sync",), "a data-parallel wrapper that is not DistributedDataParallel",
        "FSDP keeps the weights in ways of its own", "use DistributedDataParallel",
        lambda job: job.wrapper != "DistributedDataParallel",
    ),
    Rule(
        "refuse", ("sync",), FULL_GRAPH,
        "islands meet between optimizer steps, which such a graph holds",
        FULL_GRAPH_TODO, lambda job: job.graph_of_a_step,
    ),
    Rule(
        "refuse", ("sync",), "num_distributed_optimizer_instances > 1",
        "islands take the place of its instances", "set it to 1",
        lambda job: int(job.get("num_distributed_optimizer_instances", 1)) > 1,
    ),
    *(
        Rule(
            "refuse", ("sync",), found,
            "upstream counts over all data-parallel ranks of the job there, in every step", todo,
            applies, settings=lambda block: block.sync.jobs is None,
        )
        for found, todo, applies in _COUNTED
    ),
    Rule(
        "bypass", ("zero",), "parameters in 8 or 4 bits (fp8_param_gather, fp4_param_gather)",
        "they are gathered as they are", "leave zero out",
        lambda job: any(
            job.get(name, False)
            for name in ("fp8_param_gather", "fp8_param", "fp4_param_gather", "fp4_param")
        ),
        is_part=True,
    ),
    *LAYER_WISE,
    Rule(
        "refuse", ("sync",), SHARDS,
        "each rank then holds a part of a weight, and ranks of an island would average parts",
        SHARDS_TODO, lambda job: job.weight_shards,
    ),
    Rule(
        "refuse", ("dp",), f"error feedback or powersgd with {SHARDS}",
        "residuals and factors are kept by the names of weights, and several parts have one name",
        SHARDS_TODO, lambda job: job.weight_shards,
        settings=lambda block: block.error_feedback("dp") or block.dp.codec == "powersgd",
    ),
    Rule(
        "refuse", ("dp", "zero"), SHARDS,
        "Transformer Engine's own messages of the parts stay native, and are most of what such a "
        "job sends",
        f'{SHARDS_TODO}, or set "on_unsupported": "native", and only what data-parallel ranks '
        "send is encoded",
        lambda job: job.weight_shards, settings=lambda block: block.on_unsupported == "error",
    ),
    Rule(
        "note", ("dp", "zero"), SHARDS,
        "Transformer Engine's own messages of the parts are native, and not in the ledger", "",
        lambda job: job.weight_shards,
    ),
    Rule(
        "absent", ("zero",), "no distributed optimizer",
        "no parameters are gathered", "set use_distributed_optimizer",
        lambda job: not job.get("use_distributed_optimizer", False)
        and job.wrapper == "DistributedDataParallel",
    ),
    *(
        Rule(
            "absent", (name,), f"one rank in each {row.group} group",
            "nothing is sent", f"leave {name} out",
            lambda job, name=name: job.size(name) < 2,  # type: ignore[misc]
        )
        for name, row in _grouped()
    ),
)  # fmt: skip
#: rules over a ``MegatronJob``
RULES: tuple[Rule[MegatronJob], ...] = (*_KNOWN, *engine.without_seam(MEGATRON, _KNOWN))


#: layers of Transformer Engine whose seam is not in place
LAYERS_OUT_OF_REACH = "layers of Transformer Engine"


def out_of_reach(reason: str) -> Rule[MegatronJob]:
    """Make the rule for layers of Transformer Engine whose seam is not in place."""
    return Rule(
        "bypass", ("tp",), LAYERS_OUT_OF_REACH, reason, "use --transformer-impl local",
        lambda job: job.transformer_engine and job.size("tp") > 1, is_part=True,
    )  # fmt: skip


def scatter_gather(block: CompressionConfig, job: MegatronJob) -> str | None:
    """Return a sentence, or raise ConfigError, if tensor ranks cannot split pipeline messages."""
    if not block.pp.scatter_gather:
        return None
    found = {
        "process groups made without parallel_state: it is not known who shares": not job.sizes,
        "one rank in each pipeline group: nothing is sent": job.size("pp") < 2,
        "one rank in each tensor-parallel group: nobody shares its messages": job.size("tp") < 2,
        "sequence_parallel: every tensor rank sends a part of its own already": bool(
            job.get("sequence_parallel", False)
        ),
    }
    words = next((words for words, applies in found.items() if applies), None)
    if words is None:
        return None
    key = f"{BLOCK}.pp.scatter_gather"
    return idle(key, True, f"{words}; remove it", block.on_unsupported)
