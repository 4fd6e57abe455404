"""Current layer and direction of its messages: AutoTP and Ulysses in isolation."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from hybridcomp.channels import Channels
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import ConfigError
from hybridcomp.patches.common.routes import make_backward
from hybridcomp.patches.ds import job_facts
from hybridcomp.patches.ds.layers import autotp, layer_scope
from hybridcomp.patches.ds.layers import ulysses as ds_ulysses
from hybridcomp.patches.ds.layers.layer_scope import TENSOR, owner
from hybridcomp.session import process
from tests.ranks import RunRanks
from tests.training import split_parts
from tests.training.split_trainer import Job

BLOCKINT = {"codec": "blockint", "bits": 8}


def channels(**settings: Any) -> Channels:
    return Channels(CompressionConfig.parse(settings))


class TensorParallel_Layer(torch.nn.Module):
    """Minimal layer for ``tag``."""


class Column(TensorParallel_Layer):
    def forward(self, called: Any = owner) -> Any:
        return called()


Column.__call__ = layer_scope.make_call(torch.nn.Module.__call__)  # type: ignore[method-assign]


def test_layers_know_their_engine() -> None:
    mine, of_process = channels(tp="mpc"), channels(tp="mpc")
    tagged, bare, unknown = Column(), Column(), Column()
    layer_scope.tag(SimpleNamespace(module=torch.nn.Sequential(tagged)), mine)
    layer_scope.tag(SimpleNamespace(module=torch.nn.Sequential(bare)), None)
    process.use(of_process)
    try:
        assert tagged() is mine
        assert bare() is None  # its engine has no block
        assert unknown() is of_process
        assert owner() is of_process
    finally:
        process.configure(None)


def sent(ctx: Any) -> tuple[Channels | None, str]:
    """Pass of an autograd function: return the channels and direction of its collectives."""
    return TENSOR.whose(), TENSOR.way()  # type: ignore[misc]


def test_a_context_remembers_whose_it_is() -> None:
    forward, backward = layer_scope.make_forward(sent), make_backward(sent)
    mine, ctx, layer = channels(tp="mpc"), SimpleNamespace(), Column()
    layer_scope.tag(SimpleNamespace(module=torch.nn.Sequential(layer)), mine)
    assert layer(lambda: forward(ctx)) == (mine, "forward")
    found: list[Any] = []  # autograd runs a GPU's backward passes in a separate thread
    thread = threading.Thread(target=lambda: found.append(backward(ctx)))
    thread.start()
    thread.join()
    assert found == [(mine, "backward")]
    assert sent(ctx) == (None, "forward")  # outside, nothing is compressed


class Fake(torch.nn.Module):
    """Stand-in for a layer of an upstream module."""


def fake(module: str) -> Any:
    kind = type("Layer", (Fake,), {"__module__": module})
    own = type("Own", (kind,), {})  # as a user derives one
    return SimpleNamespace(module=torch.nn.Sequential(own()))


@pytest.mark.parametrize(
    ("seam", "dimension", "module", "what"),
    [
        (autotp, "tp", "deepspeed.runtime.domino.transformer", "Domino"),
        (ds_ulysses, "cp", "deepspeed.sequence.fpdt_layer", "FPDT"),
    ],
)
def test_layers_that_no_seam_reaches(
    seam: Any,
    dimension: str,
    module: str,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    with pytest.raises(ConfigError, match=what) as caught:
        seam.attached(fake(module), channels(**{dimension: "mpc"}))
    assert caught.value.key == f"compression.{dimension}"
    seam.attached(fake("torch.nn"), channels(**{dimension: "mpc"}))
    seam.attached(fake(module), channels(dp="mpc"))
    assert capsys.readouterr().out == ""
    # a preset is made for every kind of job
    for lenient in ({dimension: "mpc", "on_unsupported": "native"}, {"preset": "recommended"}):
        process.configure(None)
        seam.attached(fake(module), channels(**lenient))
        assert f"{dimension} stays native" in capsys.readouterr().out


def test_seams_of_an_older_release(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (autotp, ds_ulysses):
        monkeypatch.setattr(module, "upstream_has", lambda *_: False)
    names = {seam.qualname for seam, _ in autotp._patches()}
    assert "RowParallel.forward" in names and "ColumnParallel.backward" in names
    assert not any(name.startswith(later) for name in names for later in autotp.LATER)
    assert [seam.qualname for seam, _ in ds_ulysses._alst()] == [
        "_DimZeroAllToAll.forward", "_DimZeroAllToAll.backward",
    ]  # fmt: skip


def test_facts_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group=None: 4)
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2))
    found = job_facts.facts(plain, None, None)
    assert found == {"pipeline": False, "moe": False, "world_size": 4, "tensor": False,
                     "sequence": False, "replicas": None, "mesh": False,
                     "slices": False, "sparse": False, "tables": False}  # fmt: skip
    grid = SimpleNamespace(get_data_parallel_world_size=lambda: 2)
    assert job_facts.facts(plain, grid, None)["replicas"] == 2
    assert job_facts.facts(torch.nn.Sequential(Column()), None, None)["tensor"]
    ulysses = SimpleNamespace(get_sequence_parallel_world_size=lambda: 2)
    assert job_facts.facts(plain, ulysses, None)["sequence"]
    mesh = SimpleNamespace(get_group=lambda mesh_dim: mesh_dim)
    assert job_facts.facts(plain, None, mesh)["sequence"]
    domino = fake("deepspeed.runtime.domino.transformer").module
    assert job_facts.facts(domino, None, None)["tensor"]


def test_names_of_residuals() -> None:
    def name(mpu: Any) -> str:
        return job_facts.unique_name(
            SimpleNamespace(mpu=mpu), "w", torch.nn.Parameter(torch.ones(1))
        )

    rank = lambda: 1  # noqa: E731 - one object under two names, as in ALST
    assert name(None) == "w"
    assert name(SimpleNamespace(get_model_parallel_rank=rank)) == "w#tp1"
    assert name(SimpleNamespace(get_model_parallel_rank=lambda: 0)) == "w"
    alst = SimpleNamespace(get_model_parallel_rank=rank, get_sequence_parallel_rank=rank)
    assert name(alst) == "w"
    alst.get_tensor_model_parallel_rank = lambda: 3  # Megatron with both
    assert name(alst) == "w#tp3"


def test_parameters_are_gathered_exactly(module_ranks: RunRanks) -> None:
    job = Job(tp=2, block={"tp": BLOCKINT, "min_bytes": 0})
    for whole, shards, sent in module_ranks(2, split_parts.gather, job):
        assert torch.equal(whole, torch.cat(shards))
        assert sent == 0


def test_reduction_of_a_head_in_training_and_in_inference(module_ranks: RunRanks) -> None:
    """A row-parallel LM head calls inference's all-reduce, in 0.19.0 during training too."""
    block = {"tp": BLOCKINT, "min_bytes": 0}
    for exact, trained, inferred, counted in module_ranks(2, split_parts.head, block):
        assert not torch.equal(trained, exact)
        assert torch.allclose(trained, exact, atol=0.05)
        assert torch.equal(inferred, exact)
        assert counted == 1


@pytest.mark.parametrize("codec", ["none", "mpc"])
def test_overlapped_ulysses(module_ranks: RunRanks, codec: str) -> None:
    """Gradients of queries and keys travel under a handle that decodes in ``wait()``."""
    block = {"cp": codec, "min_bytes": 0}
    for native, ours, pending, ledger in module_ranks(2, split_parts.overlapped, block):
        assert all(torch.equal(*pair) for pair in zip(native, ours, strict=True))
        assert pending == (codec != "none")
        assert ledger == {"forward": 4, "backward": 4}


def test_a_compiled_exchange_keeps_its_directions(module_ranks: RunRanks) -> None:
    from deepspeed.sequence import layer

    if not hasattr(layer, "_dim_zero_all_to_all_op"):
        pytest.skip("this DeepSpeed's exchange is no operator")
    block = {"cp": {"forward": BLOCKINT, "backward": "none"}, "min_bytes": 0}
    for same, ledger in module_ranks(2, split_parts.compiled, block):
        assert same
        assert ledger == {"forward": (2, 0), "backward": (2, 2)}  # eager and compiled
