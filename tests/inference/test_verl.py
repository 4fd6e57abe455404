"""verl's checkpoint engine: actors on ranks, a rollout worker, consecutive syncs."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hybridcomp import log
from hybridcomp.errors import ConfigError, PublishError, SeamError
from hybridcomp.inference.shares import Shares
from hybridcomp.job import waits
from hybridcomp.seams import patching
from tests.inference.made import VERSIONS, bits, run_module, sent, values_of
from tests.ranks import RunRanks
from tests.stand_ins import verl as stand_in_for_verl

BACKEND = "hybridcomp"


@contextlib.contextmanager
def verl_on_this_rank() -> Iterator[None]:
    """Install the stand-in and our module on a rank that other tests share."""
    known, before = patching.version, set(sys.modules)

    def put(modules: dict[str, Any], package: str, version: str) -> None:
        sys.modules.update(modules)
        patching.version = lambda name: version if name == package else known(name)  # type: ignore[assignment]

    stand_in_for_verl.install(put)
    try:
        importlib.import_module("hybridcomp.inference.verl_engine")
        yield
    finally:
        patching.version = known
        for name in set(sys.modules) - before:
            if name.startswith("verl") or name.endswith("verl_engine"):
                del sys.modules[name]


def engine_of(to: str, **settings: Any) -> Any:
    """Return an engine as a verl worker creates it."""
    registry = stand_in_for_verl.CheckpointEngineRegistry
    return registry.new(BACKEND, bucket_size=1 << 20, to=to, **settings)


def send(to: str, first: int, last: int) -> list[dict[str, float]]:
    """Sync versions from the ranks of a new actor; return verl's log entries."""
    with verl_on_this_rank():
        engine = engine_of(to, is_master=dist.get_rank() == 0)
        engine.prepare()
        engine.init_process_group(is_rollout=False)
        found = []
        for version in range(first, last + 1):
            found.append(asyncio.run(engine.send_weights(sent(version), global_steps=version)))
            engine.finalize()
        return found


def received(engine: Any) -> dict[str, list[int]]:
    """Return the bits that a rollout worker passes to its inference engine."""

    async def take() -> dict[str, torch.Tensor]:
        return {name: one.clone() async for name, one in engine.receive_weights(global_steps=3)}

    return bits(asyncio.run(take()).items())


def test_a_rollout_gets_the_version_of_each_sync(
    on_ranks: RunRanks, tmp_path: Path, stand_in: Callable[[Any], None]
) -> None:
    stand_in(stand_in_for_verl)
    module = importlib.import_module("hybridcomp.inference.verl_engine")
    actors, rollouts = module.HybridcompCheckpointEngine.build_topology(2, 1, [{}] * 3)
    assert actors == {"is_rollout": [False, False]} and rollouts == {"is_rollout": [True]}
    to = f"file://{tmp_path}/weights"
    rollout = engine_of(to, wait_s=0)
    for first, last in ((1, 1), (2, 2), (3, VERSIONS)):
        rollout.init_process_group(is_rollout=True)
        told = on_ranks(2, send, to, first, last)
        assert told[0] == told[1]
        for version in range(first, last + 1):
            assert received(rollout) == bits(values_of(version).items())
            ratio = told[0][version - first]["checkpoint_engine/changed_ratio"]
            assert (ratio == 1) == (version == first)  # a new actor begins with a full version
            rollout._before = version  # as after init_process_group
    with pytest.raises(PublishError, match=f"version {VERSIONS + 1} was not in .*weights after 0"):
        received(rollout)
    said: list[str] = []
    waits_long = patch.object(waits, "NOTICE_S", 0.0)
    with waits_long, patch.object(log, "say", lambda text, anywhere: said.append(text)):
        rollout._wait_s = 0.3
        with pytest.raises(PublishError, match="after 0.3 s"):
            received(rollout)
    assert said[0].startswith(f"waiting for version {VERSIONS + 1} for 0 s now, for 0.3 s at most")


def test_a_damaged_version_does_not_stop_the_next_sync(
    on_ranks: RunRanks, tmp_path: Path, stand_in: Callable[[Any], None]
) -> None:
    stand_in(stand_in_for_verl)
    importlib.import_module("hybridcomp.inference.verl_engine")
    on_ranks(2, send, str(tmp_path), 1, 2)
    part = next((tmp_path / "parts").glob("v0000000002.*"))
    part.write_bytes(part.read_bytes()[::-1])
    rollout = engine_of(str(tmp_path))
    rollout.init_process_group(is_rollout=True)
    assert list(tmp_path.glob("ask_full.*")) and rollout._before == 2
    on_ranks(2, send, str(tmp_path), 3, 3)
    assert received(rollout) == bits(values_of(3).items())
    for path in (tmp_path / "parts", *tmp_path.glob("*.json")):  # the actors begin anew
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    rollout.init_process_group(is_rollout=True)
    on_ranks(2, send, str(tmp_path), 1, 1)
    with pytest.raises(PublishError, match="another job writes here"):
        received(rollout)


def another_export(to: str) -> str:
    """Sync with rank 1 exporting another model; return this rank's error."""
    with verl_on_this_rank():
        engine = engine_of(to)
        asyncio.run(engine.send_weights(sent(1)))
        export = list(sent(2))
        if dist.get_rank() == 1:
            export.pop()
        try:
            asyncio.run(engine.send_weights(export))
        except PublishError as error:
            told = str(error)
        assert asyncio.run(engine.send_weights(sent(3)))  # the next sync continues
        return told


def test_an_export_that_differs_on_one_rank_is_told_on_all(
    on_ranks: RunRanks, tmp_path: Path
) -> None:
    for told in on_ranks(2, another_export, f"file://{tmp_path}/weights"):
        assert "was not published: rank 1: " in told and "names and shapes of the first" in told


def test_what_the_engine_refuses(stand_in: Callable[[Any], None], tmp_path: Path) -> None:
    stand_in(stand_in_for_verl)
    importlib.import_module("hybridcomp.inference.verl_engine")
    with pytest.raises(ConfigError, match=r"engine_kwargs.hybridcomp.to: found ''"):
        engine_of("")
    with pytest.raises(PublishError, match="before init_process_group"):
        received(engine_of(str(tmp_path)))
    with pytest.raises(ConfigError, match=r"publish.dtype: found 'fp8'"):
        Shares("fp8", 0, 1)


def test_an_export_is_the_same_model_each_time() -> None:
    shares = Shares("bf16", 1, 3)
    shares.take(sent(1))
    held = {one.stretch.name: one for one in shares.weights().held}
    name = "model.embed_tokens.weight"
    assert held[name].stretch.start == 29 and held[name].stretch.numel == 29  # of 88 values
    whole = values_of(1)[name].reshape(-1)
    assert torch.equal(held[name].read(), whole[29:58])
    shares.take(sent(2))
    assert torch.equal(held[name].read(), values_of(2)[name].reshape(-1)[29:58])
    passed = []

    def twice() -> Any:
        yield from sent(3)
        yield next(sent(3))
        passed.append("to the end, where other ranks wait in gathers")

    with pytest.raises(PublishError, match="is in the export twice"):
        shares.take(twice())
    assert passed
    with pytest.raises(PublishError, match="of another shape missing"):
        shares.take(list(sent(3))[1:])


def test_another_version_of_verl_is_refused(
    stand_in: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_in_for_verl, "VERSION", "0.8.0")
    stand_in(stand_in_for_verl)
    with pytest.raises(SeamError, match=r"needs verl >= 0.9.1, found verl 0.8.0"):
        importlib.import_module("hybridcomp.inference.verl_engine")
    assert BACKEND not in stand_in_for_verl.CheckpointEngineRegistry._registry


@pytest.mark.nightly
def test_verl_itself_syncs_actors_and_rollouts_in_a_cluster_of_ray(tmp_path: Path) -> None:
    """verl's manager syncs two of each; after a sync that fails on one actor the next is right."""
    pytest.importorskip("ray", reason="Ray is not installed")
    pytest.importorskip("verl.checkpoint_engine.base", reason="verl lacks", exc_type=ImportError)
    found = run_module("verl_runs", tmp_path, 4, RAY_AUTH_MODE="disabled")
    assert found["wrong"] == [] and list(found["told"]) == ["3"], found
    assert "rank 1: model.norm.weight: expected the names" in found["told"]["3"]
    assert found["changed"][0] == 1.0 and all(0 < one < 1 for one in found["changed"][1:])
    assert found["calls"][0] == "abort_all_requests" and "resume_generation" in found["calls"]
