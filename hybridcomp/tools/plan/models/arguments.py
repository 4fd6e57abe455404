"""Read decoders from command lines: Megatron's arguments, and ``train_gpt.py``'s."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridcomp.errors import ConfigError
from hybridcomp.tools.plan.models.decoder import Decoder
from hybridcomp.tools.plan.models.huggingface import given, head_width, key_heads, number
from hybridcomp.tools.plan.models.sizes import padded

#: Megatron's default of --make-vocab-size-divisible-by
MULTIPLE = 128
#: Megatron's default of --position-embedding-type
LEARNED = "learned_absolute"
#: switches for a gated MLP, which has two input matrices
GATED = frozenset({"swiglu", "quick_geglu"})
#: options that change what a block consists of, with the value that changes nothing; the last two
#: are those of Megatron-DeepSpeed and its forks
OTHERS = {
    "multi_latent_attention": "", "moe_layer_freq": "1", "mtp_num_layers": "0",
    "hybrid_attention_ratio": "0.0", "heterogeneous_layers_config_path": "",
    "heterogeneous_layers_config_encoded_json": "", "hybrid_override_pattern": "",
    "hybrid_layer_pattern": "", "is_hybrid_model": "", "linear_attention_freq": "",
    "experimental_attention_variant": "", "moe_latent_size": "", "attention_output_gate": "",
    "glu_activation": "", "num_key_value_heads": "",
}  # fmt: skip


def parsed(arguments: str | Sequence[str]) -> dict[str, str | bool]:
    """Parse options by name, ``_`` for ``-``; flags are True. Other words are left out.

    Raises ConfigError for a line whose quotes are not closed.
    """
    try:
        words = shlex.split(arguments) if isinstance(arguments, str) else list(arguments)
    except ValueError as error:
        todo = f"a shell cannot read it ({error}); close its quotes"
        raise ConfigError("model", str(arguments)[:80], todo) from None
    found: dict[str, str | bool] = {}
    last: str | None = None
    for word in words:
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            last = None if has_value else name.replace("-", "_")
            found[name.replace("-", "_")] = value if has_value else True
        elif last is not None:
            found[last] = word
            last = None
    return found


def numbers(options: dict[str, str | bool]) -> dict[str, Any]:
    """Return the options with values, those that are whole numbers as integers."""
    return {
        name: int(value) if re.fullmatch(r"-?\d+", value) else value
        for name, value in options.items()
        if isinstance(value, str)
    }


def megatron(arguments: str | Sequence[str]) -> Decoder:
    """Read a decoder from Megatron's arguments. Raises ConfigError."""
    options = parsed(arguments)
    sizes, name = numbers(options), "Megatron arguments"
    hidden = number(sizes, name, "hidden_size")
    heads = number(sizes, name, "num_attention_heads")
    tensor = given(sizes, name, "tensor_model_parallel_size", 1)
    multiple = given(sizes, name, "make_vocab_size_divisible_by", MULTIPLE) * tensor
    vocabulary = number(sizes, name, "padded_vocab_size", "vocab_size")
    if "padded_vocab_size" not in sizes:
        vocabulary = padded(vocabulary, multiple)
    for key, usual in OTHERS.items():
        if options.get(key, usual) != usual:
            todo = "plans know blocks of attention and one MLP; name the model as package:callable"
            raise ConfigError(f"{name}: --{key.replace('_', '-')}", options[key], todo)
    gated, biased = not GATED.isdisjoint(options), "disable_bias_linear" not in options
    grouped = "group_query_attention" in options
    default = int(4 * hidden * 2 / 3 / 64) * 64 if "swiglu" in options else 4 * hidden
    width = given(sizes, name, "ffn_hidden_size", default)
    rotary = options.get("position_embedding_type") == "rope" or (
        "use_rotary_position_embeddings" in options
    )
    learned = options.get("position_embedding_type", LEARNED) == LEARNED and not rotary
    experts = given(sizes, name, "num_experts", 0)
    return Decoder(
        name, hidden, number(sizes, name, "num_layers"), heads,
        key_heads(
            number(sizes, name, "num_query_groups") if grouped else heads, heads,
            f"{name}: num_query_groups",
        ),
        given(sizes, name, "kv_channels", 0)
        or head_width(hidden, heads, f"{name}: num_attention_heads"),
        width, vocabulary, gated=gated,
        norm="rmsnorm" if options.get("normalization") == "RMSNorm" else "layernorm",
        qkv_bias=biased or "add_qkv_bias" in options, out_bias=biased, mlp_bias=biased,
        tied="untie_embeddings_and_output_weights" not in options,
        positions=number(sizes, name, "max_position_embeddings", "seq_length") if learned else 0,
        experts=experts, per_token=given(sizes, name, "moe_router_topk", 2) if experts else 0,
        expert_intermediate=given(sizes, name, "moe_ffn_hidden_size", width) if experts else 0,
        shared_intermediate=given(sizes, name, "moe_shared_expert_intermediate_size", 0),
        rotary_copies=rotary, head_norms="qk_layernorm" in options,
    )  # fmt: skip


def train_gpt(arguments: str | Sequence[str]) -> Decoder:
    """Read the model of ``train_gpt.py``; needs ``--vocabulary`` beside its options.

    Raises ConfigError. The vocabulary of a run is the largest token of its data, plus one.
    """
    options = parsed(arguments)
    sizes = {"layers": 4, "width": 128, "heads": 4, **numbers(options)}
    name = "train_gpt arguments"
    hidden, heads = number(sizes, name, "width"), number(sizes, name, "heads")
    if "vocabulary" not in sizes:
        raise ConfigError(
            "train_gpt arguments: --vocabulary", None,
            "the data says how many tokens there are; add --vocabulary N",
        )  # fmt: skip
    rms = options.get("norm", "rmsnorm") == "rmsnorm"
    return Decoder(
        "train_gpt", hidden, number(sizes, name, "layers"), heads, heads,
        head_width(hidden, heads, f"{name}: heads"), 4 * hidden,
        number(sizes, name, "vocabulary"), norm="rmsnorm" if rms else "layernorm",
        tied="tie_embeddings" in options, rotary_copies=True, composed_norm=True,
        attention_copies=2, held_logits=True,
    )  # fmt: skip


def of_line(arguments: str | Sequence[str]) -> Decoder:
    """Read arguments of Megatron or ``train_gpt.py``, by their options. Raises ConfigError."""
    options = parsed(arguments)
    if "num_layers" in options:
        return megatron(arguments)
    words = arguments.split() if isinstance(arguments, str) else list(arguments)
    if "layers" in options or any(Path(word).stem == "train_gpt" for word in words):
        return train_gpt(arguments)
    raise ConfigError(
        "model", " ".join(words)[:80],
        "expected Megatron's arguments (--num-layers ...) or those of train_gpt.py",
    )  # fmt: skip
