"""``hybridcomp.install()`` after building an engine raises an error that says where to put it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import hybridcomp
from hybridcomp.errors import ConfigError
from hybridcomp.session import process
from tests.ranks import run_ranks
from tests.training.in_turn import start_deepspeed

BLOCK = {"dp": "bf16", "min_bytes": 0}


def installed(block: dict[str, Any] | None = None) -> str:
    """Return the error of ``install``, or None; undo its effects."""
    try:
        hybridcomp.install(block)
    except ConfigError as error:
        return str(error)
    finally:
        hybridcomp.uninstall()
        process.configure(None)
    return ""


def make_engine(block: dict[str, Any] | None) -> Any:
    """Build a DeepSpeed engine with the current patches."""
    import deepspeed

    start_deepspeed()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "steps_per_print": 1000,
    }
    if block is not None:
        config["compression"] = block
    model = torch.nn.Linear(4, 4)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    return engine


def engines() -> dict[str, str]:
    """Return the error of ``install``, by the engine built before it."""
    hybridcomp.uninstall()
    process.configure(None)
    gc.collect()
    found = {"nothing": installed()}
    engine: Any = make_engine(BLOCK)
    found["with a block"] = installed()
    del engine
    found["gone"] = installed()
    engine = make_engine(None)
    found["without a block"] = installed()
    found["block by call"] = installed(BLOCK)
    del engine
    hybridcomp.install()
    engine = make_engine(None)
    found["a new block"] = installed(BLOCK)
    del engine
    hybridcomp.install()
    engine = make_engine(BLOCK)
    hybridcomp.uninstall()
    found["attached"] = installed()
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    found["let go"] = "" if gone() is None else "something holds an engine that was deleted"
    return found


def test_deepspeed() -> None:
    pytest.importorskip("deepspeed")
    (found,) = run_ranks(1, engines)
    for case in ("with a block", "block by call", "a new block"):
        assert "a DeepSpeedEngine that was built before it" in found.pop(case)
    assert not any(found.values()), found


def wrapper() -> tuple[str, str]:
    """Return the error of ``install`` after Megatron's DDP was built, without and with a block."""
    from tests.stand_ins import megatron_on_cpu

    megatron_on_cpu.install()
    import megatron.core.optimizer  # noqa: F401
    from megatron.core import parallel_state, tensor_parallel

    from tests.training.mcore_trainer import Job, build, destroy_groups

    megatron_on_cpu.patch()
    hybridcomp.uninstall()
    process.configure(None)
    gc.collect()
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    built = build(Job())
    try:
        return installed(), installed(BLOCK)
    finally:
        del built
        gc.collect()
        parallel_state.destroy_model_parallel()
        destroy_groups()


def test_megatron() -> None:
    pytest.importorskip("megatron.core")
    for without, with_block in run_ranks(2, wrapper):
        assert without == ""
        assert "a DistributedDataParallel that was built before it" in with_block
        assert "above the line with Megatron's DistributedDataParallel" in with_block
