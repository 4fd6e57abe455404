"""megatron-core's experts under expert parallelism: its checkpoint names, and Hugging Face's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hybridcomp
from hybridcomp.errors import ConfigError
from tests.publishing.made import received, same
from tests.publishing.test_mcore import (
    FUSED,
    LAYERS,
    TEXT,
    WIDTH,
    expected_of,
    model_like_llama,
    seen_of,
)
from tests.ranks import RunRanks
from tests.training import mcore_trainer

EXPERTS, INNER = 4, 24


def checkpointed(name: str) -> str:
    """Rename norms as Megatron's checkpoints do: after the following layer, if there is one."""
    for here, there in FUSED:
        name = name.replace(here, there)
    return name


def model_like_mixtral(**given: Any) -> tuple[Any, Any]:
    """Return a wrapped bf16 model and the model, after creating Megatron's groups."""
    return model_like_llama(
        torch.bfloat16, EXPERTS, moe_ffn_hidden_size=INNER, expert_model_parallel_size=2,
        num_moe_experts=EXPERTS, moe_router_topk=2, moe_grouped_gemm=False,
        moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none",
        params_dtype=torch.bfloat16, **given,
    )  # fmt: skip


def published(folder: Path) -> list[Any]:
    """Publish under both names, change all weights, publish again.

    Returns this rank's tensors, the errors for other models, and Megatron's logits.
    """
    mcore_trainer.prepare()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=2, expert_tensor_parallel_size=1
    )
    tensor_parallel.model_parallel_cuda_manual_seed(3)
    wrapped, model = model_like_mixtral()
    publishers = [hybridcomp.publish(wrapped, folder / one, names=one) for one in ("own", "hf")]
    for publisher in publishers:
        publisher.publish()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # as training keeps them: a rank's experts, all other weights on all ranks
            seed = dist.get_rank() % 2 if ".local_experts." in name else 7
            draws = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.copy_(parameter + 0.01 * draws)
    for publisher in publishers:
        assert not publisher.publish().full
    told: list[str] = []
    for odd in ({"qk_layernorm": True}, {"moe_router_enable_expert_bias": True}):
        other, _ = model_like_mixtral(
            **odd, **({} if "qk_layernorm" in odd else {"moe_router_score_function": "sigmoid"})
        )
        try:
            names = hybridcomp.publish(other, folder / f"odd{len(told)}", names="hf")
            told.append(str(sorted(names._divided.table)))
        except ConfigError as error:
            told.append(str(error))
    state, logits = seen_of(model)
    return [state, told, logits]


@pytest.fixture(scope="module")
def outcomes(
    module_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], tuple[Path, list[Any]]]:
    """Return a function: the folder and what the ranks return, by their number."""

    @functools.cache
    def found(world_size: int) -> tuple[Path, list[Any]]:
        folder = tmp_path_factory.mktemp("experts")
        return folder, module_ranks(world_size, published, folder)

    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_experts_have_the_names_of_checkpoints(outcomes: Any, world_size: int) -> None:
    """On four ranks two hold the same experts. Expected tensors come from the ranks' weights."""
    folder, ranks = outcomes(world_size)
    own, hf = received(folder / "own"), received(folder / "hf")
    first = ranks[0][0]
    expected = expected_of([first])
    whole = {checkpointed(name): one for name, one in first.items() if ".local_" not in name}
    found = dict(hf.tensors())
    for n in range(LAYERS):
        here, there = f"decoder.layers.{n}.", f"model.layers.{n}."
        expected[f"{there}block_sparse_moe.gate.weight"] = first[f"{here}mlp.router.weight"]
        for which in ("linear_fc1", "linear_fc2"):
            matrices = [
                ranks[expert // 2][0][
                    f"{here}mlp.experts.local_experts.{expert % 2}.{which}.weight"
                ]
                for expert in range(EXPERTS)
            ]
            whole[f"{here}mlp.experts.experts.{which}.weight"] = torch.stack(matrices)
            for expert, matrix in enumerate(matrices):
                names = ("w1", "w3") if which == "linear_fc1" else ("w2",)
                for name, part in zip(names, matrix.chunk(len(names)), strict=True):
                    expected[f"{there}block_sparse_moe.experts.{expert}.{name}.weight"] = part
    assert found.keys() == expected.keys()
    assert same(hf, expected) and same(own, whole)
    assert not torch.equal(whole[name := next(n for n in whole if "fc1" in n)][0], whole[name][2])
    for _, (qwen, refused), _ in ranks:
        assert "model.layers.1.mlp.experts.3.up_proj.weight" in qwen
        assert "model.layers.0.self_attn.q_norm.weight" in qwen
        assert refused.startswith(
            "publish.names: found experts with moe_router_enable_expert_bias; names of experts"
        )


def test_transformers_computes_the_same_with_them(outcomes: Any, tmp_path: Path) -> None:
    """Its Mixtral loads the published tensors as a checkpoint, and gives the same logits."""
    transformers = pytest.importorskip("transformers")
    save_file = pytest.importorskip("safetensors.torch").save_file
    source, ranks = outcomes(2)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    published = received(source / "hf").tensors()
    tensors = {name: value.float().contiguous() for name, value in published}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    transformers.MixtralConfig(
        vocab_size=64, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, rope_theta=10000.0,
        max_position_embeddings=16, num_local_experts=EXPERTS, num_experts_per_tok=2,
        architectures=["MixtralForCausalLM"], dtype="float32",
    ).save_pretrained(folder)  # fmt: skip
    model, told = transformers.MixtralForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    found = model(TEXT).logits
    expected = ranks[0][2]
    assert float(expected.std()) > 0.01
    torch.testing.assert_close(found, expected, rtol=0.03, atol=3e-3)


def test_a_training_publishes_its_experts(module_ranks: RunRanks, tmp_path: Path) -> None:
    """A job whose block publishes trains as without it."""
    jobs = [mcore_trainer.Job(bf16=True, steps=2, ep=2, experts=EXPERTS, lr=1e-3)]
    block = {"publish": {"to": str(tmp_path / "weights"), "wait": True}}
    jobs.append(mcore_trainer.Job(bf16=True, steps=2, ep=2, experts=EXPERTS, lr=1e-3, block=block))
    for native, own in module_ranks(2, mcore_trainer.run, jobs):
        assert not isinstance(native, str) and not isinstance(own, str), (native, own)
        assert own.losses == native.losses and own.parameters == native.parameters
    receiver = received(tmp_path / "weights")
    assert receiver.version == 2
    shapes = {name: tuple(value.shape) for name, value in receiver.tensors()}
    assert shapes["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"] == (4, 128, 32)
