"""Read decoders from GPT-NeoX's YAML files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridcomp.config.error_messages import NOTHING, show
from hybridcomp.config.sources import unreadable
from hybridcomp.errors import ConfigError
from hybridcomp.escaping import one_line, parsed_yaml
from hybridcomp.tools.plan.models.decoder import Decoder
from hybridcomp.tools.plan.models.huggingface import given, head_width, key_heads, number
from hybridcomp.tools.plan.models.sizes import padded

#: tokenizer -> tokens, for GPT-NeoX configurations, which do not state them
TOKENS = {
    "GPT2BPETokenizer": 50257, "HFGPT2Tokenizer": 50257, "HFGPT2TokenizerFast": 50257,
    "HFTokenizer": 50277, "SPMTokenizer": 32000, "CharLevelTokenizer": 512,
}  # fmt: skip
#: gated activations, which take two input matrices
GATED = frozenset({"geglu", "reglu", "bilinear", "swiglu", "glu"})
#: kinds of attention that have the blocks of ``Decoder``
ATTENTION = frozenset({"global", "flash"})


def read(path: Path) -> Decoder:
    """Read the decoder of a file. Raises ConfigError, OSError."""
    try:
        found = parsed_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise unreadable(str(path), error, "YAML") from None
    if not isinstance(found, dict):
        raise ConfigError(str(path), type(found).__name__, "expected a GPT-NeoX configuration")
    return decoder(found, one_line(path.name))


def decoder(config: Mapping[str, Any], name: str) -> Decoder:
    """Read the decoder of a parsed file; keys may have ``-`` or ``_``. Raises ConfigError."""
    keys = {str(key).replace("-", "_"): value for key, value in config.items()}
    hidden, blocks = number(keys, name, "hidden_size"), number(keys, name, "num_layers")
    heads = number(keys, name, "num_attention_heads")
    _refuse_other_blocks(keys, name, blocks)
    gated = _word(keys, name, "activation", "gelu") in GATED
    biased = _flag(keys, name, "use_bias_in_attn_linear", True)
    of_keys = given(keys, name, "num_kv_heads", heads)
    positions = _word(keys, name, "pos_emb", "learned")
    with_bias = "layernorm" in _word(keys, name, "norm", "layernorm")
    vocabulary, remark = _vocabulary(keys, name)
    return Decoder(
        name, hidden, blocks, heads, key_heads(of_keys, heads, f"{name}: num_kv_heads"),
        head_width(hidden, heads, f"{name}: num_attention_heads"),
        _width(keys, name, hidden, gated), vocabulary, gated=gated,
        norm="layernorm" if with_bias else "rmsnorm", qkv_bias=biased, out_bias=biased,
        mlp_bias=_flag(keys, name, "use_bias_in_mlp", True),
        tied=not _flag(keys, name, "no_weight_tying", False),
        positions=number(keys, name, "max_position_embeddings", "seq_length")
        if positions == "learned" else 0,
        parallel=_flag(keys, name, "gpt_j_residual", False), rotary_copies=positions == "rotary",
        head_norms=_flag(keys, name, "use_qk_layernorm", False), remark=remark,
    )  # fmt: skip


def _vocabulary(keys: Mapping[str, Any], name: str) -> tuple[int, str]:
    """Return the padded vocabulary, and a remark if it is not written but assumed by tokenizer.

    A file that names no tokenizer and pads nothing is taken for one of the Llama family; in other
    files the tokenizer hardly matters, as 50257 and 50277 tokens are padded to the same number.
    """
    multiple = given(keys, name, "make_vocab_size_divisible_by", 128)
    usual = "SPMTokenizer" if multiple == 1 else "HFTokenizer"
    tokenizer = _word(keys, name, "tokenizer_type", usual)
    known = TOKENS.get(tokenizer, 0)
    copy = "write vocab_size into a copy of the file"
    if not known and not keys.get("vocab_size"):
        todo = f"how many tokens it has is not known; {copy}, and plan with that"
        raise ConfigError(f"{name}: tokenizer_type", tokenizer, todo)
    multiple *= given(keys, name, "model_parallel_size", 1)
    remark = f"{name} does not say how many tokens there are: {known} are taken, as of {tokenizer} "
    found = padded(given(keys, name, "vocab_size", known), multiple)
    return found, "" if keys.get("vocab_size") else f"{remark}in GPT-NeoX's own files; else {copy}"


def _width(keys: Mapping[str, Any], name: str, hidden: int, gated: bool) -> int:
    """Return the rows of an MLP's second matrix, as ``ParallelMLP`` of GPT-NeoX computes them.

    The first matrix has ``intermediate_size`` columns, or two thirds of that if the activation is
    gated and so halves its width; ``mlp_multiple_of`` rounds columns and rows up.
    """
    written, factor = keys.get("intermediate_size"), keys.get("expansion_factor")
    multiple = given(keys, name, "mlp_multiple_of", 1)
    if written and factor:
        todo = "GPT-NeoX takes intermediate_size or this; keep one"
        raise ConfigError(f"{name}: expansion_factor", factor, todo)
    size = given(keys, name, "intermediate_size", 4 * hidden)
    if factor:
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < 1e6:
            raise ConfigError(f"{name}: expansion_factor", factor, "expected a number above 0")
        size = int(factor * hidden)
    columns = int(size * 2 / 3) if gated else size
    rows = padded(columns // 2 if gated else columns, multiple)
    columns = padded(columns, 2 * multiple)
    if gated and not (written or factor):
        raise ConfigError(
            f"{name}: intermediate_size", NOTHING,
            f"without it GPT-NeoX makes a gated MLP {rows} wide today, and one of 8/3 the hidden "
            f"width before; write it: {3 * _llama_like(hidden, multiple)} for "
            f"{_llama_like(hidden, multiple)}, {size} for {rows}",
        )  # fmt: skip
    if columns != (2 * rows if gated else rows):
        raise ConfigError(
            f"{name}: intermediate_size", size,
            f"GPT-NeoX makes a first matrix of {columns} columns and a second one of {rows} rows, "
            f"which do not fit; write three times the width, {3 * size}, where {size} is the width",
        )  # fmt: skip
    return rows


def _llama_like(hidden: int, multiple: int) -> int:
    return padded(int(8 * hidden / 3), multiple)


def _refuse_other_blocks(keys: Mapping[str, Any], name: str, blocks: int) -> None:
    """Raise ConfigError for blocks that are not attention and one MLP."""
    traced = "plans know blocks of full attention and one MLP; name the model as package:callable"
    if given(keys, name, "moe_num_experts", 1) > 1:
        raise ConfigError(f"{name}: moe_num_experts", keys["moe_num_experts"], traced)
    if given(keys, name, "num_unique_layers", blocks) != blocks:
        raise ConfigError(f"{name}: num_unique_layers", keys["num_unique_layers"], traced)
    for kind in _kinds(keys.get("attention_config")):
        if kind not in ATTENTION:
            raise ConfigError(f"{name}: attention_config", kind, traced)


def _kinds(written: object) -> Iterator[object]:
    """Yield the kinds of blocks in ``[[["flash"], 12]]``, or in a list with one for each block."""
    for item in written if isinstance(written, list) else [] if written is None else [written]:
        if isinstance(item, list) and item and isinstance(item[0], list):
            yield from item[0]
        else:
            yield item


def _word(keys: Mapping[str, Any], name: str, key: str, default: str) -> str:
    found = keys.get(key)
    if found is not None and not isinstance(found, str):
        raise ConfigError(f"{name}: {key}", show(found), "expected a word")
    return found or default


def _flag(keys: Mapping[str, Any], name: str, key: str, default: bool) -> bool:
    found = keys.get(key)
    if found is not None and not isinstance(found, bool):
        raise ConfigError(f"{name}: {key}", show(found), "expected true or false")
    return default if found is None else found
