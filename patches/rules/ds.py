"""Rules for DeepSpeed's traffic of each dimension: a table over the keys of a ds_config.

From the sources of DeepSpeed 0.19.0 and 0.19.8. Features that only the model shows
(DualPipeV, Domino, embeddings with sparse gradients, FPDT) have no rules here. The rules of
dimension ``offload`` are in ``ds_offload``.
"""

from __future__ import annotations

from hybridcomp.config import CompressionConfig
from hybridcomp.dimensions import BETWEEN_RANKS
from hybridcomp.patches.rules.ds_job import DeepSpeedJob
from hybridcomp.patches.rules.engine import NO_ROWS, NO_TABLES, TABLES_TODO, Rule


def _keeps_copy(block: CompressionConfig) -> bool:
    return block.zero.keeps_copy


def _accumulates(block: CompressionConfig) -> bool:
    return block.dp.accumulate == "node"


RULES: tuple[Rule[DeepSpeedJob], ...] = (
    Rule(
        "refuse", ("pp", "dp", "zero"), "a PipelineModule with ZeRO stage 2 or 3",
        "DeepSpeed itself refuses the two together", "use stage 0 or 1",
        lambda job: job.pipeline is True and job.stage >= 2,
    ),
    Rule(
        "refuse", ("zero",), '"zero_optimization.zero_quantized_weights": true',
        "DeepSpeed quantizes the same gathers, and its scales must arrive exactly",
        "remove zero_quantized_weights",
        lambda job: job.stage == 3 and job.zero("zero_quantized_weights"),
    ),
    Rule(
        "refuse", ("zero",), '"zero_optimization.zero_quantized_nontrainable_weights": true',
        "DeepSpeed quantizes these parameters, and their scales must arrive exactly",
        "remove zero_quantized_nontrainable_weights",
        lambda job: job.stage == 3 and job.zero("zero_quantized_nontrainable_weights"),
    ),
    Rule(
        "refuse", ("zero", "dp"), '"zero_optimization.zenflow"',
        "ZenFlow copies parameters and broadcasts gradients on paths of its own", "remove zenflow",
        lambda job: job.stage > 0 and job.zero("zenflow") is not None,
    ),
    Rule(
        "refuse", ("zero", "dp"), '"zero_optimization.mics_shard_size"',
        "MiCS gathers parameters and reduces gradients in subgroups on paths of its own",
        "remove mics_shard_size",
        lambda job: job.stage == 3 and job.zero("mics_shard_size") > 0,
    ),
    Rule(
        "refuse", ("zero",), '"delta": true with ZeRO stage 3',
        "parameters are released after use, and keeping what deltas are added to would take the "
        "memory that stage 3 saves", "use stage 1 or 2, or remove delta",
        lambda job: job.stage == 3,
        settings=lambda block: block.zero.delta and not block.zero.steps,
    ),
    Rule(
        "refuse", ("zero",), "stepcode with ZeRO stage 3",
        "parameters are released after use, and keeping what steps are taken from would take the "
        "memory that stage 3 saves", "use stage 1 or 2, or expcode",
        lambda job: job.stage == 3, settings=lambda block: block.zero.steps,
    ),
    Rule(
        "refuse", ("zero",), "stepcode with fp32 parameters",
        "it encodes bf16 and fp16",
        'train in bf16 or fp16, or use {"codec": "mpc", "delta": true}',
        lambda job: job.dtype == "fp32", settings=lambda block: block.zero.steps,
    ),
    Rule(
        "refuse", ("zero",), '"secondary" below ZeRO stage 3',
        "parameters are whole on every rank there, so nodes need no copy",
        'use stage 3, or {"codec": "stepcode"}, which sends steps at stage 1 and 2',
        lambda job: job.stage < 3, settings=_keeps_copy,
    ),
    Rule(
        "refuse", ("zero",), '"secondary" with one node of zero_hpz_partition_size ranks',
        "nothing crosses between nodes", "remove secondary, or lower zero_hpz_partition_size",
        lambda job: job.world_size is not None
        and job.zero("zero_hpz_partition_size") >= job.world_size,
        settings=_keeps_copy,
    ),
    Rule(
        "refuse", ("zero",), '"secondary" with fp32 parameters',
        "steps are those of bf16 and fp16", "train in bf16 or fp16, or remove secondary",
        lambda job: job.dtype == "fp32", settings=_keeps_copy,
    ),
    Rule(
        "refuse", ("zero",), '"secondary" with offload_param to nvme',
        "DeepSpeed keeps no secondary copy of parameters on a disk",
        "offload parameters to the cpu, or remove secondary",
        lambda job: job.zero("offload_param.device") == "nvme", settings=_keeps_copy,
    ),
    Rule(
        "refuse", ("zero",), '"secondary" with tensor or sequence parallelism or experts',
        "DeepSpeed cuts the secondary copy over consecutive ranks of the job, whatever they hold",
        "remove secondary", lambda job: job.is_cut, settings=_keeps_copy,
    ),
    Rule(
        "refuse", ("zero",), '"frozen" below ZeRO stage 3',
        "parameters are whole on every rank there, and frozen ones are never gathered",
        "remove frozen", lambda job: job.stage < 3,
        settings=lambda block: block.zero.keeps_frozen is not None,
    ),
    Rule(
        "refuse", ("dp",), "powersgd with ZeRO stage 3",
        "gradients are cut before they are reduced, and a piece of a matrix has no columns",
        "use stage 0, 1 or 2, or another codec",
        lambda job: job.stage == 3, settings=lambda block: "dp" in block.policy().low_rank,
    ),
    Rule(
        "refuse", ("dp",), '"accumulate": "node" below ZeRO stage 2',
        "each rank adds up its micro-batches itself there, and gradients cross once a step anyway",
        "remove accumulate", lambda job: job.stage < 2, settings=_accumulates,
    ),
    Rule(
        "note", ("dp",), '"accumulate": "node" with one micro-batch a step',
        "there is nothing to sum, unless the script sets the boundaries", "",
        lambda job: job.stage >= 2 and job.get("gradient_accumulation_steps") == 1,
        settings=_accumulates,
    ),
    Rule(
        "bypass", ("dp",), '"compile.deepcompile": true',
        "compiled code reduces gradients in C++, where no seam reaches",
        "set compile.deepcompile to false", lambda job: job.compiled,
    ),
    Rule(
        "bypass", ("zero",), '"compile.deepcompile": true with ZeRO stage 3',
        "compiled code gathers parameters in C++, where no seam reaches",
        "set compile.deepcompile to false", lambda job: job.compiled and job.stage == 3,
    ),
    Rule(
        "bypass", ("dp",), '"zero_optimization.reduce_scatter": false',
        "DeepSpeed then all-reduces whole buckets on a path without parameter owners",
        "remove reduce_scatter (true is the default)",
        lambda job: not job.zero("reduce_scatter")
        and (job.buckets or (job.stage == 3 and job.zero("contiguous_gradients"))),
    ),
    Rule(
        "bypass", ("dp",), '"zero_optimization.use_multi_rank_bucket_allreduce": false',
        "DeepSpeed then reduces to one rank after the other",
        "remove use_multi_rank_bucket_allreduce (true is the default)",
        lambda job: job.buckets and not job.zero("use_multi_rank_bucket_allreduce"),
    ),
    Rule(
        "bypass", ("dp",), '"zero_optimization.contiguous_gradients": false',
        "DeepSpeed stage 1 and 2 then all-reduce gradients without buckets",
        "remove contiguous_gradients (true is the default)",
        lambda job: job.buckets
        and not job.cpu_offload
        and not job.zero("contiguous_gradients"),
    ),
    Rule(
        "bypass", ("dp",), '"zero_optimization.zero_quantized_gradients": true',
        "on several nodes DeepSpeed quantizes the same gradients itself",
        "remove zero_quantized_gradients",
        lambda job: job.stage == 3 and job.zero("zero_quantized_gradients"),
    ),
    Rule(
        "bypass", ("dp",), "a 1-bit optimizer",
        "it exchanges gradients itself after its warm-up", "use adam, adamw or lamb",
        lambda job: job.is_one_bit,
    ),
    Rule(
        "refuse", ("zero",), '"zero_optimization.stage3_use_all_reduce_for_fetch_params": true',
        "parameters then arrive by all-reduce, except those that are fetched alone",
        "remove stage3_use_all_reduce_for_fetch_params",
        lambda job: job.stage == 3
        and job.zero("use_all_reduce_for_fetch_params")
        and not job.zero("allgather_sequential"),
    ),
    Rule(
        "bypass", ("ep",), '"expert_parallel.comm_backend": "deepep"',
        "DeepEP moves tokens itself", 'set expert_parallel.comm_backend to "comm"',
        lambda job: bool(job.get("expert_parallel.enabled", False))
        and job.get("expert_parallel.comm_backend") == "deepep",
    ),
    Rule(
        "refuse", ("sync",), "a PipelineModule",
        "its stages are no replicas, and its groups are its own", "use a model without stages",
        lambda job: job.pipeline is True or bool(job.slices),
    ),
    Rule(
        "refuse", ("sync",), "a model whose layers or sequence are cut over ranks",
        "an island is a data-parallel group alone", "use ZeRO stages without tensor, sequence or "
        "expert parallelism",
        lambda job: job.is_cut or bool(job.tensor or job.sequence or job.mesh),
    ),
    Rule(
        "refuse", ("sync",), "a 1-bit optimizer",
        "it exchanges gradients over all ranks after its warm-up", "use adam, adamw or lamb",
        lambda job: job.is_one_bit,
    ),
    Rule(
        "refuse", ("sync",), "weights or optimizer states on a disk, MiCS or hpZ",
        "DeepSpeed keeps fp32 weights there in a way of its own", "remove it, or leave sync out",
        lambda job: job.zero("offload_optimizer.device") == "nvme"
        or job.zero("offload_param.device") == "nvme"
        or (job.stage == 3 and job.zero("mics_shard_size") > 0)
        or (job.stage == 3 and job.zero("zero_hpz_partition_size") > 1),
    ),
    Rule(
        "absent", ("zero",), "ZeRO stage 0",
        "no parameters are gathered", "set zero_optimization.stage to 1, 2 or 3",
        lambda job: job.stage == 0 and not (job.bf16 and job.pipeline is not False),
    ),
    Rule(
        "absent", ("pp",), "a model that is no PipelineModule",
        "there are no pipeline sends", "build the model as a PipelineModule",
        lambda job: job.pipeline is False and not job.slices,
    ),
    Rule(
        "absent", ("ep",), "a model without MoE layers",
        "there is no expert all-to-all", "use deepspeed.moe.layer.MoE or AutoEP",
        lambda job: job.moe is False and not job.get("expert_parallel.enabled", False),
    ),
    Rule(
        "bypass", ("tp",), '"compile.passes": ["autotp"]',
        "compiled code reduces activations in operators of its own, without a direction",
        "remove autotp from compile.passes", lambda job: job.compile_pass("autotp"),
    ),
    Rule(
        "bypass", ("cp",), '"compile.passes": ["autosp"]',
        "compiled code exchanges heads in operators of its own, without a direction",
        "remove autosp from compile.passes", lambda job: job.compile_pass("autosp"),
    ),
    Rule(
        "absent", ("tp",), "a job without tensor parallelism",
        "no layer of AutoTP, GPT-NeoX or megatron-core is split over ranks",
        "set tensor_parallel.autotp_size",
        lambda job: job.tensor is False and job.tensor_parallel == 1,
    ),
    Rule(
        "absent", ("cp",), "a job without sequence parallelism",
        "no sequence is split over ranks",
        "use DeepSpeed Ulysses (sequence_parallel_size) or hybridcomp.nn.RingAttention",
        lambda job: job.sequence is False and job.sequence_parallel == 1,
    ),
    Rule(
        "absent", ("tp2d",), "a model without layers of hybridcomp.nn.tp2d",
        "no layer is cut over a mesh", "build the model of them",
        lambda job: job.mesh is False,
    ),
    Rule(
        "absent", ("embed",), NO_TABLES, NO_ROWS, TABLES_TODO,
        lambda job: job.tables is False and not job.sparse,
    ),
    Rule(
        "refuse", ("embed",), "Embedding(sparse=True) at ZeRO 1 to 3",
        "DeepSpeed takes sparse gradients at stage 0 only",
        "use stage 0, set sparse to False, or use hybridcomp.nn.CachedEmbedding",
        lambda job: bool(job.sparse) and job.stage > 0,
    ),
    Rule(
        "absent", ("dp", "zero"), "all ranks in one tensor-parallel group",
        "no two ranks share a parameter", "lower tensor_parallel.autotp_size",
        lambda job: job.tensor_parallel > 1 and job.tensor_parallel == job.world_size,
    ),
    Rule(
        # islands of one rank still ``sync`` with other islands
        "note", tuple(name for name in BETWEEN_RANKS if name != "sync"), "one rank",
        "nothing is sent, so nothing is compressed", "", lambda job: job.world_size == 1,
    ),
    Rule(
        "note", ("dp", "zero"), "one replica of the model",
        "no two ranks have a parameter in common, so nothing is sent", "",
        lambda job: job.replicas == 1 and job.world_size != 1,
    ),
    Rule(
        "note", ("dp",), '"zero_optimization.zero_quantized_gradients": true',
        "DeepSpeed ignores it below stage 3; only the block compresses gradients", "",
        lambda job: job.stage < 3 and job.zero("zero_quantized_gradients"),
    ),
    Rule(
        "note", ("zero",), '"zero_optimization.zero_hpz_partition_size"',
        "the backward pass gathers parameters that were decoded once, so they are encoded twice",
        "", lambda job: job.stage == 3 and job.zero("zero_hpz_partition_size") > 1,
        settings=lambda block: not block.zero.keeps_copy,
    ),
    Rule(
        "note", ("dp",), '"sparse_gradients": true',
        "DeepSpeed sends gradients of embeddings as indices and values, which only embed encodes; "
        "from 0.19.8 on it refuses the key", "",
        lambda job: bool(job.get("sparse_gradients")) and not job.buckets,
    ),
    Rule(
        "note", ("dp",), "the muon optimizer",
        "its exchange of momentum stays native; 4 bits cost its loss percents, 8 bits a tenth",
        "",
        lambda job: job.optimizer == "muon",
    ),
    Rule(
        "note", ("zero",), '"hybrid_engine.enabled": true',
        "gathers for generation stay native", "",
        lambda job: job.stage == 3 and bool(job.get("hybrid_engine.enabled")),
    ),
)  # fmt: skip
