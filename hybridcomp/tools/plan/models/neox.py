"""Read decoders from GPT-NeoX's YAML files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridcomp.errors import ConfigError
from hybridcomp.foreign import one_line, parsed_yaml
from hybridcomp.tools.plan.models.decoder import Decoder
from hybridcomp.tools.plan.models.huggingface import given, head_width, key_heads, number
from hybridcomp.tools.plan.models.sizes import padded

#: vocabulary of GPT-NeoX's default tokenizer, which the files do not state
TOKENS = 50277


def read(path: Path) -> Decoder:
    """Read the decoder of a file. Raises ConfigError, OSError."""
    try:
        found = parsed_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(str(path), "YAML that cannot be read", str(error)) from None
    if not isinstance(found, dict):
        raise ConfigError(str(path), type(found).__name__, "expected a GPT-NeoX configuration")
    return decoder(found, one_line(path.name))


def decoder(config: Mapping[str, Any], name: str) -> Decoder:
    """Read the decoder of a parsed file; keys may have ``-`` or ``_``. Raises ConfigError."""
    keys = {str(key).replace("-", "_"): value for key, value in config.items()}
    hidden = number(keys, name, "hidden_size")
    heads = number(keys, name, "num_attention_heads")
    tensor = given(keys, name, "model_parallel_size", 1)
    multiple = given(keys, name, "make_vocab_size_divisible_by", 128) * tensor
    rotary = keys.get("pos_emb", "learned") == "rotary"
    gated = str(keys.get("activation", "gelu")) in ("swiglu", "geglu")
    biased = bool(keys.get("use_bias_in_attn_linear", True))
    norm = "rmsnorm" if keys.get("norm") == "rmsnorm" else "layernorm"
    width = given(keys, name, "intermediate_size", 4 * hidden)
    of_keys = given(keys, name, "num_kv_heads", heads)
    return Decoder(
        name, hidden, number(keys, name, "num_layers"), heads,
        key_heads(of_keys, heads, f"{name}: num_kv_heads"),
        head_width(hidden, heads, f"{name}: num_attention_heads"), width,
        padded(given(keys, name, "vocab_size", TOKENS), multiple), gated=gated,
        norm="rmsnorm" if norm == "rmsnorm" else "layernorm", qkv_bias=biased, out_bias=biased,
        mlp_bias=bool(keys.get("use_bias_in_mlp", not gated)),
        tied=not keys.get("no_weight_tying", False),
        positions=0 if rotary else number(keys, name, "max_position_embeddings", "seq_length"),
        parallel=bool(keys.get("gpt_j_residual", False)), rotary_copies=rotary,
    )  # fmt: skip
