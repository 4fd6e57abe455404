"""Translation of Megatron's fused and sharded tensors: values are at Hugging Face's positions.

``tests/publishing/test_mcore.py`` has queries, keys, values and gates of a model like Llama.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridcomp.errors import ConfigError
from hybridcomp.patches.common.expert_names import MIXTRAL, QWEN_MOE, ExpertNames
from hybridcomp.patches.mcore.hugging_face_names import GPT2, LLAMA, HuggingFaceNames
from hybridcomp.patches.mcore.weight_parts import WeightPart
from hybridcomp.patches.mcore.weights import _check_all_there
from hybridcomp.publishing import EngineWeights, stretch_of_block
from hybridcomp.publishing.weights import named, uncovered

HIDDEN, WIDTH = 10, 3
LAYER = "decoder.layers.7."


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def cut(name: str, whole: Tensor, ranks: int, dim: int = 0) -> list[WeightPart]:
    """Return the shards of a tensor on each of ``ranks`` tensor ranks."""
    found = []
    for rank, part in enumerate(whole.chunk(ranks, dim)):
        offset = [0] * whole.dim()
        offset[dim] = rank * part.shape[dim]
        shape = (tuple(whole.shape), tuple(offset), tuple(part.shape))
        found.append(WeightPart(f"{LAYER}{name}", *shape, part.contiguous()))
    return found


def joined(names: HuggingFaceNames, parts: list[WeightPart]) -> dict[str, Tensor]:
    """Join the translated parts; each value comes from a single part."""
    found: dict[str, Tensor] = {}
    stretches = []
    for one in (new for part in parts for new in names.translate(part)):
        stretch = stretch_of_block(one.name, one.shape, one.offset, one.local)
        assert stretch is not None
        stretches.append(stretch)
        whole = found.setdefault(one.name, torch.full(one.shape, float("nan")))
        target = stretch.of(whole.view(-1))
        target.copy_(one.values.reshape(target.shape))
    table = {name: (tuple(whole.shape), "bf16") for name, whole in found.items()}
    assert uncovered(table, stretches) == []
    return found


def fused(queries: Tensor, keys: Tensor, entries: Tensor, groups: int) -> Tensor:
    """Return Megatron's rows: by group its queries, its key, its value."""
    rows = [one.chunk(groups) for one in (queries, keys, entries)]
    return torch.cat([part for group in zip(*rows, strict=True) for part in group])


@pytest.mark.parametrize("ranks", [1, 2])
def test_gpt_2_has_its_matrices_transposed(ranks: int) -> None:
    heads = 4
    names = HuggingFaceNames(GPT2, heads, heads, WIDTH)
    q, k, v = (values(heads * WIDTH, HIDDEN) + n for n in range(3))
    whole = fused(q, k, v, heads)
    found = joined(names, cut("self_attention.linear_qkv.weight", whole, ranks))
    assert torch.equal(found["transformer.h.7.attn.c_attn.weight"], torch.cat([q, k, v]).t())
    bias = [one[:, 0].contiguous() for one in (q, k, v)]
    found = joined(
        names, cut("self_attention.linear_qkv.bias", fused(bias[0], bias[1], bias[2], heads), ranks)
    )
    assert torch.equal(found["transformer.h.7.attn.c_attn.bias"], torch.cat(bias))
    for name, there, dim in (
        ("mlp.linear_fc1", "mlp.c_fc", 0),
        ("mlp.linear_fc2", "mlp.c_proj", 1),
        ("self_attention.linear_proj", "attn.c_proj", 1),
    ):
        matrix = values(6, 8)
        found = joined(names, cut(f"{name}.weight", matrix, ranks, dim))
        assert torch.equal(found[f"transformer.h.7.{there}.weight"], matrix.t())


@pytest.mark.parametrize(
    ("name", "there"),
    [
        (f"{LAYER}self_attention.linear_qkv.layer_norm_weight", "layers.7.input_layernorm.weight"),
        (f"{LAYER}input_layernorm.weight", "layers.7.input_layernorm.weight"),
        (f"{LAYER}mlp.linear_fc1.layer_norm_weight", "layers.7.post_attention_layernorm.weight"),
        (f"{LAYER}pre_mlp_layernorm.weight", "layers.7.post_attention_layernorm.weight"),
        ("decoder.final_layernorm.weight", "norm.weight"),
        ("embedding.word_embeddings.weight", "embed_tokens.weight"),
    ],
)
def test_names_of_what_is_not_fused(name: str, there: str) -> None:
    part = WeightPart(name, (4,), (0,), (4,), values(4))
    (found,) = HuggingFaceNames(LLAMA, 4, 4, WIDTH).translate(part)
    assert found.name == f"model.{there}" and found.values is part.values


def test_engines_whose_names_are_their_modules_have_no_others() -> None:
    weights = EngineWeights({}, {}, [], (0,))
    assert named(weights, "own") is weights
    for names, text in (("hf", "leave it out"), ("megatron", "expected one of own, hf")):
        with pytest.raises(ConfigError, match=f"publish.names: found '{names}'.*{text}"):
            named(weights, names)


def model(**given: Any) -> Any:
    config = {"gated_linear_unit": True, "num_attention_heads": 8, "num_query_groups": 2}
    config |= {"kv_channels": 16, **given}
    positions = config.pop("positions", "rope")
    return SimpleNamespace(config=SimpleNamespace(**config), position_embedding_type=positions)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, MIXTRAL),
        ({"qk_layernorm": True, "moe_layer_freq": [0, 1]}, QWEN_MOE),
        ({"moe_shared_expert_intermediate_size": 8, "moe_shared_expert_gate": True}, QWEN_MOE),
        ({"moe_shared_expert_intermediate_size": 8}, "without moe_shared_expert_gate"),
        ({"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias"),
        ({"moe_layer_freq": 2}, "dense layers without qk_layernorm"),
    ],
)
def test_families_of_experts(given: dict[str, Any], names: ExpertNames | str) -> None:
    module = model(num_moe_experts=4, **given)
    if isinstance(names, str):
        with pytest.raises(ConfigError, match=f"found experts with .*{names}; names of experts"):
            HuggingFaceNames.of(module)
    else:
        assert HuggingFaceNames.of(module).experts == names


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_on_tensor_ranks(ranks: int) -> None:
    """Expert 3 of 5, with rows sharded over tensor ranks, and a shared expert."""
    names = HuggingFaceNames(LLAMA, 4, 4, WIDTH, QWEN_MOE)
    gate, up, down = values(8, HIDDEN), values(8, HIDDEN) + 3, values(HIDDEN, 8)
    for stem, there in (("experts.experts", "experts.3"), ("shared_experts", "shared_expert")):
        parts = cut(f"mlp.{stem}.linear_fc1.weight", torch.cat([gate, up]), 2 * ranks)
        parts += cut(f"mlp.{stem}.linear_fc2.weight", down, ranks, 1)
        if stem == "experts.experts":  # all experts in one tensor
            parts = [
                replace(one, shape=(5, *one.shape), offset=(3, *one.offset), local=(1, *one.local))
                for one in parts
            ]
        found = joined(names, parts)
        expected = {"gate": gate, "up": up, "down": down}
        assert found.keys() == {f"model.layers.7.mlp.{there}.{n}_proj.weight" for n in expected}
        for name, whole in expected.items():
            assert torch.equal(found[f"model.layers.7.mlp.{there}.{name}_proj.weight"], whole)
    (one,) = cut("mlp.shared_experts.gate_weight", values(1, HIDDEN), 1)
    (found_gate,) = names.translate(one)
    assert found_gate.name == "model.layers.7.mlp.shared_expert_gate.weight"
    for name, shape in (("router.bias", (5,)), ("experts.experts.linear_fc2.bias", (1, 8))):
        part = WeightPart(f"{LAYER}mlp.{name}", shape, (0,) * len(shape), shape, values(*shape))
        with pytest.raises(ConfigError, match=rf"{name} .*; Hugging Face's .* leave \"names\" out"):
            list(names.translate(part))
    two = WeightPart(f"{LAYER}mlp.experts.experts.linear_fc2.weight", (4, 3, 2), (0,) * 3,
                     (2, 3, 2), values(2, 3, 2))  # fmt: skip
    with pytest.raises(ConfigError, match="expected one expert in each part"):
        list(names.translate(two))


def test_parameters_that_checkpoints_copy_are_refused() -> None:
    """Such as those of moe_use_legacy_grouped_gemm, which are saved in another order."""
    module = torch.nn.Linear(4, 3)
    shape = ((3, 4), (0, 0), (3, 4))
    held = [WeightPart("weight", *shape, module.weight.detach())]
    held.append(WeightPart("bias", (3,), (0,), (3,), module.bias.detach()))
    _check_all_there(module, held)
    held[0] = WeightPart("weight", *shape, module.weight.detach().clone())
    with pytest.raises(ConfigError, match=r"found weight \(3, 4\); its values are not in sharded"):
        _check_all_there(module, held)


def test_other_models_are_refused_in_one_line() -> None:
    assert HuggingFaceNames.of(model()) == HuggingFaceNames(LLAMA, 8, 2, 16)
    gpt_2 = {"gated_linear_unit": False, "positions": "learned_absolute", "num_moe_experts": 4}
    for odd in ({"positions": "none"}, gpt_2, {"gated_linear_unit": False}):
        with pytest.raises(ConfigError, match="publish.names: found a model with positions"):
            HuggingFaceNames.of(model(**odd))
    names = HuggingFaceNames(LLAMA, 8, 2, 16)
    part = WeightPart(f"{LAYER}mlp.adapter.weight", (4,), (0,), (4,), values(4))
    with pytest.raises(ConfigError, match=r"found decoder.layers.7.mlp.adapter.weight"):
        list(names.translate(part))
    cut_group = WeightPart(
        f"{LAYER}self_attention.linear_qkv.weight", (192,), (0,), (48,), part.values
    )
    with pytest.raises(ConfigError, match="whole groups of heads on a rank"):
        list(names.translate(cut_group))
