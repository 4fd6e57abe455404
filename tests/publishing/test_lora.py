"""PEFT models: adapters alone, merged values under the base's names, and rejected models."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hybridcomp
from hybridcomp.errors import PublishError
from hybridcomp.inference.adapter_folder import AdapterFolder
from hybridcomp.inference.checks import refuse_configuration
from hybridcomp.publishing.checksums import bytes_of
from tests.publishing.made import error_of, received, same
from tests.ranks import RunRanks

BF16 = torch.bfloat16
PREFIX = "base_model.model.q_proj."


class Adapted(nn.Module):
    """A linear layer wrapped as by PEFT."""

    def __init__(self, adapters: tuple[str, ...] = ("default",)) -> None:
        super().__init__()
        self.base_layer = nn.Linear(8, 6, dtype=BF16)
        self.lora_A = nn.ModuleDict({name: nn.Linear(8, 2, bias=False) for name in adapters})
        self.lora_B = nn.ModuleDict({name: nn.Linear(2, 6, bias=False) for name in adapters})
        self.merged = False

    def get_delta_weight(self, adapter: str) -> Tensor:
        a, b = (getattr(self, key)[adapter].weight for key in ("lora_A", "lora_B"))
        return (b @ a) * 2.0  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base_layer(x)
        return found


class Net(nn.Module):
    """The base model: an adapted layer, and a norm."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.q_proj = layer
        self.norm = nn.LayerNorm(6, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.q_proj(x))
        return found


def made(kind: str, adapters: tuple[str, ...] = ("default",)) -> Any:
    """Return a PEFT model, or a model with its names."""
    torch.manual_seed(4)
    if kind == "peft":
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"])
        model: Any = get_peft_model(Net(nn.Linear(8, 6, dtype=BF16)), config)
        model = model.to(BF16)
        nn.init.normal_(model.base_model.model.q_proj.lora_B["default"].weight)
        return model
    model = nn.Module()
    model.base_model = nn.Module()
    model.base_model.model = Net(Adapted(adapters).to(BF16))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    model.forward = model.base_model.model.forward
    return model


def published(folder: Path, kind: str) -> list[bool]:
    """Publish adapters alone, and merged, before and after a change."""
    model = made(kind)
    layer = model.base_model.model.q_proj
    net = DistributedDataParallel(model)
    alone = hybridcomp.publish(net, folder / "alone", lora="adapters")
    merged = hybridcomp.publish(net, folder / "merged", lora="merged")
    found = []
    for _ in range(2):
        alone.publish()
        merged.publish()
        dist.barrier()
        want = {f"{PREFIX}lora_{key}.weight": getattr(layer, f"lora_{key}")["default"].weight
                for key in "AB"}  # fmt: skip
        found.append(same(received(folder / "alone"), want))
        base = layer.base_layer.weight.detach()
        whole = (base + layer.get_delta_weight("default").detach()).to(BF16)
        want = {"q_proj.weight": whole, "q_proj.bias": layer.base_layer.bias,
                "norm.weight": model.base_model.model.norm.weight,
                "norm.bias": model.base_model.model.norm.bias}  # fmt: skip
        found.append(same(received(folder / "merged"), want))
        found.append(not torch.equal(whole, base))
        dist.barrier()
        with torch.no_grad():
            layer.lora_B["default"].weight.add_(1.0)
    if kind == "names":  # merged already, as by ``merge_adapter``
        layer.merged = True
        merged.publish()
        dist.barrier()
        want["q_proj.weight"] = layer.base_layer.weight
        found.append(same(received(folder / "merged"), want))
    alone.close()
    merged.close()
    return found


@pytest.mark.parametrize("kind", ["names", "peft"])
def test_adapters_alone_and_merged(on_ranks: RunRanks, tmp_path: Path, kind: str) -> None:
    if kind == "peft":
        pytest.importorskip("peft")
    assert all(map(all, on_ranks(2, published, tmp_path, kind)))


def refused(folder: Path) -> list[str]:
    """Return errors of models that no mode supports."""
    told: list[str] = []

    def attempt(net: Any, way: str) -> None:
        where = folder / str(len(told))
        told.append(error_of(lambda: hybridcomp.publish(net, where, lora=way)))

    plain = Net(nn.Linear(8, 6, dtype=BF16))
    attempt(DistributedDataParallel(plain), "merged")
    attempt(DistributedDataParallel(made("names", ("one", "two"))), "adapters")
    attempt(DistributedDataParallel(made("names")), "other")
    sharded = made("names")
    fully_shard(sharded)
    attempt(sharded, "merged")
    saved = made("names")
    saved.base_model.model.norm.modules_to_save = nn.ModuleDict({"default": nn.Linear(2, 2)})
    attempt(DistributedDataParallel(saved), "adapters")
    dora = made("names")
    dora.base_model.model.q_proj.lora_magnitude_vector = nn.ModuleDict({"default": nn.Linear(2, 2)})
    attempt(DistributedDataParallel(dora), "merged")
    biased = made("names")  # LoraConfig(lora_bias=True)
    biased.base_model.model.q_proj.lora_B["default"].bias = nn.Parameter(torch.zeros(6))
    attempt(DistributedDataParallel(biased), "merged")
    bases = made("names")  # LoraConfig(bias="lora_only")
    bases.base_model.model.q_proj.base_layer.bias.requires_grad_()
    attempt(DistributedDataParallel(bases), "adapters")
    return told


def test_what_is_refused(on_ranks: RunRanks, tmp_path: Path) -> None:
    for none, two, other, cut, saved, dora, biased, bases in on_ranks(2, refused, tmp_path):
        assert "publish.lora: found a model without adapters" in none
        assert "found adapters one, two; expected one adapter" in two
        assert "expected one of adapters, merged" in other
        assert "the base is cut among the ranks" in cut
        assert "modules_to_save.default" in saved
        assert "lora_magnitude_vector.default.bias; neither adapters alone nor" in dora
        assert "found base_model.model.q_proj.lora_B.default.bias; neither" in biased
        assert "found base_model.model.q_proj.base_layer.bias; it trains, and" in bases
    with pytest.raises(PublishError, match="publish.lora: merged.* or load adapters alone"):
        refuse_configuration(None, {f"{PREFIX}lora_A.weight": (2, 8)}, ())


def one_version(folder: Path) -> None:
    """Publish adapters, and the whole model."""
    net = DistributedDataParallel(made("names"))
    for way in ("adapters", None):
        publisher = hybridcomp.publish(net, folder / str(way), lora=way)
        publisher.publish()
        publisher.publish()
        publisher.close()
    dist.barrier()


def test_a_folder_that_engines_load_adapters_from(on_ranks: RunRanks, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    on_ranks(2, one_version, tmp_path)
    config = {"peft_type": "LORA", "r": 2, "target_modules": {"q_proj", "k_proj"}}
    folder = AdapterFolder(tmp_path / "adapters", tmp_path / "made", config)
    for version in (1, 2):
        path = folder.update(version)
        assert path is not None
        assert path.name.startswith(f"v{version:010d}.") and folder.version == version
    assert path is not None
    found = safetensors.load_file(path / "adapter_model.safetensors")
    assert sorted(found) == [f"{PREFIX}lora_{key}.weight" for key in "AB"]
    told = json.loads((path / "adapter_config.json").read_text())
    assert told["target_modules"] == ["k_proj", "q_proj"]
    assert folder.update() is None and len(list((tmp_path / "made").iterdir())) == 2
    whole = AdapterFolder(tmp_path / "None", tmp_path / "made", config)
    with pytest.raises(PublishError, match="is no weight of an adapter; publish with lora"):
        whole.update()


def test_a_folder_that_could_not_be_written_is_written_by_the_next_update(
    on_ranks: RunRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a new job, whose versions count from 1, keeps its own."""
    safetensors: Any = ModuleType("safetensors.torch")
    safetensors.save = lambda tensors, metadata: b"".join(map(bytes_of, tensors.values()))
    monkeypatch.setitem(sys.modules, "safetensors", ModuleType("safetensors"))
    monkeypatch.setitem(sys.modules, "safetensors.torch", safetensors)
    on_ranks(2, one_version, tmp_path)
    made_by = tmp_path / "made"
    folder = AdapterFolder(tmp_path / "adapters", made_by, {})
    full = OSError(errno.ENOSPC, "No space left on device")
    no_room = mock.patch.object(Path, "write_bytes", side_effect=full)
    with no_room, pytest.raises(PublishError, match="version 2: .* cannot be written .No space"):
        folder.update()
    assert folder.version == 0 and not list(made_by.iterdir())
    for number in (7, 8, 9):
        (made_by / f"v{number:010d}").mkdir()
        os.utime(made_by / f"v{number:010d}", (number, number))
    path = folder.update()
    assert path is not None and folder.version == 2
    assert path.stat().st_mode == (made_by / "v0000000009").stat().st_mode
    left = sorted(one.name for one in made_by.iterdir())
    assert left == [path.name, "v0000000009"] and folder.update() is None
    shutil.rmtree(tmp_path / "adapters")
    on_ranks(2, one_version, tmp_path)
    another = AdapterFolder(tmp_path / "adapters", made_by, {}).update()
    assert another is not None and another.name.split(".")[0] == path.name.split(".")[0]
    assert another != path, "an engine would take what it has of the earlier job for the new one's"
