"""The seams of megatron-core: version window, signatures, apply and revert.

Uses stand-ins with the signatures of every release (``recorded``), so megatron-core is not needed;
``test_orders`` and marked tests run on the real package.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from hybridcomp.errors import SeamError
from hybridcomp.patches.mcore import pipeline
from hybridcomp.patches.registry import patches_of
from hybridcomp.seams import patching
from hybridcomp.seams.patching import Seam
from tests.patches import recorded
from tests.patches.recorded import hold_to_revert
from tests.ranks import RankPool, run_ranks

PACKAGE = "megatron.core"
REAL = find_spec("megatron") is not None and find_spec(PACKAGE) is not None

#: every release that scripts/read_upstream.py has read
RELEASES = recorded.versions("megatron-core")


def seams() -> list[Seam]:
    return [patch.seam for patch in patches_of(PACKAGE)]


@pytest.mark.parametrize("found", ["0.12.3", "0.20.0", "1.0"])
def test_versions_outside_the_window_name_it(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(patching, "version", lambda name: found)
    for patch in patches_of(PACKAGE):
        with pytest.raises(SeamError, match=r"needs megatron-core.*>= 0\.13, < 0\.20") as caught:
            patch.apply()
        assert f"megatron-core {found}" in str(caught.value)


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Install stand-ins for one release only."""
    found = str(request.param)
    saved = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "megatron"}
    for name in saved:
        del sys.modules[name]
    monkeypatch.setattr(patching, "version", lambda name: found)
    monkeypatch.setattr(pipeline, "version", lambda name: found)
    pp = [(pipeline.communicate_seam(), pipeline.make_communicate), *pipeline.PATCHES[1:]]
    monkeypatch.setattr(pipeline, "PATCHES", tuple(pp))
    for symbol, text in recorded.bound("megatron-core", found).items():
        recorded.stand_in(symbol, text)
    yield found
    for name in [n for n in sys.modules if n.partition(".")[0] == "megatron"]:
        del sys.modules[name]
    sys.modules.update(saved)


def test_apply_and_revert_on_every_release(release: str) -> None:
    hold_to_revert(PACKAGE)


def test_communicate_moved_into_a_class(release: str) -> None:
    names = {seam.qualname for seam in seams()}
    old = release.startswith("0.13")
    assert ("_communicate" in names) is old
    assert ("P2PCommunicator._communicate" in names) is not old


def test_stand_in_for_torch_is_torch(release: str) -> None:
    from hybridcomp.patches.mcore import tensor_parallel

    (patch,) = (p for p in patches_of(PACKAGE) if str(p.seam) == f"{tensor_parallel.LAYERS}:torch")
    with patch:
        stand_in = sys.modules[tensor_parallel.LAYERS].torch
        assert stand_in.Tensor is torch.Tensor
        assert stand_in.distributed.ReduceOp is torch.distributed.ReduceOp
        assert stand_in.distributed.all_reduce is not torch.distributed.all_reduce
        with pytest.raises(AttributeError):
            _ = stand_in.distributed.nothing_of_the_kind


def layer_wise(native: bool) -> tuple[str, Any]:
    """Run the real layer-wise optimizer; return messages or errors, and the counts."""
    from types import SimpleNamespace

    from hybridcomp.errors import ConfigError
    from hybridcomp.patches.mcore import check
    from hybridcomp.session import process
    from tests.training import mcore_trainer

    said: list[str] = []
    setattr(check, "say_once", said.append)  # noqa: B010
    mcore_trainer.prepare()
    block = {"preset": "recommended", "on_unsupported": "native" if native else "error"}
    with mcore_trainer.armed(job := mcore_trainer.Job(block=block)):
        mcore_trainer.initialize(job)
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
        from megatron.core.optimizer.optimizer import FP32Optimizer

        world = torch.distributed.group.WORLD
        weights = [torch.nn.Parameter(torch.full((numel,), 1.0)) for numel in (64, 64)]
        config = OptimizerConfig(optimizer="sgd", lr=0.1)
        inner = FP32Optimizer(torch.optim.SGD(weights, lr=1.0), config, lambda: None)
        groups = SimpleNamespace(dp_cp=world, expt_dp=world)
        try:
            optimizer = LayerWiseDistributedOptimizer([inner], config, groups)
        except ConfigError as error:
            return str(error), None
        mine = optimizer.dp_cp_params_list[torch.distributed.get_rank()]
        for weight in mine:
            weight.data.zero_()
        optimizer.allgather_params()
        channels = process.current()
        assert channels is not None
        entry = channels.ledger.interval["zero", "forward"]
        counts = (entry.messages, entry.native, entry.raw_nbytes, sum(w.numel() for w in mine))
        return said[-1], (counts, [float(w.abs().sum()) for w in weights])


@pytest.mark.skipif(not REAL, reason="megatron-core is not installed")
def test_a_layer_wise_optimizer_is_refused_or_said_and_counted() -> None:
    pytest.importorskip("megatron.core.optimizer.layer_wise_optimizer")
    with RankPool(2) as two:
        refused, counts = (two.run(layer_wise, native) for native in (False, True))
    for text, counted in refused:
        assert "use_layer_wise_distributed_optimizer" in text and counted is None
    for text, ((messages, native, nbytes, mine), values) in counts:
        assert text.startswith("zero native: use_layer_wise_distributed_optimizer")
        assert (messages, native, nbytes) == (1, 1, mine * 4)
        assert values == [0.0, 0.0]  # upstream gathered both


def missing_calls() -> list[str]:
    from tests.stand_ins import megatron_on_cpu

    megatron_on_cpu.install()
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    buffers = importlib.import_module("megatron.core.distributed.param_and_grad_buffer")
    linear = layers.LinearWithGradAccumulationAndAsyncCommunication
    group = buffers._ParamAndGradBucketGroup
    expected = {
        mappings._reduce: {"torch", "all_reduce"},
        mappings._gather_along_last_dim: {"dist_all_gather_func"},
        mappings._gather_along_first_dim: {"dist_all_gather_func", "all_gather"},
        mappings._reduce_scatter_along_first_dim: {"dist_reduce_scatter_func", "reduce_scatter"},
        mappings._AllToAll.forward: {"torch", "all_to_all_single"},
        inspect.unwrap(linear.forward): {"dist_all_gather_func"},
        inspect.unwrap(linear.backward): {
            "torch", "all_reduce", "dist_all_gather_func", "dist_reduce_scatter_func",
        },
        group.start_grad_sync: {
            "_coalescing_manager", "dist_reduce_scatter_func", "torch", "all_reduce",
        },
        group.start_param_sync: {"_coalescing_manager", "dist_all_gather_func"},
    }  # fmt: skip
    return [
        f"{upstream.__qualname__} no longer calls {name}"
        for upstream, names in expected.items()
        for name in sorted(names - set(upstream.__code__.co_names))
    ]


@pytest.mark.skipif(not REAL, reason="megatron-core is not installed")
def test_upstream_calls_what_is_replaced_under_the_name_torch() -> None:
    """That name has no signature which could be compared."""
    assert run_ranks(1, missing_calls) == [[]]
