"""A published version chain of a small model, and the model as an inference engine holds it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridcomp.publishing.destinations import Folder
from tests.paths import ROOT
from tests.publishing.made import Weights
from tests.ranks import python_path

#: checkpoint names: an embedding, an attention of three heads with grouped keys, a norm
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (11, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.self_attn.v_proj.weight": (4, 8),
    "model.norm.weight": (8,),
}
PACKED = ("q_proj", "k_proj", "v_proj")
VERSIONS = 5


def values_of(version: int) -> dict[str, Tensor]:
    """Return all weights of a version, as every rank of the job had them."""
    weights = Weights(shapes=dict(SHAPES))
    for number in range(1, version):
        step(weights, number)
    return weights.values


def step(weights: Weights, number: int) -> None:
    """Change some values; the last version keeps one parameter and has a NaN."""
    before = {name: value.clone() for name, value in weights.values.items()}
    weights.step(number, share=0.2)
    weights.values["model.norm.weight"].copy_(before["model.norm.weight"])
    if number == VERSIONS - 1:
        weights.values["model.embed_tokens.weight"].view(-1)[3] = float("nan")


def publish(folder: Path, versions: int) -> None:
    """Publish so many versions (``values_of``) from all ranks of a job."""
    weights = Weights(shapes=dict(SHAPES))
    publisher = weights.publisher(Folder(folder))
    for number in range(1, versions + 1):
        publisher.publish()
        step(weights, number)
    publisher.close()
    dist.barrier()


class Plain(nn.Module):
    """The model with its checkpoint's parameters."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, extra: str = "") -> None:
        super().__init__()
        for name, shape in [*SHAPES.items(), *([(extra, (2,))] if extra else [])]:
            *path, last = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            setattr(owner, last, nn.Parameter(torch.zeros(shape, dtype=dtype)))


class Packed(nn.Module):
    """One of two ranks of an engine: q, k and v in a single parameter, rows sharded."""

    def __init__(self, rank: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.rank = rank
        self.embed = nn.Parameter(torch.zeros(11, 8, dtype=dtype))
        self.qkv = nn.Parameter(torch.zeros(8, 8, dtype=dtype))
        self.norm = nn.Parameter(torch.zeros(8, dtype=dtype))
        self.fail_at = ""
        self.loaded: list[str] = []

    def place(self, name: str) -> tuple[str, Tensor, slice]:
        """Return the parameter for a checkpoint tensor, and the rows of each."""
        for part, low, high in (("q_proj", 0, 4), ("k_proj", 4, 6), ("v_proj", 6, 8)):
            if part in name:
                rows = high - low
                return "qkv", self.qkv[low:high], slice(self.rank * rows, (self.rank + 1) * rows)
        short = "embed" if "embed" in name else "norm"
        whole: Tensor = getattr(self, short)
        return short, whole, slice(0, len(whole))

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy checkpoint tensors into the parameters, as engines do."""
        found = set()
        for name, value in weights:
            if self.fail_at and self.fail_at in name:
                raise RuntimeError("out of memory")
            short, target, rows = self.place(name)
            target.copy_(value[rows])
            target[len(value[rows]) :].fill_(0)  # engines zero a padded vocabulary
            self.loaded.append(name)
            found.add(short)
        return found

    def expected(self, version: int) -> dict[str, Tensor]:
        """Return the parameters of a version."""
        twin = Packed(self.rank)
        twin.load_weights(values_of(version).items())
        return dict(twin.named_parameters())

    def holds(self, version: int) -> bool:
        """Return whether every bit equals the version's."""
        return bits(self.named_parameters()) == bits(self.expected(version).items())


def run_module(name: str, *words: object, **environment: str) -> dict[str, Any]:
    """Run a module of this folder as a process; return the JSON object that it prints."""
    command = [sys.executable, "-W", "ignore", "-m", f"tests.inference.{name}", *map(str, words)]
    env = {**os.environ, "PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1", **environment}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    # engines print around it
    (found,) = (json.loads(one) for one in done.stdout.splitlines() if one.startswith('{"wrong"'))
    return dict(found)


def bits(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, list[int]]:
    """Return the bits of all values by name, which compare equal even for NaN."""
    return {
        name: tensor.detach().reshape(-1).view(torch.int16).tolist() for name, tensor in tensors
    }


def sent(version: int) -> Iterator[tuple[str, Tensor]]:
    """Yield a version's tensors as verl exports them."""
    for name, value in values_of(version).items():
        yield name, value.clone()
