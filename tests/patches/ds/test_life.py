"""Destroyed and dropped engines leave no state of hybridcomp behind."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import hybridcomp
from hybridcomp.channels import Channels, channels_of
from hybridcomp.patches.ds.island_unit import IslandUnit
from hybridcomp.patches.ds.job_facts import GATHERED, compile_locks
from hybridcomp.patches.ds.step_ends import LATE, at_the_end, make_step
from hybridcomp.patches.ds.zero import frozen, secondary
from hybridcomp.publishing.quantized import Quantizer
from hybridcomp.publishing.weights import FP8
from hybridcomp.session import process
from tests.ranks import run_ranks
from tests.training.trainer import Job, Tiny, make_engine, train_step

BLOCK: dict[str, Any] = {
    "dp": {"codec": "blockint", "bits": 4, "error_feedback": True},
    "min_bytes": 0,
    "ledger": {"every": 1},
}
RUNS = 2


def sweep(stages: tuple[int, ...], folder: Path) -> dict[int, tuple[list[bool], int, list[float]]]:
    """Return by stage whether engines are freed, remaining channels, residuals when destroyed."""
    found = {}
    for stage in stages:
        gone, norms = [], []
        for number in range(RUNS):
            ledger = {"every": 1, "jsonl": str(folder / f"{stage}_{number}.jsonl")}
            job = Job(stage=stage, block={**BLOCK, "ledger": ledger})
            engine = make_engine(job)
            train_step(engine, job, 0)
            channels = channels_of(engine)
            assert channels is not None and channels.residuals.norm() > 0
            engine.destroy()
            norms.append(channels.residuals.norm())
            known = weakref.ref(engine)
            del engine, channels
            gc.collect()
            gone.append(known() is None)
        gc.collect()  # engines held by DeepSpeed's hooks, which the first collection freed
        left = sum(issubclass(type(thing), Channels) for thing in gc.get_objects())
        found[stage] = (gone, left, norms)
    return found


def said_of_the_other_block(blocks: list[Any]) -> list[str]:
    """Return what the log says of each process's block beside that of the engine's file."""
    with patch.object(process, "say_once") as say_once:
        for block in blocks:
            process.configure(block)
            make_engine(Job(stage=1, block=BLOCK)).destroy()
        process.configure(None)
    return [call.args[0] for call in say_once.call_args_list]


def test_a_block_beside_the_engine_s_own_does_nothing_and_says_so() -> None:
    (said, _) = run_ranks(2, said_of_the_other_block, [None, BLOCK, {"dp": "bf16"}])
    assert said == [
        "DeepSpeed's configuration has a block of its own: that of hybridcomp.install does "
        "nothing here"
    ]


@pytest.mark.parametrize("place", ["adam", "py311_cpu/adam"])
def test_a_lock_that_a_killed_compilation_left_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """DeepSpeed waits for it without a word."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / place).mkdir(parents=True)
    assert list(compile_locks()) == []
    lock = tmp_path / place / "lock"
    lock.touch()
    (said,) = compile_locks()
    assert said.startswith(f"{lock}: DeepSpeed waits until it is gone")


def test_destroyed_engines_are_gone(tmp_path: Path) -> None:
    """At stage 3 DeepSpeed keeps its engine, with or without a block; residuals are freed."""
    for found in run_ranks(2, sweep, (1, 2, 3), tmp_path, timeout=600.0):
        for stage in (1, 2):
            assert found[stage] == ([True] * RUNS, 0, [0.0] * RUNS), stage
        assert found[3][2] == [0.0] * RUNS
    ledgers = [path.read_text().splitlines() for path in sorted(tmp_path.iterdir())]
    assert len(ledgers) == 3 * RUNS
    assert all('"summary": true' in lines[-1] for lines in ledgers)  # written when destroyed


SECONDARY = {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}


def share(blocks: list[dict[str, Any]]) -> list[tuple[int, bool, bool]]:
    """Build two engines on one model, the first with a block that compresses ``zero``.

    Returns, for the second with the same block but not enabled and with another one, how many
    hooks, kept parameters and roll-outs the first one has left when it is destroyed, whether its
    channels still send, and whether parameters hold state of it.
    """
    found = []
    for block in blocks:
        for second in ({**block, "enabled": False}, {"dp": "none", "zero": {"codec": "expcode"}}):
            job = Job(stage=3, dtype="bf16", zero=SECONDARY, block={"min_bytes": 0, **block})
            other = replace(job, block=second)
            model = Tiny()
            model.outer.requires_grad_(False)
            engine = make_engine(job, model)
            train_step(engine, job, 0)
            with hybridcomp.gathered(engine):
                pass
            channels: Any = channels_of(engine)
            before = channels.ledger.interval["zero", "forward"].messages
            assert before > 0
            kept = (secondary.copies_of, frozen.weights_of)
            engine.destroy()
            hooks = [hook.__module__ for hook in model._forward_pre_hooks.values()]
            left = sum(name.startswith("hybridcomp") for name in hooks)
            left += hasattr(engine, GATHERED)
            left += sum(of(model.parameters()) is not None for of in kept)
            engine = make_engine(other, model)
            train_step(engine, other, 1)
            sends = channels.ledger.interval["zero", "forward"].messages > before
            found.append((left, sends, any(of(model.parameters()) is not None for of in kept)))
            engine.destroy()
    return found


def test_an_engine_sends_nothing_by_the_block_of_an_earlier_one_of_its_model() -> None:
    """At stage 3 an engine's channels hang on the model's parameters, which a second one gets.

    DeepSpeed keeps a destroyed engine, so what it has kept is freed.
    """
    blocks = [
        {"zero": {"codec": "blockint", "bits": 8, "when": "auto"}},
        {"zero": {"secondary": "exact"}, "hierarchy": 2},
        {"zero": {"frozen": "device"}},
    ]
    for found in run_ranks(4, share, blocks, timeout=600.0):
        assert found == [(0, False, False)] * 2 * len(blocks)


def groups() -> list[int]:
    """Return the number of process groups after each of three engines and publishers."""
    divided: Any = SimpleNamespace(owned=[], table={"a.weight": ((2, 2), FP8)})
    counts = []
    for _ in range(3):
        IslandUnit(SimpleNamespace())  # type: ignore[arg-type]
        Quantizer({}, "fp8", (dist.get_rank(),)).bind(divided)
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


def test_later_engines_and_publishers_make_no_further_groups() -> None:
    """Nobody destroys the groups, so they are shared."""
    for first, *later in run_ranks(2, groups):
        assert later == [first] * 2


def test_a_step_raises_the_error_that_came_first() -> None:
    """It may have closed the connections, which the step then says."""

    def fails() -> None:
        raise ValueError("cause")

    def step(engine: Any) -> None:
        at_the_end(engine, fails)
        raise RuntimeError("closed")

    engine = SimpleNamespace()
    with pytest.raises(ValueError, match="cause"):
        make_step(step)(engine)
    assert LATE not in vars(engine)
