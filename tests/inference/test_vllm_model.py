"""vLLM's Llama on CPUs: reloads and patches are exact on every worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridcomp.inference.shares import Shares
from hybridcomp.publishing import Publisher
from hybridcomp.publishing.destinations import Folder
from tests.ranks import run_ranks
from tests.scripts_on_ranks import free_port

pytestmark = pytest.mark.nightly
PACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def trained() -> nn.Module:
    """Return the trained model, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        )
    ).to(torch.bfloat16)  # fmt: skip
    return model


def served(folder: Path, port: int) -> tuple[Any, nn.Module]:
    """Return configuration and model of this worker, tensor parallel over all ranks."""
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    platforms._current_platform = CpuPlatform()
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    rank, count = dist.get_rank(), dist.get_world_size()
    config = EngineArgs(
        model=str(folder), dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True,
        tensor_parallel_size=count,
    ).create_engine_config()  # fmt: skip
    with set_current_vllm_config(config):
        init_distributed_environment(count, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        initialize_model_parallel(count)
        model: nn.Module = get_model(vllm_config=config)
    return config, model


def expected(source: nn.Module, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Return this worker's weights: rows of most matrices, columns of a block's last ones."""
    rank, count = dist.get_rank(), dist.get_world_size()
    whole = dict(source.named_parameters())
    for name in names:
        pack = next((pack for pack in PACKED if pack in name), "")
        parts = [name.replace(pack, part) for part in PACKED[pack]] if pack else [name]
        across = 1 if "o_proj" in name or "down_proj" in name else 0
        cut = 1 if "norm" in name else count
        rows = [whole[part].detach().chunk(cut, across)[rank % cut] for part in parts]
        yield name, torch.cat(rows)


def followed(folder: Path, port: int) -> list[str]:
    """Publish and load six versions; return the parameters that differ."""
    from hybridcomp.inference import vllm_plugin

    source = trained()
    if dist.get_rank() == 0:
        source.save_pretrained(folder / "model")  # type: ignore[operator]
    dist.barrier()
    config, model = served(folder / "model", port)
    vllm_plugin.register()
    from vllm.config import set_current_vllm_config
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    engine = WeightTransferEngineFactory.create_engine(
        SimpleNamespace(backend="hybridcomp"), config, torch.device("cpu"), model
    )
    engine.init_transfer_engine(engine.parse_init_info({"source": str(folder / "weights")}))
    shares = Shares("bf16", dist.get_rank(), dist.get_world_size())
    publisher, wrong = None, []
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        shares.take(source.named_parameters())
        publisher = publisher or Publisher(shares.weights(), Folder(folder / "weights"))
        version = publisher.publish().version
        with set_current_vllm_config(config):  # as vLLM's worker calls an engine
            engine.start_weight_update()
            engine.receive_weights(engine.parse_update_info({"version": version}))
            engine.finish_weight_update()
        mine = {name: one.detach() for name, one in model.named_parameters()}
        for name, one in expected(source, list(mine)):
            if mine[name].shape != one.shape or not torch.equal(
                mine[name].view(torch.int16), one.view(torch.int16)
            ):
                wrong.append(f"version {version}: {name} {tuple(mine[name].shape)}")
        with torch.no_grad():
            for parameter in source.parameters():
                moved = torch.rand(parameter.shape, generator=generator) < 0.05
                parameter.add_((moved * 0.01).to(torch.bfloat16))
    return wrong


@pytest.mark.parametrize("workers", [1, 2])
def test_a_llama_of_vllm_is_exact(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm", exc_type=ImportError)
    monkeypatch.setitem(os.environ, "VLLM_TARGET_DEVICE", "cpu")
    assert run_ranks(workers, followed, tmp_path, free_port()) == [[]] * workers
