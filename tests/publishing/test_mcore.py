"""megatron-core: tensor and pipeline ranks, overlapped gathers, Megatron's checkpoint names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hybridcomp
from hybridcomp.errors import PublishError
from hybridcomp.publishing.records import read_manifest
from tests.publishing.made import NIGHTLY, error_of, full_disk, manifest_of, received
from tests.ranks import RunRanks
from tests.training import mcore_trainer
from tests.training.in_turn import digest
from tests.training.mcore_trainer import Job, run

STEPS = 3
#: of models like Llama and Mixtral
LAYERS, WIDTH, TEXT = 2, 32, torch.arange(16).view(1, -1) * 3
JOBS = [
    Job(bf16=True, steps=STEPS, lr=1e-3, distributed_optimizer=True, overlap=True),
    Job(bf16=True, steps=STEPS, lr=1e-3, tp=2),
    Job(bf16=True, steps=STEPS, lr=1e-3, pp=2, distributed_optimizer=True),
]  # fmt: skip
#: norms that Megatron's checkpoints name after the following layer
FUSED = (
    (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"),
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
)


def candidates(whole: Tensor, rank: int) -> set[str]:
    """Return digests of a parameter's possible parts: whole, half its rows, or half its columns."""
    halves = [
        whole.chunk(2, dim)[rank] for dim in range(min(2, whole.dim())) if whole.shape[dim] > 1
    ]
    return {digest(part) for part in (whole, *halves)}


def test_versions_are_what_the_ranks_hold(module_ranks: RunRanks, tmp_path: Path) -> None:
    jobs = JOBS if NIGHTLY else JOBS[:2]
    blocks = [{"publish": {"to": str(tmp_path / str(n)), "wait": True}} for n in range(len(jobs))]
    published = [replace(job, block=block) for job, block in zip(jobs, blocks, strict=True)]
    outcomes = module_ranks(2, run, [*jobs, *published])
    for number, job in enumerate(jobs):
        receiver = received(tmp_path / str(number))
        assert receiver.version == STEPS
        found = dict(receiver.tensors())
        assert {value.dtype for value in found.values()} == {torch.bfloat16}
        seen = set()
        for rank, ranks in enumerate(outcomes):
            native, own = ranks[number], ranks[len(jobs) + number]
            assert not isinstance(native, str) and not isinstance(own, str), (native, own)
            assert own.losses == native.losses and own.parameters == native.parameters
            for name, held in own.parameters.items():
                name = name.removeprefix("0.module.")
                for here, there in FUSED:
                    name = name.replace(here, there)
                if job.pp == 2:  # one layer per stage
                    name = name.replace("layers.0.", f"layers.{rank}.")
                seen.add(name)
                assert held in candidates(found[name], rank if job.tp == 2 else 0), name
        assert seen == set(found)
        last = read_manifest(manifest_of(tmp_path / str(number), STEPS).read_bytes(), "")
        assert not last.full and last.weights == sum(value.numel() for value in found.values())


@pytest.fixture(scope="module")
def of_llama(
    module_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Tensor], list[list[Any]]]:
    """Return what a receiver holds of a published Llama, and what the ranks have of it."""
    folder = tmp_path_factory.mktemp("llama")
    ranks = module_ranks(2, llama, folder)
    return {name: value.float() for name, value in received(folder).tensors()}, ranks


def model_like_llama(dtype: torch.dtype, experts: int = 0, **given: Any) -> tuple[Any, Any]:
    """Return a small wrapped model like Llama, or like Mixtral with ``experts``, and the model."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=4, num_query_groups=2,
        ffn_hidden_size=48, gated_linear_unit=True, add_bias_linear=False,
        activation_func=torch.nn.functional.silu, use_cpu_initialization=True,
        gradient_accumulation_fusion=False, bias_activation_fusion=False, bias_dropout_fusion=False,
        persist_layer_norm=False, normalization="RMSNorm", masked_softmax_fusion=False,
        hidden_dropout=0.0, attention_dropout=0.0, **given,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(
        num_experts=experts or None, normalization="RMSNorm",
        qk_layernorm=bool(given.get("qk_layernorm")),
    )  # fmt: skip
    model = GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=64, max_sequence_length=16,
        position_embedding_type="rope", share_embeddings_and_output_weights=False,
    ).to(dtype)  # fmt: skip
    for parameter in model.parameters():
        mcore_trainer.tensor_parallel_defaults(parameter)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model), model


def seen_of(model: Any) -> list[Any]:
    """Return a model's tensors and its logits of ``TEXT``, and destroy Megatron's groups."""
    from megatron.core import parallel_state

    state = {name: value.detach().clone() for name, value in model.named_parameters()}
    ahead = torch.ones(1, 1, 16, 16).triu(1).bool()
    logits = model(TEXT, torch.arange(16).view(1, -1), ahead).detach().float()
    parallel_state.destroy_model_parallel()
    mcore_trainer.destroy_groups()
    return [state, logits]


def expected_of(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return Hugging Face's tensors of a model but its MLPs, from its tensor ranks' weights."""

    def joined(name: str, dim: int = 0) -> Tensor:
        return torch.cat([rank[name] for rank in ranks], dim)

    found = {
        "model.embed_tokens.weight": joined("embedding.word_embeddings.weight"),
        "lm_head.weight": joined("output_layer.weight"),
        "model.norm.weight": ranks[0]["decoder.final_layernorm.weight"],
    }
    for n in range(LAYERS):
        here, there = f"decoder.layers.{n}.", f"model.layers.{n}."
        attention = f"{here}self_attention.linear_"
        qkv = joined(f"{attention}qkv.weight").view(2, 4, 8, WIDTH)
        found |= {
            f"{there}self_attn.q_proj.weight": qkv[:, :2].reshape(WIDTH, WIDTH),
            f"{there}self_attn.k_proj.weight": qkv[:, 2].reshape(16, WIDTH),
            f"{there}self_attn.v_proj.weight": qkv[:, 3].reshape(16, WIDTH),
            f"{there}self_attn.o_proj.weight": joined(f"{attention}proj.weight", 1),
            f"{there}input_layernorm.weight": ranks[0][f"{here}input_layernorm.weight"],
            f"{there}post_attention_layernorm.weight": ranks[0][f"{here}pre_mlp_layernorm.weight"],
        }
    return found


def llama(folder: Path) -> list[Any]:
    """Publish a Llama of two tensor ranks; return whether the last version is full, and its own."""
    mcore_trainer.prepare()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(3)
    wrapped, model = model_like_llama(torch.float32, tensor_model_parallel_size=2)
    publisher = hybridcomp.publish(wrapped, folder, names="hf", dtype="bf16")
    publisher.publish()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * 1.01).bfloat16())
    return [publisher.publish().full, *seen_of(model)]


def test_a_model_like_llama_has_the_names_of_hugging_face(of_llama: Any) -> None:
    """Expected tensors come from both ranks' weights, computed differently from the adapter."""
    found, ((full, first, _), (_, second, _)) = of_llama
    assert not full
    expected = expected_of([first, second])
    for n in range(LAYERS):
        here, there = f"decoder.layers.{n}.mlp.", f"model.layers.{n}.mlp."
        down = [rank[f"{here}linear_fc2.weight"] for rank in (first, second)]
        expected[f"{there}down_proj.weight"] = torch.cat(down, 1)
        halves = [rank[f"{here}linear_fc1.weight"].chunk(2) for rank in (first, second)]
        for which, name in enumerate(("gate_proj", "up_proj")):
            expected[f"{there}{name}.weight"] = torch.cat([half[which] for half in halves])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_transformers_computes_the_same_with_them(of_llama: Any) -> None:
    """Its model accepts every published tensor, by name and shape, and gives the same logits."""
    transformers = pytest.importorskip("transformers")
    tensors, ranks = of_llama
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, max_position_embeddings=16,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).float()
    model.load_state_dict(tensors, strict=True)
    found = model(TEXT).logits
    expected = torch.cat([logits for *_, logits in ranks], -1)
    assert float(expected.std()) > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_the_block_asks_for_names(module_ranks: RunRanks, tmp_path: Path) -> None:
    """GPT-2's names, from a training job."""
    block = {"publish": {"to": str(tmp_path / "gpt"), "names": "hf", "wait": True}}
    job = Job(bf16=True, steps=2, lr=1e-3, tp=2, block=block)
    for (outcome,) in module_ranks(2, run, [job]):
        assert not isinstance(outcome, str), outcome
    receiver = received(tmp_path / "gpt")
    shapes = {name: tuple(value.shape) for name, value in receiver.tensors()}
    assert receiver.version == 2 and shapes["transformer.h.1.attn.c_attn.weight"] == (32, 96)
    assert shapes["transformer.wte.weight"] == (32, 32) and "lm_head.weight" in shapes
    assert shapes["transformer.h.0.mlp.c_fc.weight"] == (32, 128)


def fails_once(folder: Path) -> list[Any]:
    """Train a pipeline with a version in the middle that cannot be written, and without any."""
    job = Job(bf16=True, steps=4, lr=1e-3, pp=2, distributed_optimizer=True)
    (native,) = run([job])
    assert not isinstance(native, str), native
    job = replace(job, block={"publish": {"to": str(folder), "wait": True}})
    told, losses = [], []
    with mcore_trainer.armed(job):
        mcore_trainer.initialize(job)
        chunks, optimizer = mcore_trainer.build(job)
        for step in range(job.steps):
            with full_disk(step == 1, rank=1):
                try:
                    losses += mcore_trainer.train_step(job, chunks, optimizer, step)
                except PublishError as error:
                    told.append(str(error))
                    losses += native.losses[step : step + 1]
        held = mcore_trainer._digests(chunks)
    return [held == native.parameters, losses == native.losses, told]


def test_a_version_that_fails_changes_nothing_of_the_training(
    module_ranks: RunRanks, tmp_path: Path
) -> None:
    for same_weights, same_losses, told in module_ranks(2, fails_once, tmp_path):
        assert same_weights and same_losses and len(told) == 1
        assert "rank 1: OSError" in told[0]
    assert received(tmp_path).version == 3  # one of the four steps was not published


def other_parameters(folder: Path) -> list[str]:
    """Change a model's weights object after the first version; return this rank's error."""
    mcore_trainer.run([])
    told = []
    for number in range(3):
        job = Job(bf16=True, tp=2)
        with mcore_trainer.armed(job):
            mcore_trainer.initialize(job)
            (chunk,), _ = mcore_trainer.build(job)
            publisher = hybridcomp.publish(chunk, folder / str(number))
            publisher.publish()
            norm = chunk.module.module.decoder.final_layernorm
            if number == 0:
                chunk.half()
            elif number == 1:
                norm.weight = torch.nn.Parameter(norm.weight.detach().clone())
            else:
                norm.weight.data = norm.weight.detach().clone()
            told.append(error_of(publisher.publish))
            publisher.close()
    return told


def test_other_parameters_are_refused_by_name(module_ranks: RunRanks, tmp_path: Path) -> None:
    for dtype, swapped, moved in module_ranks(2, other_parameters, tmp_path):
        assert "of bfloat16, found" in dtype and "of float16" in dtype
        assert "final_layernorm.weight: it is another Parameter" in swapped
        assert "final_layernorm.weight: its values are elsewhere than they were" in moved
