"""Translate parts of megatron-core's parameters into Hugging Face's names, shapes and shards.

Megatron fuses what Hugging Face keeps apart: `linear_qkv` has, for each group of heads, the rows of
its queries, of its key and of its value; `linear_fc1` of a gated MLP has all rows of the gate, then
those of the up projection. Every part is translated in the checkpoint coordinates that Megatron
gives it: a rank names only its own parts, and no rank needs a whole tensor. GPT-2 has its matrices
transposed; a part is then read as a transposed view.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.patches.common.expert_names import ExpertNames
from hybridcomp.patches.mcore import expert_parts
from hybridcomp.patches.mcore.weight_parts import KEY, WeightPart

EMBEDDING = "embedding.word_embeddings"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Family:
    """Names of one architecture: outside of layers, and in layers after a prefix.

    Attributes:
        outside, inside: Megatron's name without ``.weight`` or ``.bias`` -> Hugging Face's.
        layer: the prefix of a layer, with ``{}`` for its number.
        qkv: names of queries, keys and values; all equal if they are one tensor.
        gated: names of gate and up projection, None without a gate.
        is_transposed: whether matrices in layers are transposed.
    """

    outside: dict[str, str]
    inside: dict[str, str]
    layer: str
    qkv: tuple[str, str, str]
    gated: tuple[str, str] | None
    is_transposed: bool


LLAMA = Family(
    {
        EMBEDDING: "model.embed_tokens", "decoder.final_layernorm": "model.norm",
        "output_layer": "lm_head",
    },
    {
        "input_layernorm": "input_layernorm",
        "self_attention.linear_qkv.layer_norm": "input_layernorm",
        "self_attention.q_layernorm": "self_attn.q_norm",
        "self_attention.k_layernorm": "self_attn.k_norm",
        "self_attention.linear_proj": "self_attn.o_proj",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_fc1.layer_norm": "post_attention_layernorm",
        "mlp.linear_fc2": "mlp.down_proj",
    },
    "model.layers.{}.", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"), False,
)  # fmt: skip
GPT2 = Family(
    {
        EMBEDDING: "transformer.wte",
        "embedding.position_embeddings": "transformer.wpe",
        "decoder.final_layernorm": "transformer.ln_f", "output_layer": "lm_head",
    },
    {
        "input_layernorm": "ln_1", "self_attention.linear_qkv.layer_norm": "ln_1",
        "self_attention.linear_proj": "attn.c_proj", "pre_mlp_layernorm": "ln_2",
        "mlp.linear_fc1.layer_norm": "ln_2", "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    },
    "transformer.h.{}.", ("attn.c_attn",) * 3, None, True,
)  # fmt: skip


@dataclass(frozen=True)
class HuggingFaceNames:
    """Translates the parts of one model.

    Attributes:
        family: the names.
        heads: number of query heads.
        groups: number of key and value heads.
        width: values of a head.
        experts: names of the experts; None: the model has no experts.
    """

    family: Family
    heads: int
    groups: int
    width: int
    experts: ExpertNames | None = None

    @classmethod
    def of(cls, module: Any) -> HuggingFaceNames:
        """Return the names for a megatron-core model. Raises ConfigError on an unknown family."""
        config = module.config
        positions = getattr(module, "position_embedding_type", None)
        gated = bool(config.gated_linear_unit)
        known = {(True, "rope"): LLAMA, (False, "learned_absolute"): GPT2}
        family = known.get((gated, str(positions)))
        odd = [
            name
            for name in ("multi_latent_attention", "mtp_num_layers")
            if getattr(config, name, None)
        ]
        if not gated and getattr(config, "num_moe_experts", None):
            odd.append("num_moe_experts")
        if family is None or odd:
            found = ", ".join([f"positions {positions!r}", f"gated {gated}", *odd])
            todo = (
                'names are known of gated models with "rope" (Llama, Qwen) and of GPT-2; leave '
                '"names" out to publish under those of Megatron\'s checkpoints'
            )
            raise ConfigError(KEY, Shown(f"a model with {found}"), todo)
        heads = config.num_attention_heads
        groups = getattr(config, "num_query_groups", None) or heads
        width = getattr(config, "kv_channels", None) or 0
        return cls(family, heads, groups, width, expert_parts.names_of(config))

    def translate(self, part: WeightPart) -> Iterator[WeightPart]:
        """Yield ``part``, split if needed, under Hugging Face's names. Raises ConfigError."""
        stem, _, kind = part.name.rpartition(".")
        if kind.startswith("layer_norm_"):  # from a fused layer of Transformer Engine
            stem, kind = f"{stem}.layer_norm", kind.removeprefix("layer_norm_")
        family, layer = self.family, _LAYER.fullmatch(stem)
        if layer is None:
            yield replace(part, name=f"{self._known(family.outside, stem, part)}.{kind}")
            return
        before, inside = family.layer.format(layer[1]), layer[2]
        if inside == "self_attention.linear_qkv":
            found = self._queries_keys_values(part, before, kind)
        elif inside == "mlp.linear_fc1" and family.gated is not None:
            gate, up = (f"{before}{name}.{kind}" for name in family.gated)
            found = part.gate_and_up((gate, up))
        elif self.experts is not None and inside.startswith(expert_parts.STEMS):
            found = expert_parts.translate(self.experts, part, before, inside, kind)
        else:
            name = f"{before}{self._known(family.inside, inside, part)}.{kind}"
            found = iter([replace(part, name=name)])
        for one in found:
            yield one.transposed() if family.is_transposed else one

    def _known(self, names: dict[str, str], name: str, part: WeightPart) -> str:
        if name not in names:
            raise part.refused("Hugging Face's name of it is not known here")
        return names[name]

    def _queries_keys_values(
        self, part: WeightPart, before: str, kind: str
    ) -> Iterator[WeightPart]:
        """Yield this part's rows of queries, key and value, for each group of heads."""
        each = self.heads // self.groups
        unit = (each + 2) * self.width  # rows of a group
        low, high = part.offset[0], part.offset[0] + part.local[0]
        if part.shape[0] != self.groups * unit or low % unit or high % unit:
            todo = "expected whole groups of heads on a rank: use at most as many tensor ranks"
            raise ConfigError(KEY, Shown(f"{part.name} {part.shape}, {low} to {high}"), todo)
        names = [f"{before}{name}.{kind}" for name in self.family.qkv]
        sizes = [self.heads * self.width, self.groups * self.width, self.groups * self.width]
        starts = [0, 0, 0]
        if names[0] == names[1]:  # one tensor: all queries, then all keys, then all values
            starts, sizes = [0, sizes[0], sizes[0] + sizes[1]], [sum(sizes)] * 3
        for group in range(low // unit, high // unit):
            at = group * unit - low
            for which, count in enumerate((each, 1, 1)):
                rows = count * self.width
                to = starts[which] + group * rows
                yield part.rows(names[which], at, at + rows, to, sizes[which])
                at += rows
