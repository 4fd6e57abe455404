"""Read decoders from Hugging Face's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridcomp.errors import ConfigError
from hybridcomp.tools.plan.models.decoder import Decoder

#: model families that have the layers of ``Decoder``
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe")
#: families whose key ``attention_bias`` adds biases to all four matrices of attention;
#: ``_QKV_BIAS``: families with biases of queries, keys and values only: their key and its default
_ALL_BIASES = ("llama", "qwen3", "qwen3_moe")
_QKV_BIAS = {"qwen2": ("", True), "qwen2_moe": ("qkv_bias", True)}
GPT_LIKE = ("gpt2", "gpt_neox")
#: upper limits of the number of layers and of any other size: a search over more does not end
MOST_LAYERS, MOST = 10_000, 1 << 40


def decoder(config: Mapping[str, Any], name: str) -> Decoder:
    """Read the decoder of a parsed ``config.json``. Raises ConfigError in one sentence."""
    family = config.get("model_type")
    if family in LLAMA_LIKE:
        return _llama(config, name)
    if family in GPT_LIKE:
        return _gpt(config, name)
    raise ConfigError(
        f"{name}: model_type", family,
        f"expected one of {', '.join(LLAMA_LIKE + GPT_LIKE)}; name other models as "
        "package:callable, which are traced",
    )  # fmt: skip


def number(config: Mapping[str, Any], name: str, *keys: str) -> int:
    """Return the whole number under the first of ``keys`` in ``config``. Raises ConfigError."""
    for key in keys:
        found = config.get(key)
        if isinstance(found, int | float) and not isinstance(found, bool) and found > 0:
            most = MOST_LAYERS if "layer" in key else MOST
            if found <= most and float(found).is_integer():
                return int(found)
            todo = f"expected a whole number from 1 to {most}"
            raise ConfigError(f"{name}: {key}", found, todo)
    found = next((config[key] for key in keys if key in config), None)
    todo = "; add it" if found is None else ""
    raise ConfigError(f"{name}: {keys[0]}", found, f"expected a number above 0{todo}")


def given(config: Mapping[str, Any], name: str, key: str, default: int) -> int:
    """Return the whole number at ``key``, or ``default`` without one. Raises ConfigError."""
    return number(config, name, key) if config.get(key) else default


def head_width(hidden: int, heads: int, where: str) -> int:
    """Return the width of a head, ``hidden / heads``. Raises ConfigError for a remainder."""
    if hidden % heads:
        raise ConfigError(where, heads, f"expected a divisor of the hidden width {hidden}")
    return hidden // heads


def key_heads(found: int, heads: int, where: str) -> int:
    """Return ``found`` heads of keys if they divide those of queries; else raise ConfigError."""
    if heads % found:
        raise ConfigError(where, found, f"expected a divisor of the {heads} heads of queries")
    return found


def _llama(config: Mapping[str, Any], name: str) -> Decoder:
    """Read Llama, Mistral, Qwen and their mixtures: RMSNorm, rotary positions, SwiGLU."""
    family = config["model_type"]
    heads = number(config, name, "num_attention_heads")
    hidden = number(config, name, "hidden_size")
    blocks = number(config, name, "num_hidden_layers")
    where = f"{name}: num_attention_heads"
    width = config.get("head_dim") and number(config, name, "head_dim")
    biased = family in _ALL_BIASES and bool(config.get("attention_bias", False))
    mixture: dict[str, Any] = {}
    if family == "mixtral":
        mixture = {
            "experts": number(config, name, "num_local_experts"),
            "per_token": number(config, name, "num_experts_per_tok"),
            "expert_intermediate": number(config, name, "intermediate_size"),
        }
    elif family.endswith("_moe"):
        mixture = {
            "experts": number(config, name, "num_experts"),
            "per_token": number(config, name, "num_experts_per_tok"),
            "expert_intermediate": number(config, name, "moe_intermediate_size"),
            "shared_intermediate": given(config, name, "shared_expert_intermediate_size", 0),
            "dense_blocks": len(_dense_blocks(config, name, blocks)),
        }
        if config.get("decoder_sparse_step", 1) != 1:
            raise ConfigError(
                f"{name}: decoder_sparse_step", config["decoder_sparse_step"],
                "only mixtures in every block are known; name the model as package:callable",
            )  # fmt: skip
    if mixture and mixture["per_token"] > mixture["experts"]:
        todo = f"expected at most the {mixture['experts']} experts"
        raise ConfigError(f"{name}: num_experts_per_tok", mixture["per_token"], todo)
    return Decoder(
        name, hidden, blocks, heads,
        kv_heads=key_heads(
            given(config, name, "num_key_value_heads", heads), heads,
            f"{name}: num_key_value_heads",
        ),
        head_width=width or head_width(hidden, heads, where),
        intermediate=number(config, name, "intermediate_size"),
        vocabulary=number(config, name, "vocab_size"), gated=True, norm="rmsnorm",
        qkv_bias=bool(config.get(*_QKV_BIAS[family])) if family in _QKV_BIAS else biased,
        out_bias=biased,
        mlp_bias=bool(config.get("mlp_bias", False)),
        tied=bool(config.get("tie_word_embeddings", False)),
        head_norms=family in ("qwen3", "qwen3_moe"), **mixture,
    )  # fmt: skip


def _dense_blocks(config: Mapping[str, Any], name: str, blocks: int) -> set[int]:
    """Return the numbers of the blocks without experts. Raises ConfigError."""
    found = config.get("mlp_only_layers") or []
    if not isinstance(found, list) or not all(isinstance(one, int) for one in found):
        raise ConfigError(f"{name}: mlp_only_layers", found, "expected a list of numbers of blocks")
    return {one for one in found if 0 <= one < blocks}


def _gpt(config: Mapping[str, Any], name: str) -> Decoder:
    """Read GPT-2 and GPT-NeoX: LayerNorm, GELU, biases everywhere."""
    neox = config["model_type"] == "gpt_neox"
    hidden = number(config, name, "hidden_size", "n_embd")
    heads = number(config, name, "num_attention_heads", "n_head")
    inner = given(config, name, "n_inner", 4 * hidden)
    biased = not neox or bool(config.get("attention_bias", True))
    return Decoder(
        name, hidden, number(config, name, "num_hidden_layers", "n_layer"), heads, heads,
        head_width(hidden, heads, f"{name}: num_attention_heads"),
        given(config, name, "intermediate_size", inner), number(config, name, "vocab_size"),
        qkv_bias=biased, out_bias=biased, mlp_bias=True,
        tied=bool(config.get("tie_word_embeddings", not neox)),
        positions=0 if neox else number(config, name, "max_position_embeddings", "n_positions"),
        parallel=neox and bool(config.get("use_parallel_residual", True)), rotary_copies=neox,
    )  # fmt: skip
