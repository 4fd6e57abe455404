"""Refuse engines that cannot use 16-bit weights unchanged, each with a one-line error."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hybridcomp.errors import PublishError
from hybridcomp.escaping import one_line
from hybridcomp.inference.layout import LoaderLayout

#: dtypes of weights that are not quantized
PLAIN = (torch.bfloat16, torch.float16, torch.float32)
#: Hugging Face's names of the output head and the embedding, in the families that engines load
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
LAYER = re.compile(r"model\.layers\.(\d+)\.")
TODO = "start the engine with the weights in 16 bits, without a quantization"


def refuse_quantized(asked: object, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise PublishError if an engine computes with quantized weights.

    Args:
        asked: the engine's quantization setting; None or empty: not quantized.
        tensors: the engine's parameters, of which 8-bit integers and floats count as quantized.
    """
    if asked:
        raise PublishError(
            f"the engine's weights are quantized ({one_line(asked)}): exact 16-bit values cannot "
            f"be written into them; {TODO}"
        )
    for name, tensor in tensors:
        if tensor.dtype not in PLAIN:
            raise PublishError(
                f"{one_line(name)}: expected a weight of 16 bits in the engine, found "
                f"{tensor.dtype}: quantized weights take no exact values; {TODO}"
            )


def refuse_configuration(config: Any, shapes: Mapping[str, Any], aliases: Iterable[str]) -> None:
    """Raise PublishError if the published model is not the engine's model.

    Args:
        config: transformers' configuration of the engine's model; missing keys, or all keys if
            None, are not compared.
        shapes: the published shapes by name.
        aliases: names of tied weights that are published under another name.
    """
    todo = "start the engine with the configuration of the trained model"
    adapter = next((name for name in shapes if name.startswith("base_model.")), None)
    if adapter is not None:
        raise PublishError(
            f"{one_line(adapter)} is a name of PEFT's: publish what the model computes with "
            "(publish.lora: merged), or load adapters alone with AdapterFolder"
        )
    is_tied, own = getattr(config, "tie_word_embeddings", None), HEAD in shapes
    if is_tied and own or (is_tied is False and HEAD in aliases):
        mine, theirs = ("", "not ") if is_tied else ("not ", "")
        raise PublishError(
            f"{HEAD} is {mine}tied to the embedding in the engine and {theirs}tied in the trained "
            f"model (tie_word_embeddings); {todo}"
        )
    layers = [int(found[1]) + 1 for name in shapes if (found := LAYER.match(name))]
    vocabulary = [int(shape[0]) for name, shape in shapes.items() if name == EMBEDDING]
    # layers that predict further tokens (MTP) may follow the model's layers
    further = getattr(config, "num_nextn_predict_layers", 0) or 0
    for key, sizes, more in (("num_hidden_layers", layers, further), ("vocab_size", vocabulary, 0)):
        wanted = getattr(config, key, None)
        fits = not isinstance(wanted, int) or wanted <= max(sizes, default=wanted) <= wanted + more
        if not fits:
            raise PublishError(
                f"{key}: the engine has {wanted}, the trained model {max(sizes)}; {todo}"
            )


def are_eight_bits(
    weights: Mapping[str, Tensor], asked: object, tensors: Iterable[tuple[str, Tensor]]
) -> bool:
    """Return whether weights were published in an engine's 8-bit format (``publish.as``).

    Raises PublishError if 8-bit weights meet an engine that computes in 16 bits, or 16-bit weights
    an engine that is quantized. ``asked``, ``tensors``: as for ``refuse_quantized``.
    """
    is_eight = any(tensor.dtype == torch.float8_e4m3fn for tensor in weights.values())
    if not is_eight:
        refuse_quantized(asked, tensors)
    elif not asked:
        raise PublishError(
            "weights are published in 8 bits, with scales (publish.as), and the engine computes in "
            "16: start it from a checkpoint that is quantized in the same way, or leave out as"
        )
    return is_eight


def refuse_unknown(layout: LoaderLayout, is_packed: bool) -> None:
    """Raise PublishError if an engine's loader rejected a weight when ``layout`` was learned.

    ``is_packed``: whether the engine has emptied weights, so that only unknown names count: copies
    of known names fail as well.
    """
    names = ("ValueError", "KeyError")  # errors that loaders raise for an unknown name
    for name, why in layout.unknown.items():
        raised = why.partition(":")[0]
        if raised in names or (raised.endswith("Error") and not is_packed):
            raise PublishError(
                f"{one_line(name)}: the engine's loader does not take it ({one_line(why)}): "
                "publish the names and shapes of its checkpoints"
            )


def refuse_dtype(wanted: torch.dtype, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise PublishError if published 16-bit weights do not have the engine's dtype."""
    for name, tensor in weights:
        if tensor.dtype in PLAIN[:2] and tensor.dtype != wanted:
            raise PublishError(
                f"{one_line(name)}: it is published in {tensor.dtype}, the engine computes in "
                f"{wanted}: values would be rounded; start the engine with dtype "
                f"{str(tensor.dtype).removeprefix('torch.')}"
            )
