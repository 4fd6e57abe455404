"""GPT-NeoX's seams on a stand-in: supported checkouts, replaced functions, encoded messages."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hybridcomp
from hybridcomp.codecs import make_codec
from hybridcomp.errors import SeamError
from hybridcomp.patches.neox import checkout
from hybridcomp.patches.rules import neox as rules
from hybridcomp.seams.arming import IN_PLACE
from tests.patches.recorded import hold_to_revert
from tests.ranks import run_ranks
from tests.scripts_on_ranks import run_python
from tests.stand_ins import gpt_neox

PACKAGES = ("megatron.mpu", "megatron.training")
SHAPE = (8, 4, 32)


def forget() -> dict[str, Any]:
    """Remove every module called megatron from this process; return them."""
    names = [name for name in sys.modules if name.partition(".")[0] == "megatron"]
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put an empty folder first on the path; hide any other package megatron."""
    saved = forget()
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    hybridcomp.uninstall()
    forget()
    sys.modules.update(saved)


@pytest.fixture
def neox(clean: Path) -> Path:
    gpt_neox.write(clean)
    for package in PACKAGES:
        importlib.import_module(package)
    return clean


@pytest.mark.parametrize("package", PACKAGES)
def test_apply_and_revert(neox: Path, package: str) -> None:
    hold_to_revert(package)


ARMED = """
import sys
sys.path.insert(0, sys.argv[1])
import hybridcomp
from hybridcomp.seams.arming import IN_PLACE
hybridcomp.install()
assert "megatron.mpu" not in IN_PLACE
import megatron.mpu
assert len(IN_PLACE["megatron.mpu"]) == 7
import megatron.training
assert len(IN_PLACE["megatron.training"]) == 1
hybridcomp.uninstall()
hybridcomp.install()
assert len(IN_PLACE["megatron.mpu"]) == 7
"""


def test_armed_before_and_after_the_import(tmp_path: Path) -> None:
    gpt_neox.write(tmp_path)
    assert not run_python("-c", ARMED, str(tmp_path), cwd=tmp_path).returncode


def test_another_megatron_is_left_alone(clean: Path) -> None:
    """Older Megatrons also have megatron.mpu and megatron.training."""
    gpt_neox.write(clean, neox=False)
    mappings = importlib.import_module("megatron.mpu").mappings
    importlib.import_module("megatron.training")
    hybridcomp.install()
    assert mappings.torch is torch
    assert not IN_PLACE.keys() & set(PACKAGES)
    with pytest.raises(SeamError, match=r"needs GPT-NeoX.*without megatron.neox_arguments"):
        checkout.source()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("def _reduce(input_):", "def _reduce(input_, group):", r"_reduce: expected parameters"),
        ("def _dmoe_gather(", "def _gone(", "_dmoe_gather: is not there"),
        (
            "torch.distributed.reduce_scatter_tensor(output",
            "output.copy_(output",
            "no longer calls reduce_scatter_tensor",
        ),
        ("def backward(ctx, grad_output):\n        return _reduce", "def backward(ctx, grad):\n"
         "        return _reduce", "expected parameters"),
    ],
)  # fmt: skip
def test_unknown_checkout_is_refused(clean: Path, old: str, new: str, message: str) -> None:
    gpt_neox.write(clean)
    source = clean / "megatron" / "mpu" / "mappings.py"
    assert old in source.read_text()
    source.write_text(source.read_text().replace(old, new))
    importlib.import_module("megatron.mpu")
    with pytest.raises(SeamError, match=message):
        hybridcomp.install()
    assert "megatron.mpu" not in IN_PLACE


def test_figures_go_where_neox_logs(neox: Path) -> None:
    from hybridcomp.session.engine_session import ATTRIBUTE

    pending = [("train/compression/tp/forward/ratio", 3.9)]

    def take() -> list[tuple[str, float]]:
        found, pending[:] = list(pending), []
        return found

    model = SimpleNamespace(**{ATTRIBUTE: SimpleNamespace(take_events=take)})
    args = SimpleNamespace(use_wandb=True, tensorboard_writer="writer", comet_experiment=None)
    hybridcomp.install()
    training = importlib.import_module("megatron.training")
    for iteration, engine in ((7, model), (8, model), (9, SimpleNamespace())):
        assert training.training_log(
            args, None, {}, {}, 0.1, iteration, None, False, 0, engine, None, None
        ) is False  # fmt: skip
    assert importlib.import_module("megatron.logging").WRITTEN == [
        ("lr", 0.1, 7),
        ("train/compression/tp/forward/ratio", 3.9, 7, True, "writer", None),
        ("lr", 0.1, 8),
        ("lr", 0.1, 9),
    ]


def test_settings_are_read_off_neox_arguments_only() -> None:
    kind = type("NeoXArgs", (), {"__module__": "megatron.neox_arguments.arguments"})
    args = kind()
    args.te_mha = True
    assert rules.settings_of(args) == {"te_mha": True}
    assert rules.settings_of(SimpleNamespace(te_mha=True)) is None


def exchange(folder: str, block: dict[str, Any] | None, copy: bool) -> dict[str, Any]:
    """Call every function once on this rank with some values; return the ledger."""
    from hybridcomp.channels import Channels
    from hybridcomp.config import CompressionConfig
    from hybridcomp.config.policy import Policy
    from hybridcomp.session import process
    from tests.stand_ins.plain_codecs import Identity

    if folder not in sys.path:
        sys.path.insert(0, folder)
    mappings = importlib.import_module("megatron.mpu").mappings
    channels = None
    if block is not None:
        channels = Channels(CompressionConfig.parse(block))
        if copy:
            channels.policy = Policy({key: Identity() for key in channels.policy.codecs}, 0, 0)
    process.use(channels)
    hybridcomp.install()
    try:
        found = _call_all(mappings)
        if copy:
            parts = [torch.arange(rows * 32.0).view(rows, 32) + rows for rows in (3, 5)]
            gathered = mappings._dmoe_gather(parts[dist.get_rank()], [3, 5])
            assert torch.equal(gathered, torch.cat(parts)), "gloo itself takes even parts only"
    finally:
        hybridcomp.uninstall()
        process.configure(None)
    if channels is not None:
        found["ledger"] = {
            key: (entry.messages, entry.native, entry.raw_nbytes, entry.wire_nbytes)
            for key, entry in channels.ledger.interval.items()
            if entry.messages
        }
    return found


def _call_all(mappings: Any) -> dict[str, Any]:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    rows = [4, 4]

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    own = values(*SHAPE)
    before = own.clone()
    found = {
        "reduce": mappings._reduce(values(*SHAPE)),
        "gather": mappings._gather(own),
        "scatter0": mappings._reduce_scatter_along_seq_dim(values(*SHAPE), 0),
        "scatter1": mappings._reduce_scatter_along_seq_dim(values(*SHAPE), 1),
        "gather0": mappings._gather_along_seq_dim(own, 0),
        "gather1": mappings._gather_along_seq_dim(own, 1),
        "dmoe_reduce": mappings._dmoe_reduce(values(8, 32), rows),
        "dmoe_gather": mappings._dmoe_gather(values(rows[rank], 32), rows),
    }
    assert torch.equal(own, before), "a shard that is gathered may be read by others"
    weight = values(*SHAPE).requires_grad_()
    copied = mappings._CopyToModelParallelRegion.apply(weight)
    found["copied"] = mappings._ReduceFromModelParallelRegion.apply(copied * 2)
    found["copied"].square().mean().backward()
    found["gradient"] = weight.grad
    return {name: tensor.detach() for name, tensor in found.items()}


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("neox")
    gpt_neox.write(folder)
    both = {"codec": "blockint", "bits": 4, "backward": {"bits": 8}}
    cases: dict[str, tuple[dict[str, Any] | None, bool]] = {
        "no block": (None, False),
        "none": ({"tp": "none", "min_bytes": 0}, False),
        "raw": ({"tp": "bf16", "min_bytes": 0}, True),
        "blockint": ({"tp": both, "min_bytes": 0}, False),
        "small": ({"tp": "blockint"}, False),
    }
    found = run_ranks(2, exchange_all, str(folder), list(cases.values()))
    return {name: [rank[i] for rank in found] for i, name in enumerate(cases)}


def exchange_all(folder: str, cases: list[Any]) -> list[dict[str, Any]]:
    os.environ.pop("HYBRIDCOMP_CONFIG", None)
    return [exchange(folder, *case) for case in cases]


@pytest.mark.parametrize("name", ["none", "raw", "small"])
def test_exact_paths_are_bit_identical(
    exchanged: dict[str, list[dict[str, Any]]], name: str
) -> None:
    for one, two in zip(exchanged[name], exchanged["no block"], strict=True):
        assert all(torch.equal(one[key], two[key]) for key in two)
    messages, native, raw, wire = exchanged[name][0]["ledger"]["tp", "forward"]
    assert messages == (10 if name == "raw" else 9)
    assert native == (0 if name == "raw" else 9)
    assert raw == wire if name != "raw" else raw <= wire  # padded to the longest


def test_lossy_values_are_close_and_equal_on_both_ranks(
    exchanged: dict[str, list[dict[str, Any]]],
) -> None:
    one, two = exchanged["blockint"]
    for key in ("reduce", "gather", "gather0", "gather1", "dmoe_reduce", "dmoe_gather", "gradient"):
        assert torch.equal(one[key], two[key]), key
    for rank, exact in zip(exchanged["blockint"], exchanged["no block"], strict=True):
        for key, values in exact.items():
            error = (rank[key] - values).norm() / values.norm()
            assert 0 < error < 0.25, key


def test_directions_have_their_codecs(exchanged: dict[str, list[dict[str, Any]]]) -> None:
    numel = torch.Size(SHAPE).numel()
    ledger = exchanged["blockint"][0]["ledger"]
    messages, native, raw, wire = ledger["tp", "backward"]
    assert (messages, native, raw) == (1, 0, numel * 4)
    assert wire == make_codec("blockint", bits=8).wire_nbytes(numel, torch.float32)
    messages, native, raw, wire = ledger["tp", "forward"]
    assert (messages, native) == (9, 0)
    assert raw / wire == pytest.approx(32 / 4.26, rel=0.1)
