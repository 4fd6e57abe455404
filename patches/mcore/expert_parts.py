"""Give the experts of megatron-core the names of Hugging Face's checkpoints.

Megatron's checkpoints have one tensor of all experts of a layer, experts first; a rank holds whole
experts, or their rows and columns where experts are tensor parallel. Hugging Face has a tensor for
each matrix of each expert. The names depend on the family, recognized by its layers: Qwen has norms
of queries and keys or a gated shared expert, Mixtral neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.patches.common.expert_names import MIXTRAL, QWEN_MOE, ExpertNames
from hybridcomp.patches.mcore.weight_parts import KEY, WeightPart

#: how Megatron's names in a layer of experts begin, after the layer's prefix
STEMS = ("mlp.router", "mlp.experts.", "mlp.shared_experts")


def names_of(config: Any) -> ExpertNames | None:
    """Return the names of a model's experts; None if it has none.

    Raises ConfigError if no known family has such experts.
    """
    if not getattr(config, "num_moe_experts", None):
        return None
    shared = bool(getattr(config, "moe_shared_expert_intermediate_size", None))
    gated = bool(getattr(config, "moe_shared_expert_gate", False))
    odd = {
        "moe_shared_expert_intermediate_size without moe_shared_expert_gate": shared and not gated,
        "moe_router_enable_expert_bias": getattr(config, "moe_router_enable_expert_bias", False),
        "add_bias_linear": getattr(config, "add_bias_linear", False),
    }
    is_qwen = shared or bool(getattr(config, "qk_layernorm", False))
    frequency = getattr(config, "moe_layer_freq", 1)
    some = frequency != 1 if isinstance(frequency, int) else not all(frequency)
    odd["dense layers without qk_layernorm"] = some and not is_qwen
    found = [name for name, is_there in odd.items() if is_there]
    if found:
        todo = (
            "names of experts are known of Mixtral, Qwen2-MoE and Qwen3-MoE; leave "
            '"names" out to publish under those of Megatron\'s checkpoints'
        )
        raise ConfigError(KEY, Shown(f"experts with {', '.join(found)}"), todo)
    return QWEN_MOE if is_qwen else MIXTRAL


def translate(
    names: ExpertNames, part: WeightPart, before: str, inside: str, kind: str
) -> Iterator[WeightPart]:
    """Translate one part of a layer of experts into parts under Hugging Face's names.

    Args:
        before: Hugging Face's prefix of the layer.
        inside: Megatron's name after its prefix of the layer, such as ``mlp.router``.
        kind: the end of Megatron's name, such as ``weight``.

    Raises ConfigError on a part that no known family has.
    """
    if (inside, kind) == ("mlp.router", "weight"):
        yield replace(part, name=f"{before}{names.router}.weight")
        return
    if (inside, kind) == ("mlp.shared_experts", "gate_weight") and names.shared_gate:
        yield replace(part, name=f"{before}{names.shared_gate}.weight")
        return
    where, _, which = inside.rpartition(".")
    if where == "mlp.experts.experts":
        number, part = part.expert()
        stem = f"{before}{names.expert(number)}"
    elif where == "mlp.shared_experts" and names.shared:
        stem = f"{before}{names.shared}"
    else:
        raise part.refused("Hugging Face's name of it is not known here")
    if (which, kind) == ("linear_fc1", "weight"):
        yield from part.gate_and_up((f"{stem}.{names.gate}.weight", f"{stem}.{names.up}.weight"))
    elif (which, kind) == ("linear_fc2", "weight"):
        yield replace(part, name=f"{stem}.{names.down}.weight")
    else:
        raise part.refused("Hugging Face's experts have no such tensor")
