"""A plain module follows published versions: exactly, whole versions or none, one-line errors."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hybridcomp import log
from hybridcomp.errors import PublishError
from hybridcomp.inference.fingerprints import CHUNK, differing, fingerprints
from hybridcomp.inference.module_follower import ModuleFollower
from hybridcomp.job import waits
from hybridcomp.publishing.destinations import Folder
from tests.inference.made import SHAPES, VERSIONS, Plain, bits, values_of
from tests.publishing.made import Weights
from tests.publishing.raised import raised_at
from tests.ranks import RunRanks
from tests.selection import by_day


def holds(model: Plain, version: int) -> bool:
    return bits(model.named_parameters()) == bits(values_of(version).items())


def test_every_version_is_exact(chain: Path) -> None:
    model = Plain()
    follower = ModuleFollower(model, f"file://{chain}")
    assert follower.version is None
    assert follower.pause_s == 0 and follower.update(1) == tuple(sorted(SHAPES))
    assert follower.pause_s > 0 and holds(model, 1)
    changed = follower.update(2)
    assert "model.norm.weight" not in changed and len(changed) == len(SHAPES) - 1
    assert holds(model, 2)
    follower.update(4)  # two versions at once
    assert holds(model, 4) and follower.version == 4
    follower.update()
    assert holds(model, VERSIONS) and follower.version == VERSIONS
    assert follower.update() == ()


def test_a_long_wait_is_said(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(waits, "NOTICE_S", 0.0)
    monkeypatch.setattr(log, "say", lambda *texts, anywhere: said.extend(texts))
    follower = ModuleFollower(Plain(), chain, wait_s=0.3)
    with pytest.raises(PublishError, match="^version 9 was not there after 0.3 s"):
        follower.update(9)
    assert said[0] == "waiting for version 9 for 0 s now, for 0.3 s at most (wait_s)"
    before = len(said)
    monkeypatch.undo()
    monkeypatch.setattr(log, "say", lambda *texts, anywhere: said.extend(texts))
    with pytest.raises(PublishError):
        follower.update(9)
    assert len(said) == before, "nothing within the first seconds"


def test_a_parameter_may_lie_otherwise_in_memory(chain: Path) -> None:
    model = Plain()
    name = "model.embed_tokens.weight"
    with torch.no_grad():
        owner = model.get_submodule("model.embed_tokens")
        owner.weight = torch.nn.Parameter(torch.zeros(8, 11, dtype=torch.bfloat16).t())
    assert not model.get_parameter(name).is_contiguous()
    follower = ModuleFollower(model, chain)
    for version in (1, 2, VERSIONS):
        follower.update(version)
        assert holds(model, version)


def test_a_compiled_module_has_the_names_of_the_module(chain: Path) -> None:
    model = Plain()
    owner = model.get_submodule("model")
    inner: Any = torch.compile(owner.get_submodule("norm"))
    owner.add_module("norm", inner)
    outer: Any = torch.compile(model)
    ModuleFollower(outer, chain).update()
    found = {name.replace("_orig_mod.", ""): one for name, one in model.named_parameters()}
    assert bits(found.items()) == bits(values_of(VERSIONS).items())


def test_a_missing_version_leaves_the_one_before(chain: Path) -> None:
    model = Plain()
    follower = ModuleFollower(model, chain, wait_s=0)
    follower.update(2)
    with pytest.raises(PublishError, match=f"^version 9 was not there.*version {VERSIONS}"):
        follower.update(9)
    assert follower.version == 2 and holds(model, 2)
    follower.update(VERSIONS)  # keeps what the mirror had already
    assert holds(model, VERSIONS)
    with pytest.raises(PublishError, match="version 1 was not there"):
        ModuleFollower(Plain(), chain / "nothing", wait_s=0).update()


def test_a_damaged_version_loads_nothing_and_is_made_up_for(chain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(chain, folder)
    part = next((folder / "parts").glob("*0000000004*"))
    whole = part.read_bytes()
    part.write_bytes(whole[:40] + bytes([whole[40] ^ 1]) + whole[41:])
    model = Plain()
    follower = ModuleFollower(model, folder)
    follower.update(2)
    with pytest.raises(PublishError, match="version 4") as told:
        follower.update(VERSIONS)
    assert "\n" not in str(told.value)
    assert follower.version == 2 and holds(model, 2) and follower.receiver.version == 3
    part.write_bytes(whole)
    follower.update(4)  # including the changes of version 3
    assert holds(model, 4)


@pytest.mark.parametrize(
    ("error", "step"),
    by_day(
        [(RuntimeError, 5), (RuntimeError, 149), (KeyboardInterrupt, 31)], [(RuntimeError, 149)]
    ),
)
def test_an_error_at_any_call_leaves_a_whole_version_or_none(
    chain: Path, error: type[BaseException], step: int
) -> None:
    number = 1
    while True:
        model = Plain()
        follower = ModuleFollower(model, chain)
        follower.update(1)
        was = raised_at(number, error, lambda: follower.update(3))  # noqa: B023
        told = follower.version
        assert told is None or holds(model, told), f"call {number}: not version {told}"
        if not was:
            break
        follower.update()
        assert follower.version == VERSIONS and holds(model, VERSIONS), f"call {number}"
        number += step
    assert told == 3 and number > 100


def test_weights_written_by_hand_are_told_and_then_replaced(chain: Path) -> None:
    model = Plain()
    follower = ModuleFollower(model, chain)
    follower.update(1)
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[2] += 1
    with pytest.raises(PublishError, match="version 1: model.norm.weight of the engine .of 1"):
        follower.update(2)
    assert follower.version is None
    assert len(follower.update(2)) == len(SHAPES)
    assert holds(model, 2)
    careless = ModuleFollower(model, chain, verify=False)
    careless.update(3)
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[2] += 1
    careless.update(4)
    assert not holds(model, 4)


def test_engines_that_cannot_take_the_weights_are_refused(chain: Path) -> None:
    def refused(model: Plain, pattern: str) -> None:
        before = bits(model.named_parameters()) if pattern != "torch.int8" else {}
        with pytest.raises(PublishError, match=pattern) as told:
            ModuleFollower(model, chain).update()
        assert "\n" not in str(told.value)
        assert not before or bits(model.named_parameters()) == before

    refused(Plain(torch.float16), "expected bf16, found torch.float16 in the engine")
    refused(Plain(extra="model.bias"), "model.bias is in the engine and not published")
    less = Plain()
    del less.get_submodule("model")._modules["norm"]
    refused(less, "model.norm.weight is published and not in the engine")
    quantized = Plain()
    held = torch.nn.Parameter(torch.zeros(8, dtype=torch.int8), requires_grad=False)
    quantized.get_submodule("model.norm").weight = held
    refused(quantized, "torch.int8")
    configured = Plain()
    configured.config = type("Config", (), {"quantization_config": "gptq"})()
    refused(configured, "quantized .gptq.")
    tied = Plain()
    layers = tied.get_submodule("model.layers.0.self_attn")
    layers.get_submodule("v_proj").weight = layers.get_parameter("k_proj.weight")
    refused(tied, "k_proj.weight and .*v_proj.weight are one tensor in the engine and two in the t")


def publish_tied(folder: Path) -> None:
    Weights().publisher(Folder(folder)).publish()


def test_a_tied_weight_is_tied_in_the_engine_too(on_ranks: RunRanks, tmp_path: Path) -> None:
    """Otherwise it is rejected: the other tensor would keep its old values."""
    on_ranks(1, publish_tied, tmp_path)
    weights, model = Weights(), nn.Module()
    named: dict[str, Any] = model._parameters
    for name in (*weights.values, "head.weight"):
        like = weights.values.get(name, weights.values["embed.weight"])
        named[name] = nn.Parameter(torch.zeros_like(like))
    with pytest.raises(PublishError, match="embed.weight and head.weight are two tensors in the e"):
        ModuleFollower(model, tmp_path).update()
    assert not any(bool(one.any()) for one in model.parameters())
    named["head.weight"] = named["embed.weight"]
    ModuleFollower(model, tmp_path).update()
    assert torch.equal(named["head.weight"], weights.values["embed.weight"])


def test_fingerprints_see_what_changed() -> None:
    value = torch.arange(3 * CHUNK // 2, dtype=torch.int32).view(torch.bfloat16)
    odd = torch.arange(7, dtype=torch.float16)
    first = fingerprints([("a", value), ("b", odd), ("c", torch.empty(0))])
    assert first == fingerprints([("a", value.clone()), ("b", odd), ("c", torch.empty(0))])
    words = value.view(torch.int32)
    words[[1, -1]] = words[[-1, 1]].clone()  # swapped, with the same sum
    odd[6] = 1.0
    assert differing(first, fingerprints([("a", value), ("b", odd), ("d", odd)])) == list("abcd")
