"""Map words of other tools to the names that the block uses.

There is one table each for keys of the block, keys of a dimension and names of codecs. The block
accepts none of the other tools' words; the error about such a word suggests our name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

#: key of the block, often a dimension -> other tools' words for it
_KEYS: Mapping[str, str] = {
    "dp": "gradient gradients grad grads grad_reduce gradient_reduction gradient_compression "
    "gradient_accumulation allreduce all_reduce reduce_scatter reducescatter ddp data "
    "data_parallel data_parallelism comm_hook qgz onebit powersgd bucket buckets",
    "zero": "weight weights param params parameter parameters weight_gather all_gather allgather "
    "zero1 zero2 zero3 zeropp fsdp fsdp2 hsdp sharding shards qwz hpz",
    "tp": "activation activations tensor_parallel tensor_parallelism model_parallel mp sp "
    "sequence_parallel autotp",
    "pp": "pipeline_parallel pipeline_parallelism pipe stages p2p send_recv point_to_point",
    "ep": "moe expert experts expert_parallel expert_parallelism all_to_all alltoall dispatch",
    "cp": "context context_parallel context_parallelism ulysses ring_attention alst",
    "offload": "optimizer_state optimizer_states cpu_offload zero_offload offload_optimizer host",
    "sync": "diloco local_sgd localsgd outer islands rendezvous fedavg",
    "publish": "publishing rollout rollouts inference weight_sync vllm sglang export",
    "start_step": "warmup warm_up warmup_steps start_iter start_iteration freeze_step start "
    "start_powersgd_iter",
    "min_bytes": "min_size min_numel threshold min_message min_compression_size minimum_bytes",
    "hierarchy": "hierarchical intra_node inter_node nodes node_size ranks_per_node local_size",
    "ledger": "log logging logs logger jsonl metrics monitor wandb report",
}
#: key of a dimension -> other tools' words for it
_SETTINGS: Mapping[str, str] = {
    "codec": "type name method algorithm algo compressor compression scheme quantizer quantization "
    "quant quantize quant_type dtype",
    "bits": "bit num_bits nbits n_bits bit_width bitwidth wbits quantization_bits quant_bits "
    "quantize_bits",
    "error_bound": "tolerance tol eps epsilon bound abs_error rel_error max_error accuracy "
    "precision error_limit",
    "error_feedback": "ef residual residuals memory use_error_feedback error_compensation",
    "rank": "matrix_approximation_rank low_rank r",
    "ramp": "schedule warmup warm_up warmup_steps",
    "rounding": "stochastic stochastic_rounding",
    "rotate": "hadamard rotation",
}
#: JSON in the block -> other tools' names for that codec
_CODECS: Mapping[str, str] = {
    '"codec": "bf16"': "bfloat16 bf16_compress bf16_compress_hook torch.bfloat16",
    '"codec": "fp16"': "float16 half fp16_compress fp16_compress_hook torch.float16",
    '"codec": "fp8"': "float8 e4m3 float8_e4m3 float8_e4m3fn fp8_e4m3 fp8_e4m3fn hybrid mxfp8",
    '"codec": "fp8", "format": "e5m2"': "e5m2 fp8_e5m2 float8_e5m2",
    '"codec": "none"': "fp32 float32 float full native off false identity no null raw",
    '"codec": "blockint", "bits": 4': "fp4 mxfp4 nvfp4 e2m1 qgz loco sdp4bit zeropp zero++",
    '"codec": "blockint", "bits": 4, "levels": "gaussian"': "nf4 normalfloat normal_float4",
    '"codec": "blockint", "bits": 8': "qwz byte bnb bitsandbytes llm_int8 int integer quantize "
    "quantization quant quantized dynamic_quantization linear uniform",
    '"codec": "blockint", "bits": 2': "onebit onebitadam onebitlamb zerooneadam signsgd sign "
    "ternary terngrad binary bitnet",
    '"codec": "powersgd"': "power_sgd powersgd_hook low_rank lowrank batched_powersgd",
    '"codec": "expcode"': "lossless zstd zlib gzip lz4 snappy ans dfloat11 dietgpu nvcomp bitcomp "
    "huffman zipnn",
    '"codec": "topk", "error_feedback": true': "top_k dgc deep_gradient_compression randomk "
    "random_k sparse sparsification",
    '"error_bound": 0.01': "sz sz3 cusz cuszp qsgd mgard",
    '"codec": "mpc"': "ndzip fpc",
}
_PRESETS = {
    "recommended": "auto default defaults standard on true yes best fast safe hybridcomp zero++",
    "none": "off no false native baseline uncompressed",
}
#: keys of DeepSpeed's file outside the block
DEEPSPEED = ("zero_optimization", "bf16", "fp16", "train_batch_size", "optimizer", "scheduler",
             "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "steps_per_print",
             "gradient_clipping", "communication_data_type", "compression_training")  # fmt: skip
#: integer formats of other tools with their number of bits: int4, uint8, q4_0, w8, 4bit, 8-bits
_INTEGER = re.compile(r"(?:u?int|[qwib]|quant|blockint)?[-_]?(\d)(?:[-_]?bits?)?(?:_[0-9a-z]+)*")

#: a number as a string: 4, int4, 8-bit, 1e-3, 1%
_NUMBER = re.compile(r"(?:u?int|bits?)?[-_ ]?(\d+(?:\.\d+)?(?:e-?\d+)?)[-_ ]?(%|bits?)?")
_SWITCHES = {"true": "true yes on", "false": "false no off none"}


def _by_word(table: Mapping[str, str]) -> dict[str, str]:
    return {word: ours for ours, words in table.items() for word in words.split()}


KEYS, SETTINGS, CODECS = map(_by_word, (_KEYS, _SETTINGS, _CODECS))
SWITCHES, PRESETS = _by_word(_SWITCHES), _by_word(_PRESETS)


def plain(word: str) -> str:
    """Return ``word`` in lower case, with underscores in the place of other separators."""
    return word.strip().lower().replace("-", "_").replace(" ", "_")


def of_key(word: str) -> str | None:
    """Return the top-level key of the block that ``word`` stands for; None if unknown."""
    return KEYS.get(plain(word))


def of_setting(word: str) -> str | None:
    """Return the key of a dimension that ``word`` stands for; None if unknown."""
    return SETTINGS.get(plain(word))


def of_codec(word: str) -> str | None:
    """Return the JSON that selects the codec known elsewhere as ``word``; None if unknown."""
    codec = CODECS.get(plain(word)) or CODECS.get(word.strip().lower())
    if codec is not None:
        return codec
    integer = _INTEGER.fullmatch(plain(word))
    if integer is None or not 1 <= int(integer[1]) <= 8:
        return None
    return f'"codec": "blockint", "bits": {max(2, int(integer[1]))}'


def of_preset(word: str) -> str | None:
    """Return the preset that ``word`` stands for; None if unknown."""
    return PRESETS.get(plain(word))


def of_number(text: str) -> str | None:
    """Return the number that ``text`` stands for, as JSON; None if it is not a number."""
    match = _NUMBER.fullmatch(text.strip().lower())
    if match is None:
        return None
    return f"{float(match[1]) / 100:g}" if match[2] == "%" else match[1]


def of_switch(text: str) -> str | None:
    """Return ``true`` or ``false`` for a string that means one of them; None for others."""
    return SWITCHES.get(plain(text))
